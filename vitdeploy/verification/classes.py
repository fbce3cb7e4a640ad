"""A classifier's answers by class: confusions, classes that lose accuracy, and calibration."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vitdeploy.verification.intervals import paired_difference, wilson

# Up to this many classes the whole matrix is kept; it is also the maximum length of the lists of pairs and classes.
MATRIX_CLASSES, LISTED_ROWS = 20, 20
BINS = 10
# Number of random draws of a perfectly calibrated model's answers.
DRAWS = 200

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Classified:
    """The true and the predicted class of each sample: int64 [n] each; `confidence`: float64 [n] in 0..1, if the model
    has one."""

    truth: Ints
    answer: Ints
    confidence: Floats | None = None

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.answer == self.truth)


@dataclass(frozen=True)
class ConfusedPair:
    """A true class, a wrong answer to it, and how often each artifact gives it."""

    truth: str
    answer: str
    counts: dict[str, int]


@dataclass(frozen=True)
class Confusion:
    """Confusions between classes, by artifact.

    `pairs`: at most LISTED_ROWS of a true class and a wrong answer, the most frequent of any artifact first, each with
    the counts of all; `left`: how many more pairs there are. `matrix`: by artifact [classes][classes], a row for each
    true class; None, as `classes`, if there are more than MATRIX_CLASSES classes.
    """

    pairs: tuple[ConfusedPair, ...]
    left: int
    classes: tuple[str, ...] | None
    matrix: dict[str, tuple[tuple[int, ...], ...]] | None


@dataclass(frozen=True)
class ClassDrop:
    """One engine's accuracy on one class in percent, and its drop in points with the interval."""

    value: float
    drop: float
    drop_ci95: tuple[float, float]


@dataclass(frozen=True)
class ClassRow:
    """One class with `n` samples; the original is right on `original` percent of them."""

    name: str = field(metadata={"alias": "class"})
    n: int
    original: float
    engines: dict[str, ClassDrop]


@dataclass(frozen=True)
class LostClass:
    """A class with a proven loss; the fields of its `ClassDrop`."""

    name: str = field(metadata={"alias": "class"})
    value: float
    drop: float
    drop_ci95: tuple[float, float]


@dataclass(frozen=True)
class LostClasses:
    """The number of classes on which an engine provably loses accuracy, and the worst of them."""

    classes: int
    worst: tuple[LostClass, ...]


@dataclass(frozen=True)
class Drops:
    """The accuracy of the original and of every engine on each class, worst classes first.

    At most LISTED_ROWS classes in `rows`: those with the largest net loss of images to any engine; `left` counts the
    others. The intervals of an engine's drops (points) hold for all classes together at 95 % (Bonferroni), since the
    worst of many is selected: an interval above zero proves a loss on its class. `lost`: by engine.
    """

    classes: int
    left: int
    rows: tuple[ClassRow, ...]
    lost: dict[str, LostClasses]


@dataclass(frozen=True)
class ReliabilityBin:
    """Answers of similar confidence (mean, in percent), and the percentage of right ones with its Wilson interval."""

    n: int
    confidence: float
    accuracy: float
    ci95: tuple[float, float]


@dataclass(frozen=True)
class Reliability:
    """Confidence against accuracy; percents.

    error: the expected calibration error over BINS bins of equal width (Naeini, Cooper and Hauskrecht 2015): the mean
    over all samples of |confidence - accuracy| of their bin. by_chance: the 95 % quantile of the error of a
    perfectly calibrated model, on the same number of samples with these confidences: an error below it proves nothing.
    bins: the non-empty ones.
    """

    error: float
    by_chance: float
    confidence: float
    accuracy: float
    bins: tuple[ReliabilityBin, ...]


def confusion(found: Mapping[str, Classified], names: Sequence[str]) -> Confusion:
    """Return the confusions between classes; `names`: all class names."""
    k = len(names)
    counted: dict[tuple[int, int], dict[str, int]] = {}
    for artifact, each in found.items():
        cells, counts = np.unique((each.truth * k + each.answer)[~each.right], return_counts=True)
        for cell, count in zip(cells.tolist(), counts.tolist(), strict=True):
            counted.setdefault(divmod(cell, k), {})[artifact] = count
    order = sorted(counted, key=lambda cell: (-max(counted[cell].values()), -sum(counted[cell].values()), cell))
    matrix = None
    if k <= MATRIX_CLASSES:
        matrix = {name: _counts(each, k) for name, each in found.items()}
    pairs = [
        ConfusedPair(names[truth], names[answer], {name: counted[truth, answer].get(name, 0) for name in found})
        for truth, answer in order[:LISTED_ROWS]
    ]
    return Confusion(
        tuple(pairs), max(0, len(order) - LISTED_ROWS), tuple(names) if matrix is not None else None, matrix
    )


def _counts(found: Classified, k: int) -> tuple[tuple[int, ...], ...]:
    cells = np.bincount(found.truth * k + found.answer, minlength=k * k).reshape(k, k)
    return tuple(tuple(row) for row in cells.tolist())


def by_class(reference: Classified, engines: Mapping[str, Classified], names: Sequence[str]) -> Drops:
    """Return the accuracy on each class; `names`: all class names."""
    k = len(names)
    total = np.bincount(reference.truth, minlength=k)
    present = np.flatnonzero(total)
    right = {artifact: np.bincount(each.truth[each.right], minlength=k) for artifact, each in engines.items()}
    was = np.bincount(reference.truth[reference.right], minlength=k)
    worst = np.max([was - each for each in right.values()], axis=0)
    order = sorted(present.tolist(), key=lambda c: (-worst[c], -worst[c] / total[c], c))
    level = 1 - 0.05 / len(present)

    def drop(c: int, each: Classified) -> ClassDrop:
        of = reference.truth == c
        return _drop(reference.right[of], each.right[of], level)

    rows = [
        ClassRow(
            names[c],
            int(total[c]),
            100 * float(was[c] / total[c]),
            {name: drop(c, each) for name, each in engines.items()},
        )
        for c in order[:LISTED_ROWS]
    ]
    lost = {}
    for name, each in engines.items():
        fewer = [c for c in order if was[c] > right[name][c]]  # the other classes have no proven loss
        found = [LostClass(names[c], **vars(drop(c, each))) for c in fewer]
        proven = sorted((row for row in found if row.drop_ci95[0] > 0), key=lambda row: -row.drop)
        lost[name] = LostClasses(len(proven), tuple(proven[:LISTED_ROWS]))
    return Drops(len(present), max(0, len(present) - LISTED_ROWS), tuple(rows), lost)


def _drop(was: npt.NDArray[np.bool_], right: npt.NDArray[np.bool_], level: float) -> ClassDrop:
    both, lost, gained = (int(each.sum()) for each in (was & right, was & ~right, right & ~was))
    low, high = paired_difference(both, lost, gained, len(was) - both - lost - gained, level)
    return ClassDrop(100 * float(right.mean()), 100 * float(was.mean() - right.mean()), (100 * low, 100 * high))


def reliability(found: Classified, seed: int = 0) -> Reliability:
    """Return confidence against accuracy; `seed`: for the draws that determine `by_chance`."""
    assert found.confidence is not None
    confidence = np.clip(found.confidence, 0.0, 1.0)
    at = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    counts, sums = np.bincount(at, minlength=BINS), np.bincount(at, confidence, BINS)
    right = np.bincount(at, found.right, BINS)
    random = np.random.default_rng(seed)
    n = len(at)
    draws = [np.abs(sums - np.bincount(at, random.random(n) < confidence, BINS)).sum() / n for _ in range(DRAWS)]
    bins = []
    for b in np.flatnonzero(counts).tolist():
        low, high = wilson(int(right[b]), int(counts[b]))
        confidence_in, accuracy = 100 * float(sums[b] / counts[b]), 100 * float(right[b] / counts[b])
        bins.append(ReliabilityBin(int(counts[b]), confidence_in, accuracy, (100 * low, 100 * high)))
    return Reliability(
        100 * float(np.abs(sums - right).sum() / n),
        100 * float(np.quantile(draws, 0.95)),
        100 * float(confidence.mean()),
        100 * float(found.right.mean()),
        tuple(bins),
    )
