"""Classification: class folders, top-1 and top-5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from vitdeploy.data.folder import digest, split
from vitdeploy.errors import DataError
from vitdeploy.pipeline.progress import Progress
from vitdeploy.pipeline.tasks.images import check_images
from vitdeploy.pipeline.tasks.kit import Data, DataChoice, ImageKit, check_labels
from vitdeploy.runtime.postprocess import classify
from vitdeploy.verify.agreement import compare
from vitdeploy.verify.collect import Answers


class ClassificationKit(ImageKit):
    def load(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Data:
        check_labels(choice, ("folders", "none"), self.setting.task)
        labels: Any = choice.labels
        found = split(
            choice.path,
            labels,
            calibration=choice.calibration,
            evaluation=choice.evaluation,
            seed=choice.seed,
        )
        self._check_classes(found.classes)
        found, skipped = check_images(found, self.setting.images, skip_bad=skip_bad, progress=progress)
        return Data(
            root=choice.path,
            calibration=found.calibration,
            evaluation=found.evaluation,
            calibration_digest=digest(found.calibration, choice.path),
            evaluation_digest=digest(found.evaluation, choice.path),
            classes=found.classes,
            skipped=skipped,
        )

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
