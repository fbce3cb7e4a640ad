"""Detects a reference accuracy too low for a trained model, which means that the labels do not fit.

A wrong class order changes no comparison of an engine with the original, but makes both wrong. It shows only in the
original's own accuracy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitdeploy.verification.intervals import wilson

Indices = npt.NDArray[np.int64]

# Times chance; with few classes that is more than a good model may have, so never more than half, and a little more
# than chance where there are two.
CHANCES, HALF, NEARLY = 3.0, 0.5, 1.2
# So many points below what its own files claim for other images of the same task.
BELOW_CLAIM = 20.0
# Percent of mAP, PQ or token accuracy below which nothing was found.
FLOOR = 1.0
# The assignment of classes to each other takes memory by their square, and time by their cube.
MOST_CLASSES = 2000
# How often another order must be right for it to be named: by the lower end of its interval, of all images and against
# the upper end of the order at hand.
ORDERED, TIMES = 0.5, 2.0


@dataclass(frozen=True)
class Claim:
    """The accuracy in percent that a checkpoint's own files claim, and the file that claims it."""

    percent: float
    file: str


def least_accuracy(classes: int) -> float:
    """The share of right answers, 0..1, that every trained classifier exceeds."""
    return 0.0 if classes < 2 else min(CHANCES / classes, max(HALF, NEARLY / classes))


def doubt_accuracy(answers: Indices, labels: Indices, classes: int, claim: Claim | None) -> str | None:
    """Evidence against the labels from a classifier's own top-1 answers, int64 [n] each; None without any.

    An interval decides, so that a few images prove nothing.
    """
    n, right = len(answers), int((answers == labels).sum())
    share, high, least = right / n, wilson(right, n)[1], least_accuracy(classes)
    text = f"the original's top-1 is {100 * share:.2f} % of {n:,} images"
    if share < least and high < max(HALF, least):
        text += f", and chance is {100 / classes:.3g} %"
    elif claim is not None and 100 * high < claim.percent - BELOW_CLAIM:
        text += f", and {claim.file} says {claim.percent:.4g} %"
    else:
        return None
    ordered = accuracy_in_best_order(answers, labels, classes)
    low = wilson(round(ordered * n), n)[0]
    if low > max(ORDERED, TIMES * high):
        return (
            f"{text}: the class order may be wrong; in another one, found on one half of the images, it is "
            f"{100 * ordered:.0f} % of the other (at least {math.floor(100 * low)} %)"
        )
    return f"{text}: is the class order right, and the preprocessing that of the training?"


def accuracy_in_best_order(answers: Indices, labels: Indices, classes: int) -> float:
    """The share of right answers, 0..1, under the class order that fits the answers best.

    The order is fitted on one half of the images and evaluated on the other, and vice versa: on the same images some
    order always fits. 0 if there are too many classes to search.
    """
    if classes > MOST_CLASSES:
        return 0.0
    from scipy.optimize import linear_sum_assignment  # measuring processes load this module, and need no order

    halves = np.random.RandomState(0).permutation(len(answers)) % 2
    right = 0
    for half in (0, 1):
        seen = halves != half
        table = np.zeros((classes, classes), np.int64)
        np.add.at(table, (labels[seen], answers[seen]), 1)
        rows, columns = linear_sum_assignment(table, maximize=True)
        called = np.full(classes, -1)
        # Pairs that no image is of are there only because every class needs a partner.
        called[columns] = np.where(table[rows, columns] > 0, rows, -1)
        right += int((called[answers[~seen]] == labels[~seen]).sum())
    return right / len(answers)


def doubt_value(metric: str | None, value: float | None) -> str | None:
    """The same of a metric that is near zero where the labels speak of other classes, boxes or tokens."""
    if metric is None or value is None or value >= FLOOR:
        return None
    return f"the original's {metric} is {value:.2f} %: are these the inputs' labels, and in this model's classes?"
