"""Features: the vector of an image, and whether it still finds the same neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from vitdeploy.data.folder import digest, split
from vitdeploy.pipeline.progress import Progress
from vitdeploy.pipeline.tasks.images import check_images
from vitdeploy.pipeline.tasks.kit import Data, DataChoice, ImageKit, check_labels
from vitdeploy.verify.collect import Answers
from vitdeploy.verify.features import compare_features

VECTOR = "features"


class FeaturesKit(ImageKit):
    def load(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Data:
        check_labels(choice, ("folders", "none"), self.setting.task)
        labels: Any = choice.labels
        found = split(
            choice.path, labels, calibration=choice.calibration, evaluation=choice.evaluation, seed=choice.seed
        )
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

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """The vector alone: patch features of all images would not fit into memory."""
        return {VECTOR: outputs[VECTOR]}

    def compare(self, ours: Answers, reference: Answers, data: Data) -> dict[str, Any]:
        samples = data.evaluation
        labels = None if samples[0].label is None else np.array([sample.label for sample in samples], np.int64)
        return asdict(compare_features(ours.stacked(VECTOR), reference.stacked(VECTOR), labels))

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> dict[str, Any]:
        """The nearest other image, which is what features are for."""
        vectors = answers.stacked(VECTOR).astype(np.float64)
        unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-300)
        similarity = unit @ unit[index]
        similarity[index] = -np.inf
        nearest = int(similarity.argmax())
        return {"label": f"nearest: image {nearest}", "score": float(np.clip(similarity[nearest], 0, 1))}
