"""Compares the objects that a model finds, by boxes or masks, with the original's, and both with labelled ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import DataError
from vitdeploy.verification.average_precision import Matched, Matches, average_precision, matches_of
from vitdeploy.verification.comparison import Comparison, resampled_accuracy, resampled_agreement
from vitdeploy.verification.intervals import Floats, replicates
from vitdeploy.verification.records import ImageRows, Records

MATCH_IOU = 0.5

Label = TypeVar("Label")
Found = TypeVar("Found", bound="_FoundObjects")
Compared = TypeVar("Compared", bound="DetectionComparison")


class _FoundObjects(Protocol):
    """Detections in one image: objects with their classes int64 [k] and scores float [k]."""

    @property
    def classes(self) -> npt.NDArray[np.int64]: ...
    @property
    def scores(self) -> npt.NDArray[np.floating[Any]]: ...
    def above(self: Found, threshold: float) -> Found:
        """Return the objects with a score of at least `threshold`."""

    def overlaps(self: Found, other: Found) -> Floats:
        """Return the IoU with each of `other`: float64 [k, others]."""


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
    # The name of the metric, in JSON documents and in prose; the names of the objects and of their overlap.
    WORDS: ClassVar[tuple[str, str, str, str]] = ("mAP", "mAP", "objects", "IoU")

    @classmethod
    def of(
        cls: type[Compared], records: Records, *, threshold: float, max_difference: float, seed: int = 0
    ) -> Compared:
        """Return the comparison for the records of all images (`object_records`).

        Args:
            max_difference: of the raw outputs, passed on.

        Raises:
            DataError: the labels contain no object.
        """
        metric, in_words, objects, overlap = cls.WORDS
        pairs, labelled = records["pairs"], "objects" in records
        return cls(
            n=records.n,
            metric=metric if labelled else None,
            **_agreement(records, seed),
            agreement_of=f"{objects} of score {threshold:g} or more with the same class and {overlap} {MATCH_IOU:g} "
            "or more",
            max_difference=max_difference,
            threshold=threshold,
            objects=int(records["images"]["shown"][:, 1].sum()),
            iou_mean=float(pairs["iou"].mean()) if len(pairs) else None,
            score_difference_mean=float(pairs["apart"].mean()) if len(pairs) else None,
            **(_accuracy(records, seed, in_words) if labelled else {}),
        )


def object_records(
    artifact: Sequence[Found],
    reference: Sequence[Found],
    truth: Sequence[Label] | None,
    match: Callable[[Sequence[Found], Sequence[Label]], Matched],
    *,
    threshold: float,
) -> Records:
    """Return the records for a comparison of objects in the same images, in the same order.

    Tables: images, with how many objects are `shown` by the artifact and the original, int32 [n, 2]; pairs, with their
    `iou` and how far scores are `apart`. With labels, ours and theirs: the detections of each side
    (`Matched.detections`); and objects: the labelled ones (`Matched.objects`), `found` bool [objects, 2].

    Args:
        artifact, reference: all detections of any score, since mAP covers the whole ranking.
        truth: the labelled objects with the models' class numbers, or None; `match` matches them with the detections.
        threshold: the score from which a user sees an object.

    Raises:
        ValueError: lists of different lengths, or no image.
        MissingPackageError: there are labels, and pycocotools is not installed.
    """
    n = len(reference)
    if not n or len(artifact) != n or (truth is not None and len(truth) != n):
        raise ValueError(f"{len(artifact)} images against {n}, {'no' if truth is None else len(truth)} labels")
    shown = [[each.above(threshold) for each in side] for side in (artifact, reference)]
    pairs = [pair(a, b) for a, b in zip(*shown, strict=True)]
    tables = {
        "images": ImageRows.each(shown=np.array([[len(each.scores) for each in side] for side in shown], np.int32).T),
        "pairs": ImageRows.of([{"iou": each[:, 0], "apart": each[:, 1]} for each in pairs]),
    }
    if truth is None:
        return Records(n, tables)
    ours = match(artifact, truth)
    theirs = ours if artifact is reference else match(reference, truth)
    found = np.stack([ours.objects["found"], theirs.objects["found"]], axis=1)
    objects = ImageRows(theirs.objects.image, {**theirs.objects.columns, "found": found})
    return Records(n, {**tables, "ours": ours.detections, "theirs": theirs.detections, "objects": objects})


def _agreement(records: Records, seed: int) -> dict[str, Any]:
    """Return the agreement fields of a `Comparison`."""
    matched = np.bincount(records["pairs"].image, minlength=records.n).astype(np.float64)
    total = records["images"]["shown"].astype(np.float64).sum(axis=1)
    drawn = replicates(records.n, seed, lambda weights: shared(weights, matched, total))
    return resampled_agreement(float(shared(np.ones(len(matched)), matched, total)), drawn, int(total.sum()) // 2)


def shared(weights: Floats, matched: Floats, total: Floats) -> Floats:
    """Return 200 m / (a + b) of weighted images with m matches among the a + b objects of both sides; 100 without
    objects."""
    m, both = weights @ matched, weights @ total
    return np.where(both > 0, 200 * m / np.maximum(both, 1), 100.0)


def pair(a: Found, b: Found) -> Floats:
    """Return pairs of one object per side with the same class and IoU >= 0.5: float64 [pairs, 2], IoU and |score
    difference|.

    Each object is in one pair at most. The pair with the largest IoU is formed first (ties: closest scores first):
    unlike COCO's order by score this is symmetric, and two scores that swap places do not break well-fitting pairs.
    """
    return _paired(a, b)[1]


def partners(a: Found, b: Found) -> npt.NDArray[np.int64]:
    """Return the indices of the paired objects of both sides (see `pair`): int64 [pairs, 2]."""
    return _paired(a, b)[0]


def _paired(a: Found, b: Found) -> tuple[npt.NDArray[np.int64], Floats]:
    overlap = a.overlaps(b)
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


def _accuracy(records: Records, seed: int, metric: str) -> dict[str, Any]:
    """Return the accuracy fields of a `Comparison`, and AP at IoU 0.50 and 0.75, from both sides' matches with the
    labels."""
    n, objects = records.n, records["objects"]
    if objects["ignored"].all():
        raise DataError(
            f"the labels contain no object, so {metric} is undefined",
            found=f"{n} images without objects",
            fix="check that the labels belong to these images, or verify without labels (data.labels: none)",
        )
    ours, theirs = (
        matches_of(
            Matched(records[side], ImageRows(objects.image, {**objects.columns, "found": objects["found"][:, k]})), n
        )
        for k, side in enumerate(("ours", "theirs"))
    )
    return precision_fields(ours, theirs, n, seed)


def precision_fields(
    ours: Sequence[Matches], theirs: Sequence[Matches], n: int, seed: int, prefix: str = ""
) -> dict[str, Any]:
    """Return the accuracy fields of a `Comparison`, and AP at 0.50 and 0.75, from both sides' matches in n images."""
    whole = np.ones((1, n))
    a, b = (100 * average_precision(each, whole)[0] for each in (ours, theirs))
    spread = replicates(
        n,
        seed,
        lambda weights: 100 * (average_precision(theirs, weights) - average_precision(ours, weights)).mean(axis=1),
    )
    right = [np.concatenate([each.found for each in side]) for side in (ours, theirs)]
    fields = resampled_accuracy((float(a.mean()), float(b.mean())), spread, right)
    for side, values in (("", a), ("reference_", b)):
        fields |= {f"{side}{prefix}ap50": float(values[0]), f"{side}{prefix}ap75": float(values[5])}
    return fields
