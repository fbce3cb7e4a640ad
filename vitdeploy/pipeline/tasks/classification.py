"""Classification: class folders, top-1 and top-5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from vitdeploy.errors import DataError
from vitdeploy.pipeline.tasks.kit import Data, DataChoice, Found, ImageKit
from vitdeploy.runtime.postprocess import classify
from vitdeploy.verify.agreement import compare
from vitdeploy.verify.collect import Answers


class ClassificationKit(ImageKit):
    def find(self, choice: DataChoice) -> Found:
        found = super().find(choice)
        self._check_classes(found.parts.classes)
        return found

    def _check_classes(self, classes: tuple[str, ...]) -> None:
        """Labels come from folders, so there must be one folder a class."""
        if classes and self.setting.classes not in (None, len(classes)):
            raise DataError(
                "the class folders do not fit the model",
                found=f"{len(classes)} folders, {self.setting.classes} outputs of the model",
                wanted="one folder a class, in the model's class order by name",
                fix="add the missing folders (they may be empty), or set data.labels to none",
            )

    def compare(self, ours: Answers, reference: Answers, data: Data) -> dict[str, Any]:
        samples = data.evaluation
        labels = None if samples[0].label is None else np.array([sample.label for sample in samples], np.int64)
        return asdict(compare(ours.stacked("logits"), reference.stacked("logits"), labels))

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> dict[str, Any]:
        best = classify(answers.columns["logits"][index], labels, 1)
        return {"label": best.label, "score": best.score}
