"""Compares a detector's objects with the original's, and both with the labelled ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vitdeploy.data.detection import Boxes
from vitdeploy.errors import DataError
from vitdeploy.verification.average_precision import Matches, Objects, average_precision, match
from vitdeploy.verification.bootstrap import draws, least_of_difference, least_of_share, percentile_interval
from vitdeploy.verification.comparison import Comparison

MATCH_IOU = 0.5


@dataclass(frozen=True, kw_only=True)
class DetectionComparison(Comparison):
    """A detector against the original. The metric is COCO's mAP (mean over IoU .50:.05:.95 and classes), in percent.

    agreement: 200 m / (a + b) for the a and b objects that artifact and original show (score >= `threshold`), m of
        which form pairs of one class with an IoU of at least 0.5; 100 if neither shows any (`objects` is 0 then).
    objects: b. iou_mean, score_difference_mean: over the pairs (None without any).
    """

    threshold: float
    objects: int
    iou_mean: float | None
    score_difference_mean: float | None
    ap50: float | None = None
    reference_ap50: float | None = None
    ap75: float | None = None
    reference_ap75: float | None = None


def compare_detections(
    artifact: Sequence[Objects],
    reference: Sequence[Objects],
    truth: Sequence[Boxes] | None,
    *,
    threshold: float,
    max_difference: float,
    seed: int = 0,
) -> DetectionComparison:
    """Compare what the artifact and the original found in the same images, in the same order.

    mAP counts all detections, whatever their score, so pass all of them.

    Args:
        truth: the labelled objects with the models' class numbers (`Boxes.renumbered`), or None.
        threshold: the score from which a user sees an object.
        max_difference: of the raw outputs, passed on.

    Raises:
        ValueError: lists of different lengths, or no image.
        DataError: not one labelled object in all images.
        MissingPackageError: there are labels, and pycocotools is not installed.
    """
    n = len(reference)
    if not n or len(artifact) != n or (truth is not None and len(truth) != n):
        raise ValueError(f"{len(artifact)} images against {n}, {'no' if truth is None else len(truth)} labels")
    weights = draws(n, seed)
    pairs = [pair(_shown(a, threshold), _shown(b, threshold)) for a, b in zip(artifact, reference, strict=True)]
    seen = [[int((each.scores >= threshold).sum()) for each in side] for side in (artifact, reference)]
    joined = np.concatenate(pairs)
    accuracy = _accuracy(artifact, reference, truth, weights) if truth is not None else {}
    return DetectionComparison(
        n=n,
        metric="mAP" if truth is not None else None,
        **shared_objects([len(each) for each in pairs], seen, weights),
        agreement_of=f"objects of score {threshold:g} or more with the same class and IoU {MATCH_IOU:g} or more",
        max_difference=max_difference,
        threshold=threshold,
        objects=sum(seen[1]),
        iou_mean=float(joined[:, 0].mean()) if len(joined) else None,
        score_difference_mean=float(joined[:, 1].mean()) if len(joined) else None,
        **accuracy,
    )


def shared_objects(
    pairs: Sequence[int], seen: Sequence[Sequence[int]], weights: npt.NDArray[np.float64]
) -> dict[str, Any]:
    """The agreement fields of a `Comparison`, from each image's number of pairs, and of objects that each side shows;
    `weights` are the draws of the bootstrap."""
    matched, total = np.array(pairs, np.float64), np.array(seen, np.float64).sum(axis=0)
    agreement = float(_share(np.ones(len(matched)), matched, total))
    least = least_of_share(agreement / 100, int(total.sum()) // 2)
    interval = percentile_interval(agreement, _share(weights, matched, total), least, (0.0, 100.0))
    return {"agreement": agreement, "agreement_ci95": interval}


def _shown(objects: Objects, threshold: float) -> Objects:
    kept = objects.scores >= threshold
    return Objects(objects.classes[kept], objects.scores[kept], objects.boxes[kept])


def _share(weights: npt.NDArray[np.float64], matched: npt.NDArray[np.float64], total: npt.NDArray[np.float64]) -> Any:
    """200 m / (a + b) of weighted images; 100 without objects."""
    m, both = weights @ matched, weights @ total
    return np.where(both > 0, 200 * m / np.maximum(both, 1), 100.0)


def pair(a: Objects, b: Objects) -> npt.NDArray[np.float64]:
    """Pairs of one object of each, of one class and with IoU >= 0.5: float64 [pairs, 2], IoU and |score difference|.

    Each object is in one pair at most. The pair with the largest IoU is formed first (of equal ones, that of the
    nearest scores): unlike COCO's order by score this is symmetric, and two scores that swap places do not break
    well-fitting pairs.
    """
    return _paired(a, b)[1]


def partners(a: Objects, b: Objects) -> npt.NDArray[np.int64]:
    """Which object of each is in a pair (see `pair`): int64 [pairs, 2]."""
    return _paired(a, b)[0]


class Scored(Protocol):
    """Objects with their classes int64 [k] and scores float [k]."""

    @property
    def classes(self) -> npt.NDArray[np.int64]: ...
    @property
    def scores(self) -> npt.NDArray[np.floating[Any]]: ...


def _paired(a: Objects, b: Objects) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    return paired(a, b, iou(a.boxes, b.boxes))


def paired(
    a: Scored, b: Scored, overlap: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """What `partners` and `pair` return, by the IoU of each of `a` with each of `b`."""
    possible = (a.classes[:, None] == b.classes) & (overlap >= MATCH_IOU)
    rows, columns = np.nonzero(possible)
    apart = np.abs(a.scores[rows].astype(np.float64) - b.scores[columns])
    free_rows, free_columns = np.ones(len(a.classes), bool), np.ones(len(b.classes), bool)
    places, pairs = [], []
    for k in np.lexsort((apart, -overlap[rows, columns])):
        i, j = rows[k], columns[k]
        if free_rows[i] and free_columns[j]:
            free_rows[i] = free_columns[j] = False
            places.append((i, j))
            pairs.append((overlap[i, j], apart[k]))
    return np.array(places, np.int64).reshape(-1, 2), np.array(pairs, np.float64).reshape(-1, 2)


def iou(a: npt.NDArray[np.floating[Any]], b: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.float64]:
    """Intersection over union of boxes [n, 4] and [m, 4] given as x0 y0 x1 y1: float64 [n, m]; empty equal boxes: 1."""
    a, b = np.asarray(a, np.float64).reshape(-1, 1, 4), np.asarray(b, np.float64).reshape(1, -1, 4)
    common = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    intersection = common.clip(0).prod(axis=-1)
    union = (a[..., 2:] - a[..., :2]).clip(0).prod(axis=-1) + (b[..., 2:] - b[..., :2]).clip(0).prod(axis=-1)
    union = union - intersection
    return np.asarray(np.where(union > 0, intersection / np.where(union > 0, union, 1), (a == b).all(axis=-1)))


def _accuracy(
    artifact: Sequence[Objects],
    reference: Sequence[Objects],
    truth: Sequence[Boxes],
    weights: npt.NDArray[np.float64],
) -> dict[str, Any]:
    return accuracy_of(match(artifact, truth), match(reference, truth), weights, "mAP")


def accuracy_of(
    ours: Sequence[Matches], theirs: Sequence[Matches], weights: npt.NDArray[np.float64], metric: str
) -> dict[str, Any]:
    """The accuracy fields of a `Comparison`, and AP at IoU 0.50 and 0.75, of both sides' matches with the labels.

    Raises:
        DataError: the labels hold no object.
    """
    n = weights.shape[1]
    if not any(each.positives.any() for each in theirs):
        raise DataError(
            f"the labels hold not one object, so there is no {metric}",
            found=f"{n} images without objects",
            fix="check that images and labels belong together, or verify without labels",
        )
    whole = np.ones((1, n))
    a, b = (100 * average_precision(each, whole)[0] for each in (ours, theirs))
    drop = float(b.mean() - a.mean())
    spread = 100 * (average_precision(theirs, weights) - average_precision(ours, weights)).mean(axis=1)
    least = least_of_difference(*(np.concatenate([each.found for each in side]) for side in (theirs, ours)))
    return {
        "value": float(a.mean()),
        "reference_value": float(b.mean()),
        "drop": drop,
        "drop_ci95": percentile_interval(drop, spread, least, (-100.0, 100.0)),
        "ap50": float(a[0]),
        "reference_ap50": float(b[0]),
        "ap75": float(a[5]),
        "reference_ap75": float(b[5]),
    }
