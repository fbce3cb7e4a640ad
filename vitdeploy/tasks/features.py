"""Features: the vector of an image, and whether it still finds the same neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

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

    def unrelated(self, ours: Answers, reference: Answers, data: Data) -> Iterator[Answers]:
        """And the images themselves, at a few pixels a side: copies and frames of a film are neighbours to any
        model."""
        yield from super().unrelated(ours, reference, data)
        width = len(reference.columns[VECTOR][0])
        pixels = np.stack([_few_pixels(image) for image, _ in self.pixels(data)])
        # A random projection keeps angles (Johnson and Lindenstrauss 1984), of one width onto another.
        directions = np.random.RandomState(0).standard_normal((pixels.shape[1], width))
        yield Answers({**reference.columns, VECTOR: list((pixels @ directions).astype(np.float32))})

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


def _few_pixels(image: np.ndarray) -> np.ndarray:
    """The sum of each of 8 x 8 cells of an image [h, w, channels], about the mean of all: float64 [8 * 8 * channels] at
    most."""
    rows, columns = (np.arange(min(8, size)) * size // min(8, size) for size in image.shape[:2])
    sums = np.add.reduceat(np.add.reduceat(image.astype(np.float64), rows, axis=0), columns, axis=1)
    return np.asarray((sums - sums.mean()).ravel())
