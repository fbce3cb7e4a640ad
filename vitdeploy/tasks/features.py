"""Features: the vector of an image, and whether it still finds the same neighbours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vitdeploy.document.answers import Said
from vitdeploy.tasks.adapter import Data, ImageKit, labels_of
from vitdeploy.verification.changes import Changes
from vitdeploy.verification.collect import Answers
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.features import compare_features, neighbour_changes

VECTOR = "features"


class FeaturesKit(ImageKit):
    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """The vector alone: patch features of all images would not fit into memory."""
        return {VECTOR: outputs[VECTOR]}

    def compare(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        return compare_features(ours.stacked(VECTOR), reference.stacked(VECTOR), labels_of(data))

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        return neighbour_changes(ours.stacked(VECTOR), reference.stacked(VECTOR), labels_of(data))

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        """The nearest other image, which is what features are for."""
        vectors = answers.stacked(VECTOR).astype(np.float64)
        unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-300)
        similarity = unit @ unit[index]
        similarity[index] = -np.inf
        nearest = int(similarity.argmax())
        return Said(f"nearest: image {nearest}", float(np.clip(similarity[nearest], 0, 1)))
