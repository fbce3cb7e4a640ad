"""Classification: class folders, top-1 and top-5."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from vitdeploy.data.classes import match_folders
from vitdeploy.data.folder import DataSplit, Sample
from vitdeploy.pipeline.tasks.kit import Data, DataChoice, Found, ImageKit
from vitdeploy.runtime.postprocess import classify
from vitdeploy.verify.agreement import compare
from vitdeploy.verify.collect import Answers
from vitdeploy.verify.plausible import Indices, doubt_accuracy


class ClassificationKit(ImageKit):
    def find(self, choice: DataChoice) -> Found:
        """The images with the model's classes as their labels."""
        parts = super().find(choice).parts
        if not parts.classes:
            return Found(parts)
        found = match_folders(parts.classes, parts.empty, self.setting.labels, self.setting.classes)
        calibration, evaluation = (
            tuple(Sample(s.path, found.index[parts.classes[s.label]]) for s in part if s.label is not None)
            for part in (parts.calibration, parts.evaluation)
        )
        classes = parts.classes if found.how == "position" else self.setting.labels
        return Found(DataSplit(calibration, evaluation, classes), mapping=found)

    def compare(self, ours: Answers, reference: Answers, data: Data) -> dict[str, Any]:
        return asdict(compare(ours.stacked("logits"), reference.stacked("logits"), _labels(data)))

    def doubt(self, reference: Answers, data: Data, found: Mapping[str, Any]) -> str | None:
        labels = _labels(data)
        if labels is None:
            return None
        logits = reference.stacked("logits")
        text = doubt_accuracy(logits.argmax(axis=1), labels, logits.shape[1], self.setting.claim)
        return f"{text} ({data.mapping.text})" if text is not None and data.mapping is not None else text

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> dict[str, Any]:
        best = classify(answers.columns["logits"][index], labels, 1)
        return {"label": best.label, "score": best.score}


def _labels(data: Data) -> Indices | None:
    samples = data.evaluation
    return None if samples[0].label is None else np.array([sample.label for sample in samples], np.int64)
