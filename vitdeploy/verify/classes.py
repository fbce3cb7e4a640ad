"""A classifier's answers class by class: what is taken for what, which classes lose, what confidence is worth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.verify.intervals import paired_difference, wilson

# Up to so many classes the whole matrix is kept; the lists of pairs and of classes are never longer.
MATRIX_CLASSES, LISTED_ROWS = 20, 20
BINS = 10
# So often the answers of a model whose confidence is right are drawn.
DRAWS = 200

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Classified:
    """What each sample is, and was taken for: int64 [n] each; `confidence`: float64 [n] in 0..1, where there is one."""

    truth: Ints
    answer: Ints
    confidence: Floats | None = None

    @property
    def right(self) -> npt.NDArray[np.bool_]:
        return np.asarray(self.answer == self.truth)


def confusion(found: Mapping[str, Classified], names: Sequence[str]) -> dict[str, Any]:
    """What is taken for what, by artifact, JSON-ready.

    `pairs`: at most LISTED_ROWS of a true class and a wrong answer, the most frequent of any artifact first, each with
    the counts of all; `left`: how many pairs more there are. `matrix`: by artifact [classes][classes], a row for each
    true class, None where there are more than MATRIX_CLASSES classes.
    """
    k = len(names)
    counted: dict[tuple[int, int], dict[str, int]] = {}
    for artifact, each in found.items():
        cells, counts = np.unique((each.truth * k + each.answer)[~each.right], return_counts=True)
        for cell, count in zip(cells.tolist(), counts.tolist(), strict=True):
            counted.setdefault(divmod(cell, k), {})[artifact] = count
    order = sorted(counted, key=lambda cell: (-max(counted[cell].values()), -sum(counted[cell].values()), cell))
    matrix = None
    if k <= MATRIX_CLASSES:
        matrix = {name: np.bincount(x.truth * k + x.answer, minlength=k * k).reshape(k, k) for name, x in found.items()}
    return {
        "pairs": [
            {
                "truth": names[truth],
                "answer": names[answer],
                "counts": {artifact: counted[truth, answer].get(artifact, 0) for artifact in found},
            }
            for truth, answer in order[:LISTED_ROWS]
        ],
        "left": max(0, len(order) - LISTED_ROWS),
        "classes": list(names) if matrix else None,
        "matrix": matrix and {name: cells.tolist() for name, cells in matrix.items()},
    }


def by_class(reference: Classified, engines: Mapping[str, Classified], names: Sequence[str]) -> dict[str, Any]:
    """How much of each class the original and every engine get right, JSON-ready; the worst classes first.

    At most LISTED_ROWS classes in `rows`: those that lose most images, net, to any engine. The intervals of an engine's
    drops (points) hold for all classes together at 95 % (Bonferroni), as the worst of many is looked at: one that is
    above zero proves that its class loses. `lost` says for each engine how many do, and has the worst of them.
    `value` and `original` are percents.
    """
    k = len(names)
    total = np.bincount(reference.truth, minlength=k)
    present = np.flatnonzero(total)
    right = {artifact: np.bincount(each.truth[each.right], minlength=k) for artifact, each in engines.items()}
    was = np.bincount(reference.truth[reference.right], minlength=k)
    worst = np.max([was - each for each in right.values()], axis=0)
    order = sorted(present.tolist(), key=lambda c: (-worst[c], -worst[c] / total[c], c))
    level = 1 - 0.05 / len(present)

    def drop(c: int, each: Classified) -> dict[str, Any]:
        of = reference.truth == c
        return _drop(reference.right[of], each.right[of], level)

    rows = [
        {
            "class": names[c],
            "n": int(total[c]),
            "original": 100 * float(was[c] / total[c]),
            "engines": {name: drop(c, each) for name, each in engines.items()},
        }
        for c in order[:LISTED_ROWS]
    ]
    lost = {}
    for name, each in engines.items():
        fewer = [c for c in order if was[c] > right[name][c]]  # of the others none is proven to lose
        found = [{"class": names[c], **drop(c, each)} for c in fewer]
        proven = sorted((row for row in found if row["drop_ci95"][0] > 0), key=lambda row: -row["drop"])
        lost[name] = {"classes": len(proven), "worst": proven[:LISTED_ROWS]}
    return {"classes": len(present), "left": max(0, len(present) - LISTED_ROWS), "rows": rows, "lost": lost}


def _drop(was: npt.NDArray[np.bool_], right: npt.NDArray[np.bool_], level: float) -> dict[str, Any]:
    both, lost, gained = (int(each.sum()) for each in (was & right, was & ~right, right & ~was))
    low, high = paired_difference(both, lost, gained, len(was) - both - lost - gained, level)
    return {
        "value": 100 * float(right.mean()),
        "drop": 100 * float(was.mean() - right.mean()),
        "drop_ci95": [100 * low, 100 * high],
    }


def reliability(found: Classified, seed: int = 0) -> dict[str, Any]:
    """Confidence against accuracy, JSON-ready; percents.

    error: the expected calibration error over BINS bins of equal width (Naeini, Cooper and Hauskrecht 2015): the mean
    over all samples of |confidence - accuracy| of their bin. by_chance: the 95 % quantile of the error of a model whose
    every confidence is right, on as many samples of these confidences: an error below it proves nothing.
    bins: those with samples; `confidence` is the mean, `ci95` the Wilson interval of the accuracy.
    """
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
        bins.append(
            {
                "n": int(counts[b]),
                "confidence": 100 * float(sums[b] / counts[b]),
                "accuracy": 100 * float(right[b] / counts[b]),
                "ci95": [100 * low, 100 * high],
            }
        )
    return {
        "error": 100 * float(np.abs(sums - right).sum() / n),
        "by_chance": 100 * float(np.quantile(draws, 0.95)),
        "confidence": 100 * float(confidence.mean()),
        "accuracy": 100 * float(found.right.mean()),
        "bins": bins,
    }
