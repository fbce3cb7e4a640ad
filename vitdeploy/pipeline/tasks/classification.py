"""Classification: class folders, top-1 and top-5."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from vitdeploy.errors import DataError
from vitdeploy.pipeline.tasks.kit import Data, DataChoice, Found, ImageKit, labels_of
from vitdeploy.runtime.postprocess import classify, softmax
from vitdeploy.verify.agreement import compare
from vitdeploy.verify.changes import Changes, judged
from vitdeploy.verify.classes import Classified
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
        return asdict(compare(ours.stacked("logits"), reference.stacked("logits"), labels_of(data)))

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        """The surer the new answer, the worse."""
        found, original, labels = _best(ours), _best(reference), labels_of(data)
        right = (None, None) if labels is None else (found == labels, original == labels)
        return judged(found != original, _scores(ours).max(axis=1), *right)

    def classified(self, answers: Answers, data: Data) -> Classified | None:
        labels = labels_of(data)
        return None if labels is None else Classified(labels, _best(answers), _scores(answers).max(axis=1))

    def certainty(self, answers: Answers) -> np.ndarray:
        """By how much the best class is above the second."""
        best = np.sort(_scores(answers), axis=1)[:, -2:]
        return np.asarray(best[:, -1] - best[:, 0])

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> dict[str, Any]:
        best = classify(answers.columns["logits"][index], labels, 1)
        return {"label": best.label, "score": best.score}


def _best(answers: Answers) -> np.ndarray:
    return np.asarray(answers.stacked("logits").argmax(axis=1))


def _scores(answers: Answers) -> np.ndarray:
    return softmax(answers.stacked("logits"))
