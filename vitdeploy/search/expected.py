"""Estimates how many answers of a classifier a quantization changes: a smooth number, from few images.

Counting changed answers needs thousands of images. But the margins of a few images, and how far the quantization moves
logits, predict how many would change: for the answer a and a runner-up c with the margin m = l_a - l_c and the rounding
error e, normal with deviation s, P(c overtakes a) = Phi(-m / s).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import softmax
from scipy.stats import norm

from vitdeploy.spec import Budget

RUNNERS_UP = 5

Logits = npt.NDArray[np.floating]


@dataclass(frozen=True)
class Expected:
    """In percent of the images, and in points of top-1."""

    agreement: float
    drop: float

    def meets(self, budget: Budget) -> bool:
        """Whether this is within a budget's bounds on answers, if it has any."""
        agreement, drop = budget.min_agreement, budget.max_drop
        return (agreement is None or self.agreement >= agreement) and (drop is None or self.drop <= drop)


def expected_loss(found: Logits, wanted: Logits, share: float = 1.0) -> Expected:
    """The expected agreement and drop of logits [images, classes] against those of the float model for the same images.

    The drop treats the float model's probabilities p as true: an answer that changes from a to c loses p_a - p_c.
    Errors of the runners-up count as independent, with one deviation for all images.

    Args:
        share: of the power of the errors; below 1, the result if they were smaller.
    """
    if wanted.shape[1] < 2:
        return Expected(100.0, 0.0)
    order = np.argsort(-wanted, axis=1, kind="stable")[:, : RUNNERS_UP + 1]
    error = np.take_along_axis(found.astype(np.float64) - wanted, order, axis=1)
    logits = np.take_along_axis(wanted.astype(np.float64), order, axis=1)
    p = np.take_along_axis(softmax(wanted.astype(np.float64), axis=1), order, axis=1)
    deviation = max(float(np.sqrt(share * np.mean((error[:, :1] - error[:, 1:]) ** 2))), 1e-12)
    changed = norm.cdf((logits[:, 1:] - logits[:, :1]) / deviation)
    kept = np.prod(1 - changed, axis=1)
    drop = np.minimum((changed * (p[:, :1] - p[:, 1:])).sum(axis=1), p[:, 0])
    return Expected(100 * float(kept.mean()), 100 * float(drop.mean()))
