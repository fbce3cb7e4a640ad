"""Compares the masks of prompted objects with the original's, and both with labelled masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.verification.bootstrap import (
    Floats,
    draws,
    least_of_difference,
    least_of_share,
    percentile_interval,
)
from vitdeploy.verification.changes import Changes, judged
from vitdeploy.verification.comparison import Comparison

# From this IoU on an object counts as found.
FOUND = 0.5
# An image whose masks overlap the original's less than this, on average, is answered differently.
MOVED_IOU = 0.9


@dataclass(frozen=True, kw_only=True)
class PromptComparison(Comparison):
    """A model of promptable segmentation against the original. The metric is the mean IoU in percent of the best mask
    of each prompt with the labelled object.

    agreement: the mean IoU in percent of the two sides' masks. All intervals are bootstraps over the images, and none
        is narrower than that of as many independent trials as there are prompts.
    masks: how many prompts. iou_min: the least IoU with the original's mask, 0..1.
    point_iou, box_iou: the metric of points and of boxes alone, the artifact's and the original's; None without labels,
        or without such prompts.
    """

    masks: int
    iou_min: float
    point_iou: float | None = None
    reference_point_iou: float | None = None
    box_iou: float | None = None
    reference_box_iou: float | None = None


@dataclass(frozen=True)
class PromptErrors:
    """Of one image: the IoU of each prompt's mask with the labelled one, the artifact's and the original's, float64
    [prompts]; `boxes`: bool [prompts], which prompts are boxes."""

    ours: Floats
    theirs: Floats
    boxes: npt.NDArray[np.bool_]


def compare_prompted(
    overlaps: Sequence[Floats], errors: Sequence[PromptErrors] | None, *, max_difference: float, seed: int = 0
) -> PromptComparison:
    """Compare the masks of the same prompts of the same images.

    Args:
        overlaps: of each image the IoU of both sides' masks, float64 [prompts], 0..1.
        errors: of each image, None without labels.
        max_difference: of the raw outputs, passed on.

    Raises:
        ValueError: no image.
    """
    if not overlaps:
        raise ValueError("no image")
    weights, every = draws(len(overlaps), seed), np.concatenate(overlaps)
    agreement = 100 * float(every.mean())
    drawn = 100 * _ratio(weights, [each.sum() for each in overlaps], [len(each) for each in overlaps])
    return PromptComparison(
        n=len(overlaps),
        metric="mask IoU" if errors is not None else None,
        agreement=agreement,
        agreement_ci95=percentile_interval(agreement, drawn, least_of_share(agreement / 100, len(every)), (0.0, 100.0)),
        agreement_of="overlap (mean IoU) of the masks with the original's",
        max_difference=max_difference,
        masks=len(every),
        iou_min=float(every.min()),
        **({} if errors is None else _accuracy(errors, weights)),
    )


def _ratio(weights: Floats, sums: Sequence[Any], counts: Sequence[int]) -> Floats:
    """The mean over all prompts in each draw of images."""
    return np.asarray((weights @ np.array(sums, np.float64)) / (weights @ np.array(counts, np.float64)))


def _accuracy(errors: Sequence[PromptErrors], weights: Floats) -> dict[str, Any]:
    counts = [len(each.ours) for each in errors]
    ours, theirs = (np.concatenate([getattr(each, side) for each in errors]) for side in ("ours", "theirs"))
    boxes = np.concatenate([each.boxes for each in errors])
    drop = 100 * float((theirs - ours).mean())
    drawn = 100 * _ratio(weights, [(each.theirs - each.ours).sum() for each in errors], counts)
    least = least_of_difference(theirs >= FOUND, ours >= FOUND)
    kinds = {
        f"{side}{name}": 100 * float(values[chosen].mean()) if chosen.any() else None
        for name, chosen in (("point_iou", ~boxes), ("box_iou", boxes))
        for side, values in (("", ours), ("reference_", theirs))
    }
    return {
        "value": 100 * float(ours.mean()),
        "reference_value": 100 * float(theirs.mean()),
        "drop": drop,
        "drop_ci95": percentile_interval(drop, drawn, least, (-100.0, 100.0)),
        **kinds,
    }


def prompted_changes(overlaps: Sequence[Floats]) -> Changes:
    """Changed images: those whose masks overlap the original's less than MOVED_IOU on average."""
    moved = np.array([1 - float(each.mean()) for each in overlaps])
    return judged(moved > 1 - MOVED_IOU, moved)
