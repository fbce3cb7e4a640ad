"""Compares the class maps of a semantic segmentation model with the original's, and both with labelled maps."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import DataError
from vitdeploy.verification.bootstrap import (
    Floats,
    draws,
    least_of_difference,
    least_of_share,
    percentile_interval,
)
from vitdeploy.verification.changes import MOVED_PIXELS, Changes, judged
from vitdeploy.verification.comparison import Comparison

# int [height, width] of classes; negative where there is none.
ClassMap = npt.NDArray[Any]
# From this IoU on a class of an image counts as found.
FOUND = 0.5


@dataclass(frozen=True, kw_only=True)
class SegmentationComparison(Comparison):
    """A segmentation model against the original. The metric is mIoU in percent: the IoU of each class over the pixels
    of all images, and the mean over the classes that occur in the labels or the answers (PASCAL VOC, 2012).

    agreement: percent of all pixels that have the original's class. Both intervals are bootstraps over the images.
    regions: pairs of an image and a class in the original's maps. pixel_accuracy: percent of the labelled pixels with
        the right class, the artifact's and the original's; None without labels.
    """

    regions: int
    pixel_accuracy: float | None = None
    reference_pixel_accuracy: float | None = None


def compare_segmentation(
    artifact: Iterable[ClassMap],
    reference: Iterable[ClassMap],
    truth: Iterable[ClassMap] | None,
    *,
    classes: int,
    max_difference: float,
    seed: int = 0,
) -> SegmentationComparison:
    """Compare the maps of the artifact and of the original of the same images, in the same order.

    Each iterable is read once, one image of each at a time.

    Args:
        truth: the labelled maps, negative where a pixel has no class, or None.
        classes: how many classes the models have.
        max_difference: of the raw outputs, passed on.

    Raises:
        ValueError: iterables of other lengths, or no image; maps of other sizes.
        DataError: not one labelled pixel in all images.
    """
    same: list[tuple[int, int]] = []
    ours, theirs = [], []
    regions = 0
    labels = () if truth is None else (truth,)
    for a, b, *labelled in zip(artifact, reference, *labels, strict=True):
        same.append((int((a == b).sum()), b.size))
        regions += len(np.unique(b[b >= 0]))
        for t in labelled:
            ours.append(tally(a, t, classes))
            theirs.append(tally(b, t, classes))
    if not same:
        raise ValueError("no image")
    weights = draws(len(same), seed)
    equal, pixels = np.array(same, np.float64).T
    agreement = 100 * float(equal.sum() / pixels.sum())
    return SegmentationComparison(
        n=len(same),
        metric="mIoU" if ours else None,
        agreement=agreement,
        agreement_ci95=percentile_interval(
            agreement,
            100 * (weights @ equal) / (weights @ pixels),
            least_of_share(agreement / 100, regions),
            (0.0, 100.0),
        ),
        agreement_of="pixels with the original's class",
        max_difference=max_difference,
        regions=regions,
        **(_accuracy(np.stack(ours), np.stack(theirs), weights) if ours else {}),
    )


def tally(found: ClassMap, truth: ClassMap, classes: int) -> npt.NDArray[np.int64]:
    """int64 [3, classes], pixels by class where the truth is known: of the class in both, in the answer, in the truth.

    Raises:
        ValueError: maps of other sizes.
    """
    if found.shape != truth.shape:
        raise ValueError(f"a map of {found.shape} and labels of {truth.shape}")
    known = truth >= 0
    a, t = found[known], truth[known]
    answered = a[a >= 0]
    return np.stack([np.bincount(each, minlength=classes)[:classes] for each in (t[a == t], answered, t)]).astype(
        np.int64
    )


def mean_iou(counts: Floats) -> Floats:
    """mIoU in percent of tallies [..., 3, classes], over the classes that occur; NaN where none does."""
    both, answered, labelled = np.moveaxis(counts, -2, 0)
    union = answered + labelled - both
    present = union > 0
    shares = np.where(present, both / np.maximum(union, 1), 0.0)
    with np.errstate(invalid="ignore"):
        return np.asarray(100 * shares.sum(axis=-1) / present.sum(axis=-1), np.float64)


def segmentation_changes(artifact: Iterable[ClassMap], reference: Iterable[ClassMap]) -> Changes:
    """Changed images: those with more than MOVED_PIXELS of their pixels in another class."""
    moved = np.array([float((a != b).mean()) for a, b in zip(artifact, reference, strict=True)])
    return judged(moved > MOVED_PIXELS, moved)


def _accuracy(ours: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64], weights: Floats) -> dict[str, Any]:
    if not ours[:, 2].sum():
        raise DataError(
            "the labels hold not one pixel with a class, so there is no mIoU",
            found=f"{len(ours)} maps without classes",
            fix="check postprocess.ignore and postprocess.reduce_labels, or verify without labels",
        )
    values = [float(mean_iou(each.sum(axis=0))) for each in (ours, theirs)]
    drawn = [mean_iou(np.tensordot(weights, each, axes=1)) for each in (ours, theirs)]
    labelled = ours[:, 2] > 0
    found = [
        (each[:, 0] / np.maximum(each[:, 1] + each[:, 2] - each[:, 0], 1) >= FOUND)[labelled] for each in (ours, theirs)
    ]
    drop = values[1] - values[0]
    right = [100 * float(each[:, 0].sum() / each[:, 2].sum()) for each in (ours, theirs)]
    return {
        "value": values[0],
        "reference_value": values[1],
        "drop": drop,
        "drop_ci95": percentile_interval(
            drop, drawn[1] - drawn[0], least_of_difference(found[1], found[0]), (-100.0, 100.0)
        ),
        "pixel_accuracy": right[0],
        "reference_pixel_accuracy": right[1],
    }
