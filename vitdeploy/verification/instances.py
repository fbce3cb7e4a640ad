"""Compares a model's instances with the original's, by their masks, and both with labelled ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.data.instances import Outlines
from vitdeploy.runtime.instances import overlaps
from vitdeploy.runtime.run_lengths import RunLengths
from vitdeploy.verification.average_precision import Matched, match_rows
from vitdeploy.verification.changes import Changes, judged
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.detection import (
    MATCH_IOU,
    accuracy_of,
    distinct,
    object_records,
    paired,
    require_together,
    shared_objects,
)
from vitdeploy.verification.records import Records


@dataclass(frozen=True)
class Masks:
    """What a model found in one image: classes int64 [k], scores float64 [k], and a mask for each."""

    classes: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    runs: tuple[RunLengths, ...]

    def above(self, threshold: float) -> Masks:
        """Those with a score of at least `threshold`."""
        kept = np.flatnonzero(self.scores >= threshold)
        return Masks(self.classes[kept], self.scores[kept], tuple(self.runs[i] for i in kept))


@dataclass(frozen=True, kw_only=True)
class InstanceComparison(Comparison):
    """Instances against the original's. The metric is COCO's mAP of masks (mean over IoU .50:.05:.95 and classes), in
    percent.

    agreement: 200 m / (a + b) for the a and b instances that artifact and original show (score >= `threshold`), m of
        which form pairs of one class whose masks have an IoU of at least 0.5; 100 if neither shows any.
    instances: b. mask_iou_mean, score_difference_mean: over the pairs (None without any).
    """

    threshold: float
    instances: int
    mask_iou_mean: float | None
    score_difference_mean: float | None
    ap50: float | None = None
    reference_ap50: float | None = None
    ap75: float | None = None
    reference_ap75: float | None = None


def compare_instances(
    artifact: Sequence[Masks],
    reference: Sequence[Masks],
    truth: Sequence[Outlines] | None,
    *,
    threshold: float,
    max_difference: float,
    seed: int = 0,
) -> InstanceComparison:
    """Compare what the artifact and the original found in the same images, in the same order.

    Args:
        artifact, reference: all that they found, whatever its score: mAP is of the whole ranking.
        truth: the labelled objects with the models' class numbers (`Outlines.renumbered`), or None.
        threshold: the score from which a user sees an instance.
        max_difference: of the raw outputs, passed on.

    Raises:
        ValueError: lists of different lengths, or no image.
        DataError: not one labelled object in all images.
        MissingPackageError: there are labels, and pycocotools is not installed.
    """
    records = instance_records(artifact, reference, truth, threshold=threshold)
    return instance_comparison(records, threshold=threshold, max_difference=max_difference, seed=seed)


def instance_records(
    artifact: Sequence[Masks], reference: Sequence[Masks], truth: Sequence[Outlines] | None, *, threshold: float
) -> Records:
    """What `instance_comparison` needs of each image; arguments and errors as of `compare_instances`, but for
    DataError. For the tables see `detection.object_records`."""
    require_together(artifact, reference, truth)
    shown = [[each.above(threshold) for each in side] for side in (artifact, reference)]
    pairs = [_paired(a, b)[1] for a, b in zip(*shown, strict=True)]
    matched = None if truth is None else [_matched(each, truth) for each in distinct(artifact, reference)]
    return object_records(pairs, [[len(each.scores) for each in side] for side in shown], matched)


def instance_comparison(
    records: Records, *, threshold: float, max_difference: float, seed: int = 0
) -> InstanceComparison:
    """The comparison that the records of all images are of; arguments and errors as of `compare_instances`."""
    pairs = records["pairs"]
    return InstanceComparison(
        n=records.n,
        metric="mask mAP" if "objects" in records else None,
        **shared_objects(records, seed),
        agreement_of=f"instances of score {threshold:g} or more with the same class and mask IoU {MATCH_IOU:g} or more",
        max_difference=max_difference,
        threshold=threshold,
        instances=int(records["images"]["shown"][:, 1].sum()),
        mask_iou_mean=float(pairs["iou"].mean()) if len(pairs) else None,
        score_difference_mean=float(pairs["apart"].mean()) if len(pairs) else None,
        **(accuracy_of(records, seed, "mAP of masks") if "objects" in records else {}),
    )


def instance_changes(artifact: Sequence[Masks], reference: Sequence[Masks]) -> Changes:
    """Changed images: those with a visible instance that has no partner on the other side; more such instances, and
    higher scores, are worse."""
    lonely = np.zeros(len(reference))
    for i, (a, b) in enumerate(zip(artifact, reference, strict=True)):
        both = _paired(a, b)[0]
        lonely[i] = np.delete(a.scores, both[:, 0]).sum() + np.delete(b.scores, both[:, 1]).sum()
    return judged(lonely > 0, lonely / (1 + lonely))


def _paired(a: Masks, b: Masks) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    return paired(a, b, overlaps(a.runs, b.runs))


def _matched(found: Sequence[Masks], truth: Sequence[Outlines]) -> Matched:
    """Matches by IoU of masks, of all classes that are found or labelled. Ids start at 1: 0 is "no match"."""
    labelled = {int(c) for known in truth for c in known.classes}
    classes = sorted(labelled | {int(c) for masks in found for c in masks.classes})
    images = [{"id": i, "width": each.size[0], "height": each.size[1]} for i, each in enumerate(truth, 1)]
    common: dict[str, Any] = {"images": images, "categories": [{"id": c} for c in classes]}
    labels: list[dict[str, Any]] = []
    detections: list[dict[str, Any]] = []
    for i, (known, masks) in enumerate(zip(truth, found, strict=True), 1):
        for c, outline, crowd in zip(known.classes.tolist(), known.outlines, known.crowd.tolist(), strict=True):
            entry = {"image_id": i, "category_id": c, "segmentation": outline, "area": 0.0, "iscrowd": int(crowd)}
            labels.append({"id": len(labels) + 1, **entry})
        for c, score, runs in zip(masks.classes.tolist(), masks.scores.tolist(), masks.runs, strict=True):
            entry = {"image_id": i, "category_id": c, "segmentation": runs.to_dict(), "area": runs.area, "iscrowd": 0}
            detections.append({"id": len(detections) + 1, **entry, "score": score})
    return match_rows({**common, "annotations": labels}, {**common, "annotations": detections}, "segm")
