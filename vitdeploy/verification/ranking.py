"""How well scores rank the images that show something above those that do not: AUROC and average precision.

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
    """As `intervals.draws`, of the positives and of the negatives apart, so that no draw lacks one of them."""
    generator, found = np.random.RandomState(seed), np.zeros((REPLICATES, len(positive)))
    for kind in (positive, ~positive):
        count = int(kind.sum())
        found[:, kind] = generator.multinomial(count, np.full(count, 1 / count), size=REPLICATES)
    return found


def counted(scores: Floats, positive: Bools, weights: Floats) -> tuple[Floats, Floats]:
    """How often positives and negatives have each distinct score, [draws, scores] each by rising score. `weights`
    [draws, n]: how often each image counts."""
    order = np.argsort(scores, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(scores[order]) > 0])
    first, second = (np.add.reduceat((weights * kind)[:, order], starts, axis=1) for kind in (positive, ~positive))
    return first, second


def auroc_of_counts(positive: Floats, negative: Floats) -> Floats:
    """AUROCs [draws], 0..1, of counts [draws, steps] by rising score; equal scores stand in one step. Not a number
    where all are of one kind."""
    below = np.cumsum(negative, axis=1) - negative / 2
    pairs = positive.sum(axis=1) * negative.sum(axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray((positive * below).sum(axis=1) / pairs)


def precisions(scores: Floats, positive: Bools, weights: Floats) -> Floats:
    """Average precisions [draws], 0..1, of scores [n]; not a number without a positive. `weights` [n, draws]: how often
    each image counts. Only the distinct scores of positives are steps, which are few where labels are many."""
    order = np.argsort(-scores, kind="stable")
    ranked, hits = scores[order], positive[order]
    step = np.cumsum(np.r_[False, ranked[1:] < ranked[:-1]])
    steps = np.unique(step[hits])
    if not len(steps):
        return np.full(weights.shape[1], np.nan)
    place = np.searchsorted(steps, step)  # the first step that an image is above or in
    own, every = (_sums(place[each], order[each], weights, len(steps)) for each in (hits, place < len(steps)))
    above = np.cumsum(own, axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        precision = np.where(own > 0, above / np.cumsum(every, axis=0), 0.0)
        return np.asarray((own * precision).sum(axis=0) / above[-1])


def _sums(place: npt.NDArray[np.int64], images: npt.NDArray[np.int64], weights: Floats, count: int) -> Floats:
    """The sums [count, draws] of the weights of images, by their places in rising order."""
    starts = np.searchsorted(place, np.arange(count + 1))
    table = sparse.csr_matrix((np.ones(len(images)), images, starts), shape=(count, len(weights)))
    return np.asarray(table @ weights)


def auroc(scores: Floats, positive: Bools) -> float:
    """The AUROC of scores [n], 0..1; not a number where all are of one kind."""
    return float(auroc_of_counts(*counted(scores, positive, np.ones((1, len(scores)))))[0])


def average_precision(scores: Floats, positive: Bools) -> float:
    """The average precision of scores [n], 0..1; not a number without a positive."""
    return float(precisions(scores, positive, np.ones((len(scores), 1)))[0])
