"""Compares a panoptic model's segments with the original's, and both with the labels."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.data.panoptic import PanopticMap
from vitdeploy.errors import DataError
from vitdeploy.verification.bootstrap import draws, least_of_difference, least_of_share, percentile_interval
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.panoptic_quality import (
    Floats,
    Quality,
    Tally,
    panoptic_quality,
    quality,
    segments_of,
    tally,
)


@dataclass(frozen=True, kw_only=True)
class PanopticComparison(Comparison):
    """A panoptic model against the original. The metric is PQ, mean over the classes, in percent.

    agreement: PQ of the artifact's maps with the original's as the truth, in which VOID is no excuse; it is the same
        the other way round; 100 where both see nothing (`segments` is 0 then).
    segments: of the original. pixel_agreement: percent of the pixels that both give the same class (or none).
    The qualities are over all classes, things and stuff, the artifact's and the original's; None without labels, and
        where no such class occurs.
    """

    segments: int
    pixel_agreement: float
    all: Quality | None = None
    things: Quality | None = None
    stuff: Quality | None = None
    reference_all: Quality | None = None
    reference_things: Quality | None = None
    reference_stuff: Quality | None = None


def compare_panoptic(
    artifact: Iterable[PanopticMap],
    reference: Iterable[PanopticMap],
    truth: Iterable[PanopticMap] | None,
    *,
    classes: int,
    things: Collection[int],
    max_difference: float,
    seed: int = 0,
) -> PanopticComparison:
    """Compare the maps of the artifact and of the original of the same images, in the same order.

    Each iterable is read once, one image of each at a time.

    Args:
        truth: the labelled maps with the models' class numbers, or None.
        classes: how many classes the models have. things: those of them that have instances.
        max_difference: of the raw outputs, passed on.

    Raises:
        ValueError: iterables of other lengths, or no image; maps of other sizes, or with segments of no class.
        DataError: not one labelled segment in all images.
    """
    agreements, ours, theirs = [], [], []
    same = pixels = 0
    labels = () if truth is None else (truth,)
    for maps in zip(artifact, reference, *labels, strict=True):
        a, b, *labelled = (segments_of(each, classes) for each in maps)
        agreements.append(tally(a, b, classes, forgive=False))
        same, pixels = same + int((a.classes[a.at] == b.classes[b.at]).sum()), pixels + a.at.size
        for t in labelled:
            ours.append(tally(a, t, classes, forgive=True))
            theirs.append(tally(b, t, classes, forgive=True))
    if not agreements:
        raise ValueError("no image")
    n = len(agreements)
    weights = draws(n, seed)
    counts = np.stack([each.counts for each in agreements])
    segments = sum(len(each.found) for each in agreements)
    agreed = quality(counts, np.ones(classes, bool))
    agreement = agreed.pq if agreed else 100.0
    accuracy = _accuracy(ours, theirs, weights, np.isin(np.arange(classes), list(things))) if ours else {}
    return PanopticComparison(
        n=n,
        metric="PQ" if ours else None,
        agreement=agreement,
        agreement_ci95=percentile_interval(
            agreement, panoptic_quality(counts, weights), least_of_share(agreement / 100, segments), (0.0, 100.0)
        ),
        agreement_of="panoptic quality with the original's maps as the truth",
        max_difference=max_difference,
        segments=segments,
        pixel_agreement=100 * same / pixels,
        **accuracy,
    )


def _accuracy(ours: list[Tally], theirs: list[Tally], weights: Floats, things: npt.NDArray[np.bool_]) -> dict[str, Any]:
    a, b = (np.stack([each.counts for each in side]) for side in (ours, theirs))
    found = [np.concatenate([each.found for each in side]) for side in (ours, theirs)]
    if not len(found[0]):
        raise DataError(
            "the labels hold not one segment, so there is no PQ",
            found=f"{len(ours)} images without segments",
            fix="check that images and labels belong together, or verify without labels",
        )
    qualities = {
        f"{prefix}{name}": quality(counts, chosen)
        for prefix, counts in (("", a), ("reference_", b))
        for name, chosen in (("all", things | True), ("things", things), ("stuff", ~things))
    }
    best, reference_best = qualities["all"], qualities["reference_all"]
    assert best and reference_best, "there is a labelled segment, so its class occurs"
    value, reference_value = best.pq, reference_best.pq
    drop = reference_value - value
    spread = panoptic_quality(b, weights) - panoptic_quality(a, weights)
    return {
        **qualities,
        "value": value,
        "reference_value": reference_value,
        "drop": drop,
        "drop_ci95": percentile_interval(drop, spread, least_of_difference(found[1], found[0]), (-100.0, 100.0)),
    }
