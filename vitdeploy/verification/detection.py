"""Compares a detector's objects with the original's, and both with the labelled ones."""

from __future__ import annotations

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vitdeploy.data.detection import Boxes
from vitdeploy.errors import DataError
from vitdeploy.verification.average_precision import Matched, Objects, average_precision, match_boxes, matches_of
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.intervals import least_of_difference, least_of_share, percentile_interval, replicates
from vitdeploy.verification.records import Records, Table

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
    records = detection_records(artifact, reference, truth, threshold=threshold)
    return detection_comparison(records, threshold=threshold, max_difference=max_difference, seed=seed)


def detection_records(
    artifact: Sequence[Objects], reference: Sequence[Objects], truth: Sequence[Boxes] | None, *, threshold: float
) -> Records:
    """What `detection_comparison` needs of each image; arguments and errors as of `compare_detections`, but for
    DataError. For the tables see `object_records`."""
    require_together(artifact, reference, truth)
    pairs = [pair(_shown(a, threshold), _shown(b, threshold)) for a, b in zip(artifact, reference, strict=True)]
    shown = [[int((each.scores >= threshold).sum()) for each in side] for side in (artifact, reference)]
    matched = None if truth is None else [match_boxes(each, truth) for each in distinct(artifact, reference)]
    return object_records(pairs, shown, matched)


def detection_comparison(
    records: Records, *, threshold: float, max_difference: float, seed: int = 0
) -> DetectionComparison:
    """The comparison that the records of all images are of; arguments and errors as of `compare_detections`."""
    pairs = records["pairs"]
    return DetectionComparison(
        n=records.n,
        metric="mAP" if "objects" in records else None,
        **shared_objects(records, seed),
        agreement_of=f"objects of score {threshold:g} or more with the same class and IoU {MATCH_IOU:g} or more",
        max_difference=max_difference,
        threshold=threshold,
        objects=int(records["images"]["shown"][:, 1].sum()),
        iou_mean=float(pairs["iou"].mean()) if len(pairs) else None,
        score_difference_mean=float(pairs["apart"].mean()) if len(pairs) else None,
        **(accuracy_of(records, seed, "mAP") if "objects" in records else {}),
    )


def require_together(artifact: Sized, reference: Sized, truth: Sized | None) -> None:
    """Raise ValueError for lists of different lengths, or no image."""
    n = len(reference)
    if not n or len(artifact) != n or (truth is not None and len(truth) != n):
        raise ValueError(f"{len(artifact)} images against {n}, {'no' if truth is None else len(truth)} labels")


T = TypeVar("T")


def distinct(artifact: T, reference: T) -> list[T]:
    """Both; one where they are the same, as of the original against itself."""
    return [artifact] if artifact is reference else [artifact, reference]


def object_records(
    pairs: Sequence[npt.NDArray[np.float64]], shown: Sequence[Sequence[int]], matched: Sequence[Matched] | None
) -> Records:
    """Records of images with objects.

    Tables: images, with how many objects are `shown` by the artifact and the original, int32 [n, 2]; pairs, with their
    `iou` and how far scores are `apart`. With labels, ours and theirs: what each side found (`Matched.detections`); and
    objects: the labelled ones (`Matched.objects`), `found` bool [objects, 2].

    Args:
        pairs: of each image, as of `pair`. shown: of each side and image. matched: of each side, one where both are the
            same; None without labels.
    """
    n = len(pairs)
    tables = {
        "images": Table.each(shown=np.array(shown, np.int32).T),
        "pairs": Table.of([{"iou": each[:, 0], "apart": each[:, 1]} for each in pairs]),
    }
    if matched is None:
        return Records(n, tables)
    ours, theirs = matched[0], matched[-1]
    found = np.stack([ours.objects["found"], theirs.objects["found"]], axis=1)
    objects = Table(theirs.objects.image, {**theirs.objects.columns, "found": found})
    return Records(n, {**tables, "ours": ours.detections, "theirs": theirs.detections, "objects": objects})


def shared_objects(records: Records, seed: int) -> dict[str, Any]:
    """The agreement fields of a `Comparison`."""
    matched = np.bincount(records["pairs"].image, minlength=records.n).astype(np.float64)
    total = records["images"]["shown"].astype(np.float64).sum(axis=1)
    agreement = float(_share(np.ones(len(matched)), matched, total))
    least = least_of_share(agreement / 100, int(total.sum()) // 2)
    drawn = replicates(records.n, seed, lambda weights: _share(weights, matched, total))
    return {
        "agreement": agreement,
        "agreement_ci95": percentile_interval(agreement, drawn, least, (0.0, 100.0)),
    }


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


def accuracy_of(records: Records, seed: int, metric: str) -> dict[str, Any]:
    """The accuracy fields of a `Comparison`, and AP at IoU 0.50 and 0.75, of both sides' matches with the labels.

    Raises:
        DataError: the labels hold no object.
    """
    n, objects = records.n, records["objects"]
    if objects["ignored"].all():
        raise DataError(
            f"the labels hold not one object, so there is no {metric}",
            found=f"{n} images without objects",
            fix="check that images and labels belong together, or verify without labels",
        )
    ours, theirs = (
        matches_of(
            Matched(records[side], Table(objects.image, {**objects.columns, "found": objects["found"][:, k]})), n
        )
        for k, side in enumerate(("ours", "theirs"))
    )
    whole = np.ones((1, n))
    a, b = (100 * average_precision(each, whole)[0] for each in (ours, theirs))
    drop = float(b.mean() - a.mean())
    spread = replicates(
        n,
        seed,
        lambda weights: 100 * (average_precision(theirs, weights) - average_precision(ours, weights)).mean(axis=1),
    )
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
