"""A reference accuracy that no trained model has: what is compared then are answers to another question.

A wrong order of the classes leaves every measure of an engine against the original as it is, and makes both of them
wrong. It shows in the original's own accuracy alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

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
# Of images that another order would make right: more than an order found by chance explains.
ORDERED = 2.0


@dataclass(frozen=True)
class Claim:
    """What a checkpoint's own files say of its accuracy, in percent, and which one says so."""

    percent: float
    file: str


def least_accuracy(classes: int) -> float:
    """The share of right answers, 0..1, that every trained classifier exceeds."""
    return 0.0 if classes < 2 else min(CHANCES / classes, max(HALF, NEARLY / classes))


def doubt_accuracy(answers: Indices, labels: Indices, classes: int, claim: Claim | None) -> str | None:
    """What speaks against the labels of a classifier's own top-1 answers, int64 [n] each; None where nothing does.

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
    if ordered > max(ORDERED * share, least):
        return f"{text}: the class order is wrong; in another one it is {100 * ordered:.0f} %"
    return f"{text}: is the class order right, and the preprocessing that of the training?"


def accuracy_in_best_order(answers: Indices, labels: Indices, classes: int) -> float:
    """The share of right answers, 0..1, if classes were called as it suits the answers best.

    Which order that is, is found on one half of the images and counted on the other, and the other way round: on the
    same images some order always suits. 0 where there are too many classes to look for it.
    """
    if classes > MOST_CLASSES:
        return 0.0
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
