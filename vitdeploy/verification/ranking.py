"""How well scores rank positive images above negative ones: AUROC and average precision.

AUROC is the chance that a positive has a higher score than a negative, ties counting half: Mann and Whitney's U over
the number of pairs (Fawcett 2006, "An introduction to ROC analysis", section 7). Average precision is the sum of
precision times the rise of recall over all distinct scores, without interpolation (Manning, Raghavan and Schuetze 2008,
"Introduction to Information Retrieval", section 8.4).
"""

import numpy as np
import numpy.typing as npt

from vitdeploy.extensions import lazy
from vitdeploy.verification.intervals import REPLICATES, Floats

sparse = lazy("scipy.sparse")

Bools = npt.NDArray[np.bool_]


def stratified_draws(positive: Bools, seed: int) -> Floats:
    """As `intervals.draws`, stratified by positives and negatives, so that every draw contains both."""
    generator, found = np.random.RandomState(seed), np.zeros((REPLICATES, len(positive)))
    for kind in (positive, ~positive):
        count = int(kind.sum())
        found[:, kind] = generator.multinomial(count, np.full(count, 1 / count), size=REPLICATES)
    return found


def counted(scores: Floats, positive: Bools, weights: Floats) -> tuple[Floats, Floats]:
    """Return how often positives and negatives have each distinct score, [draws, scores] each in ascending order.
    `weights` [draws, n]: how often each image counts."""
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(scores[order]) > 0])
    first, second = (np.add.reduceat((weights * kind)[:, order], starts, axis=1) for kind in (positive, ~positive))
    return first, second


def auroc_of_counts(positive: Floats, negative: Floats) -> Floats:
    """Return AUROCs [draws], 0..1, from counts [draws, steps] in ascending order of score; equal scores share a step.
    NaN if one of the kinds is missing."""
    below = np.cumsum(negative, axis=1) - negative / 2
    pairs = positive.sum(axis=1) * negative.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((positive * below).sum(axis=1) / pairs)


def precisions(scores: Floats, positive: Bools, weights: Floats) -> Floats:
    """Return average precisions [draws], 0..1, of scores [n]; NaN without a positive. `weights` [n, draws]: how often
    each image counts. Only distinct scores of positives are steps, which are few if there are many labels."""
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order], positive[order]
    step = np.cumsum(np.r_[False, ranked[1:] < ranked[:-1]])
    steps = np.unique(step[hits])
    if not len(steps):
        return np.full(weights.shape[1], np.nan)
    place = np.searchsorted(steps, step)  # the first step at or below the image's score
    own, every = (_sums(place[each], order[each], weights, len(steps)) for each in (hits, place < len(steps)))
    above = np.cumsum(own, axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.where(own > 0, above / np.cumsum(every, axis=0), 0.0)
        return np.asarray((own * precision).sum(axis=0) / above[-1])


def _sums(place: npt.NDArray[np.int64], images: npt.NDArray[np.int64], weights: Floats, count: int) -> Floats:
    """Return the sums [count, draws] of image weights by their ascending places."""
    starts = np.searchsorted(place, np.arange(count + 1))
    table = sparse.csr_matrix((np.ones(len(images)), images, starts), shape=(count, len(weights)))
    return np.asarray(table @ weights)


def auroc(scores: Floats, positive: Bools) -> float:
    """Return the AUROC of scores [n], 0..1; NaN if one of the kinds is missing."""
    return float(auroc_of_counts(*counted(scores, positive, np.ones((1, len(scores)))))[0])


def average_precision(scores: Floats, positive: Bools) -> float:
    """Return the average precision of scores [n], 0..1; NaN without a positive."""
    return float(precisions(scores, positive, np.ones((len(scores), 1)))[0])
