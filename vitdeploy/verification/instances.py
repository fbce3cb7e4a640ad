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
from vitdeploy.verification.average_precision import Matches, match_documents
from vitdeploy.verification.bootstrap import draws
from vitdeploy.verification.changes import Changes, judged
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.detection import MATCH_IOU, accuracy_of, paired, shared_objects


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
    n = len(reference)
    if not n or len(artifact) != n or (truth is not None and len(truth) != n):
        raise ValueError(f"{len(artifact)} images against {n}, {'no' if truth is None else len(truth)} labels")
    weights = draws(n, seed)
    shown = [[each.above(threshold) for each in side] for side in (artifact, reference)]
    pairs = [_paired(a, b)[1] for a, b in zip(*shown, strict=True)]
    seen = [[len(each.scores) for each in side] for side in shown]
    joined = np.concatenate(pairs)
    accuracy: dict[str, Any] = {}
    if truth is not None:
        accuracy = accuracy_of(_matches(artifact, truth), _matches(reference, truth), weights, "mAP of masks")
    return InstanceComparison(
        n=n,
        metric="mask mAP" if truth is not None else None,
        **shared_objects([len(each) for each in pairs], seen, weights),
        agreement_of=f"instances of score {threshold:g} or more with the same class and mask IoU {MATCH_IOU:g} or more",
        max_difference=max_difference,
        threshold=threshold,
        instances=sum(seen[1]),
        mask_iou_mean=float(joined[:, 0].mean()) if len(joined) else None,
        score_difference_mean=float(joined[:, 1].mean()) if len(joined) else None,
        **accuracy,
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


def _matches(found: Sequence[Masks], truth: Sequence[Outlines]) -> list[Matches]:
    """Matches by IoU of masks, of all classes that have labelled objects. Ids start at 1: 0 is "no match"."""
    classes = sorted({int(c) for each in truth for c in each.classes})
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
    return match_documents({**common, "annotations": labels}, {**common, "annotations": detections}, "segm")
