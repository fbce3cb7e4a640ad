"""Compares the anomaly scores of an artifact with the original's, and both with what is known to be defective.

AUROC is the chance that a defective image has a higher score than a good one, ties counting half: Mann and Whitney's U
over the number of pairs (Fawcett 2006, "An introduction to ROC analysis", section 7). That of pixels counts all pixels
of all images alike, as MVTec AD's does.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

from vitdeploy.verification.bootstrap import (
    REPLICATES,
    Floats,
    least_of_difference,
    least_of_share,
    percentile_interval,
)
from vitdeploy.verification.changes import Changes, judged
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.intervals import wilson

Bools = npt.NDArray[np.bool_]
# Scores of pixels are counted in so many steps between the least and the largest: two in one step count as equal.
STEPS = 2048


@dataclass(frozen=True, kw_only=True)
class AnomalyComparison(Comparison):
    """An anomaly model against the original. The metric is the AUROC of images in percent.

    agreement: percent of the images that both call anomalous, or both normal. All intervals of AUROCs are bootstraps
        over the images, of the good and of the defective ones apart, and none is narrower than that of a share of as
        many independent trials as there are images.
    auroc_ci95, reference_auroc_ci95: of `value` and `reference_value`.
    pixel_auroc ...: the same of pixels, in percent, with the drop in points. None where no masks are known.
    score_difference_mean: mean |score - original's score| in percent of the original's.
    anomalous, reference_anomalous: images that are called so.
    """

    auroc_ci95: tuple[float, float] | None = None
    reference_auroc_ci95: tuple[float, float] | None = None
    pixel_auroc: float | None = None
    pixel_auroc_ci95: tuple[float, float] | None = None
    reference_pixel_auroc: float | None = None
    reference_pixel_auroc_ci95: tuple[float, float] | None = None
    pixel_drop: float | None = None
    pixel_drop_ci95: tuple[float, float] | None = None
    score_difference_mean: float
    anomalous: int
    reference_anomalous: int


@dataclass(frozen=True)
class PixelCounts:
    """How many pixels of each image have a score in each step: float64 [images, STEPS], of defects and of the rest."""

    defective: Floats
    good: Floats


def auroc(scores: Floats, defective: Bools) -> float:
    """The AUROC of scores [n], 0..1, by their ranks; not a number where all are of one kind."""
    positives, negatives = int(defective.sum()), int((~defective).sum())
    if not positives or not negatives:
        return float("nan")
    total = float(rankdata(scores)[defective].sum())
    return (total - positives * (positives + 1) / 2) / (positives * negatives)


def auroc_of_counts(defective: Floats, good: Floats) -> Floats:
    """AUROCs [n], 0..1, of counts [n, steps] by rising score; equal scores stand in one step."""
    below = np.cumsum(good, axis=1) - good / 2
    pairs = defective.sum(axis=1) * good.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((defective * below).sum(axis=1) / pairs)


def count_pixels(maps: Iterable[tuple[npt.NDArray[Any], Bools]], limits: tuple[float, float]) -> PixelCounts:
    """Count the scores of maps [height, width] in STEPS steps between these limits, apart by their masks. What the
    model does not see, which is no number, counts as the least score: an app takes it for normal."""
    low, high = limits
    factor = STEPS / ((high - low) or 1.0)
    rows: tuple[list[Any], list[Any]] = ([], [])
    for scores, mask in maps:
        steps = ((np.nan_to_num(scores, nan=low) - low) * factor).astype(np.int64).clip(0, STEPS - 1)
        for row, chosen in zip(rows, (mask, ~mask), strict=True):
            row.append(np.bincount(steps[chosen], minlength=STEPS).astype(np.uint32))
    defective, good = (np.stack(row).astype(np.float64) for row in rows)
    return PixelCounts(defective, good)


def compare_anomalies(
    artifact: Floats,
    reference: Floats,
    *,
    threshold: float,
    max_difference: float,
    defective: Bools | None = None,
    pixels: tuple[PixelCounts, PixelCounts] | None = None,
    seed: int = 0,
) -> AnomalyComparison:
    """Compare scores [n] of the same images, in the same order.

    Args:
        defective: what is known of the images; None without labels.
        pixels: those of the artifact and of the original.
        max_difference: of the raw outputs, passed on.
    """
    ours, theirs = artifact > threshold, reference > threshold
    n, same = len(reference), int((ours == theirs).sum())
    low, high = wilson(same, n)
    measured: dict[str, Any] = {}
    if defective is not None:
        weights = _draws(defective, seed)
        measured = _of_images(artifact, reference, defective, weights)
        measured |= {} if pixels is None else _of_pixels(*pixels, weights)
    return AnomalyComparison(
        n=n,
        metric=None if defective is None else "image AUROC",
        agreement=100 * same / n,
        agreement_ci95=(100 * low, 100 * high),
        agreement_of="images called anomalous, or normal, as by the original",
        max_difference=max_difference,
        score_difference_mean=100 * float((np.abs(artifact - reference) / np.maximum(reference, 1e-12)).mean()),
        anomalous=int(ours.sum()),
        reference_anomalous=int(theirs.sum()),
        **measured,
    )


def _draws(defective: Bools, seed: int) -> Floats:
    """As `bootstrap.draws`, of the good and of the defective images apart."""
    generator, found = np.random.RandomState(seed), np.zeros((REPLICATES, len(defective)))
    for kind in (defective, ~defective):
        count = int(kind.sum())
        found[:, kind] = generator.multinomial(count, np.full(count, 1 / count), size=REPLICATES)
    return found


def _of_images(ours: Floats, theirs: Floats, defective: Bools, weights: Floats) -> dict[str, Any]:
    values = [auroc(scores, defective) for scores in (ours, theirs)]
    drawn = [_resampled(scores, defective, weights) for scores in (ours, theirs)]
    right = [_placed(scores, defective) for scores in (ours, theirs)]
    named = _named(values, drawn, (right[1], right[0]))
    return {
        "value": named.values[0],
        "reference_value": named.values[1],
        "auroc_ci95": named.intervals[0],
        "reference_auroc_ci95": named.intervals[1],
        "drop": named.drop,
        "drop_ci95": named.drop_ci95,
    }


def _of_pixels(ours: PixelCounts, theirs: PixelCounts, weights: Floats) -> dict[str, Any]:
    sides = (ours, theirs)
    values = [float(auroc_of_counts(*(each.sum(0)[None] for each in (s.defective, s.good)))[0]) for s in sides]
    drawn = [auroc_of_counts(weights @ side.defective, weights @ side.good) for side in sides]
    every = np.ones(weights.shape[1], np.bool_)
    named = _named(values, drawn, (every, every))
    return {
        "pixel_auroc": named.values[0],
        "reference_pixel_auroc": named.values[1],
        "pixel_auroc_ci95": named.intervals[0],
        "reference_pixel_auroc_ci95": named.intervals[1],
        "pixel_drop": named.drop,
        "pixel_drop_ci95": named.drop_ci95,
    }


@dataclass(frozen=True)
class _Named:
    """In percent and points, the artifact's first."""

    values: tuple[float, float]
    intervals: tuple[tuple[float, float], tuple[float, float]]
    drop: float
    drop_ci95: tuple[float, float]


def _named(values: list[float], drawn: list[Floats], right: tuple[Bools, Bools]) -> _Named:
    """`right`: of the original and of the artifact, whose answers to an image count as right."""
    n, drop = len(right[0]), 100 * (values[1] - values[0])
    shares = [
        percentile_interval(100 * value, 100 * each, least_of_share(value, n), (0.0, 100.0))
        for value, each in zip(values, drawn, strict=True)
    ]
    return _Named(
        (100 * values[0], 100 * values[1]),
        (shares[0], shares[1]),
        drop,
        percentile_interval(drop, 100 * (drawn[1] - drawn[0]), least_of_difference(*right), (-100.0, 100.0)),
    )


def _resampled(scores: Floats, defective: Bools, weights: Floats) -> Floats:
    """The AUROC of each draw: a step for each score that there is."""
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(scores[order]) > 0])
    counts = [np.add.reduceat((weights * kind)[:, order], starts, axis=1) for kind in (defective, ~defective)]
    return auroc_of_counts(*counts)


def _placed(scores: Floats, defective: Bools) -> Bools:
    """Whether each image lies on the right side of more than half of those of the other kind."""
    good, bad = np.sort(scores[~defective]), np.sort(scores[defective])
    above_good = np.searchsorted(good, scores, "left") / len(good)
    below_bad = 1 - np.searchsorted(bad, scores, "right") / len(bad)
    return np.where(defective, above_good, below_bad) > 0.5


def anomaly_changes(artifact: Floats, reference: Floats, threshold: float, defective: Bools | None) -> Changes:
    """Changed images: those that only one side calls anomalous; larger changes of the score are worse."""
    ours, theirs = artifact > threshold, reference > threshold
    moved = np.abs(artifact - reference) / max(threshold, 1e-12)
    if defective is None:
        return judged(ours != theirs, moved)
    return judged(ours != theirs, moved, ours == defective, theirs == defective)
