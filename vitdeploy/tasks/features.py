"""Features: their similarity, and the nearest neighbours they retrieve."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import DataError
from vitdeploy.tasks import adapter, classification
from vitdeploy.tasks.answers import Metric, Said
from vitdeploy.verification.changes import Changes, judged
from vitdeploy.verification.comparison import Comparison, Fields, counted_agreement, paired_accuracy, paired_counts
from vitdeploy.verification.records import Answers

# --- Compares the nearest images by an artifact's features with those by the original's -------------------------------


Features = npt.NDArray[np.float32]

# Rows of the similarity table in memory at once.
BLOCK = 1024
# Cosines closer than this differ only by float32 rounding: copies of an image count as one answer.
ROUNDING = 1e-6


@dataclass(frozen=True, kw_only=True)
class FeatureComparison(Comparison):
    """The features of an artifact against the original's. The metric is "1-NN top-1": the percent of images whose
    nearest other image has their class (leave-one-out; cosine; as DINO, arXiv 2104.14294, with k = 1).

    drop has the paired interval of Newcombe 1998, method 10. agreement: percent of images whose nearest other image is
        the same as with the original's features, with its Wilson interval.
    cosine_mean, cosine_min: between the artifact's and the original's features of an image.
    """

    cosine_mean: float
    cosine_min: float


def compare_features(
    features: Features, reference: Features, labels: npt.NDArray[np.int64] | None
) -> FeatureComparison:
    """Compare float32 [n, width], n >= 2, with the original's for the same images; labels int64 [n] or None.

    Labels without two equal ones say nothing about neighbours and are treated as None.

    Raises:
        ValueError: other shapes.
        DataError: a single image, which has no neighbour.
    """
    if features.shape != reference.shape or features.ndim != 2:
        raise ValueError(f"features {features.shape} against {reference.shape}")
    if len(features) < 2:
        raise DataError(
            "vectors are compared by their nearest other image, and there is only one image",
            found="1 evaluation image",
            expected="2 or more",
            fix="add images (data.path of a recipe, --data), or evaluate on more (data.evaluation.images)",
        )
    n = len(features)
    a, b = unit(features), unit(reference)
    cosine = (a * b).sum(axis=1)
    nearest, originals, apart = _neighbours(a, b)
    accuracy: Fields = {}
    if labels is not None and len(np.unique(labels)) < n:
        accuracy = paired_accuracy(*paired_counts(labels[nearest] == labels, labels[originals] == labels))
    return FeatureComparison(
        n=n,
        metric="1-NN top-1" if accuracy else None,
        **counted_agreement(int((apart <= ROUNDING).sum()), n),
        agreement_of="images with the same nearest image",
        max_difference=float(np.abs(features - reference).max()) / max(float(np.abs(reference).max()), 1e-300),
        cosine_mean=float(cosine.mean()),
        cosine_min=float(cosine.min()),
        **accuracy,
    )


def neighbour_changes(features: Features, reference: Features, labels: npt.NDArray[np.int64] | None) -> Changes:
    """Return the changed images: those with a different nearest other image; the farther by the original's features,
    the worse."""
    nearest, originals, apart = _neighbours(unit(features), unit(reference))
    right = (None, None) if labels is None else (labels[nearest] == labels, labels[originals] == labels)
    return judged(apart > ROUNDING, apart, *right)


def _neighbours(a: npt.NDArray[np.float64], b: npt.NDArray[np.float64]) -> tuple[np.ndarray, ...]:
    """Return the nearest other image by features `a`, int64 [n], and by `b`, int64 [n]; and by how much the second is
    closer than the first by `b`, float64 [n]."""
    n = len(a)
    nearest, originals, apart = np.empty(n, np.int64), np.empty(n, np.int64), np.empty(n)
    for start in range(0, n, BLOCK):
        rows = np.arange(start, min(start + BLOCK, n))
        ours, theirs = (similarities(each, rows) for each in (a, b))
        nearest[rows], originals[rows] = ours.argmax(axis=1), theirs.argmax(axis=1)
        apart[rows] = theirs.max(axis=1) - theirs[np.arange(len(rows)), nearest[rows]]
    return nearest, originals, apart


def unit(features: Features) -> npt.NDArray[np.float64]:
    """Return features normalised to length 1, as float64; zeros stay zeros."""
    wide = features.astype(np.float64)
    return np.asarray(wide / np.maximum(np.linalg.norm(wide, axis=1, keepdims=True), 1e-300))


def similarities(unit: npt.NDArray[np.float64], rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Return the cosines of `rows` with all images, float64 [rows, n]; minus infinity for an image with itself."""
    table = unit[rows] @ unit.T
    table[np.arange(len(rows)), rows] = -np.inf
    return np.asarray(table)


# --- Features: the vector of an image, and whether it still finds the same neighbours ---------------------------------


VECTOR = "features"


class FeaturesAdapter(adapter.ImageAdapter):
    compared = FeatureComparison
    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric(
            "1-NN top-1",
            "1-NN top-1 is the share of images whose nearest other image has their class.",
            words="1-NN top-1 accuracy",
        ),
    )
    measures = classification.COSINES
    score = "the cosine similarity"
    attention = True

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Return only the vector: patch features of all images would not fit into memory."""
        return {VECTOR: outputs[VECTOR]}

    def compare(self, ours: Answers, reference: Answers, data: adapter.Data) -> Comparison:
        return compare_features(ours.stacked(VECTOR), reference.stacked(VECTOR), adapter.labels_of(data))

    def unrelated(self, ours: Answers, reference: Answers, data: adapter.Data) -> Iterator[Answers]:
        """Also the images themselves, at a few pixels per side: copies and video frames are neighbours to any model."""
        yield from super().unrelated(ours, reference, data)
        width = len(reference.columns[VECTOR][0])
        pixels = np.stack([_few_pixels(image) for image, _ in self.pixels(data)])
        # A random projection from one width to another preserves angles (Johnson and Lindenstrauss 1984).
        directions = np.random.RandomState(0).standard_normal((pixels.shape[1], width))
        yield Answers({**reference.columns, VECTOR: list((pixels @ directions).astype(np.float32))})

    def doubt(self, reference: Answers, data: adapter.Data, found: Comparison) -> str | None:
        return None

    def changes(self, ours: Answers, reference: Answers, data: adapter.Data) -> Changes:
        return neighbour_changes(ours.stacked(VECTOR), reference.stacked(VECTOR), adapter.labels_of(data))

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        """Return the nearest other image as the answer."""
        vectors = answers.stacked(VECTOR).astype(np.float64)
        unit = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-300)
        similarity = unit @ unit[index]
        similarity[index] = -np.inf
        nearest = int(similarity.argmax())
        return Said(f"nearest: image {nearest}", float(np.clip(similarity[nearest], 0, 1)))


def _few_pixels(image: np.ndarray) -> np.ndarray:
    """Return the sums over 8 x 8 cells of an image [h, w, channels], minus their mean: float64 [8 * 8 * channels] at
    most."""
    rows, columns = (np.arange(min(8, size)) * size // min(8, size) for size in image.shape[:2])
    sums = np.add.reduceat(np.add.reduceat(image.astype(np.float64), rows, axis=0), columns, axis=1)
    return np.asarray((sums - sums.mean()).ravel())
