"""Confidence intervals for what is reported: a proportion, the difference of two paired ones, a ratio of times."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats


def wilson(successes: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """The score interval of a proportion in 0..1.

    Wilson 1927, "Probable inference, the law of succession, and statistical inference", Journal of the American
    Statistical Association 22:209-212. The limits are the solutions p of (successes/n - p)^2 = z^2 p (1 - p) / n.

    Raises:
        ValueError: `n` below 1, or `successes` outside 0..n.
    """
    interval = stats.binomtest(successes, n).proportion_ci(confidence_level=level, method="wilson")
    return float(interval.low), float(interval.high)


def paired_difference(both: int, only_a: int, only_b: int, neither: int, level: float = 0.95) -> tuple[float, float]:
    """The interval of p_a - p_b, in -1..1, where `a` and `b` were both tried on the same items.

    The arguments count the items that both got right, only `a`, only `b`, and neither.

    Newcombe 1998, "Improved confidence intervals for the difference between binomial proportions based on paired data",
    Statistics in Medicine 17:2635-2650, method 10. With the Wilson limits l, u of both proportions, the lower limit is
    (p_a - p_b) - sqrt(x^2 - 2 phi x y + y^2) for x = p_a - l_a and y = u_b - p_b; the upper one mirrors it.

    Raises:
        ValueError: a negative count, or no item at all.
    """
    # Python's own integers: the product of four margins does not fit into 64 bits.
    both, only_a, only_b, neither = int(both), int(only_a), int(only_b), int(neither)
    n = both + only_a + only_b + neither
    if min(both, only_a, only_b, neither) < 0 or n == 0:
        raise ValueError(f"counts must be at least 0, and one above: {(both, only_a, only_b, neither)}")
    p_a, p_b = (both + only_a) / n, (both + only_b) / n
    low_a, high_a = wilson(both + only_a, n, level)
    low_b, high_b = wilson(both + only_b, n, level)
    phi = _corrected_phi(both, only_a, only_b, neither)
    below = _combine(p_a - low_a, high_b - p_b, phi)
    above = _combine(high_a - p_a, p_b - low_b, phi)
    difference = (only_a - only_b) / n
    return max(-1.0, difference - below), min(1.0, difference + above)


def _corrected_phi(both: int, only_a: int, only_b: int, neither: int) -> float:
    """The correlation of the two outcomes; a positive one is lessened by the continuity correction of method 10."""
    margins = (both + only_a) * (only_b + neither) * (both + only_b) * (only_a + neither)
    if margins == 0:  # an outcome that never varies correlates with nothing
        return 0.0
    covariance = both * neither - only_a * only_b
    if covariance > 0:
        return max(covariance - (both + only_a + only_b + neither) / 2, 0.0) / math.sqrt(margins)
    return covariance / math.sqrt(margins)


def _combine(x: float, y: float, phi: float) -> float:
    """sqrt(x^2 - 2 phi x y + y^2), whose argument rounding must not take below zero."""
    return math.sqrt(max(0.0, x * x - 2 * phi * x * y + y * y))


def log_ratio(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """The ratio a/b of paired positive values with its interval: (ratio, lower, upper).

    The ratio is the geometric mean of a_i / b_i; the interval is Student's t interval of the mean of log(a_i / b_i)
    (Student 1908, "The probable error of a mean", Biometrika 6:1-25), taken back by exp.

    Raises:
        ValueError: fewer than two pairs, different lengths, or a value that is not positive and finite.
    """
    values = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if values[0].shape != values[1].shape or values[0].ndim != 1 or values[0].size < 2:
        raise ValueError(f"at least two pairs are needed, found {len(a)} and {len(b)} values")
    if not all(np.isfinite(array).all() and (array > 0).all() for array in values):
        raise ValueError("all values must be positive and finite")
    logs = np.log(values[0]) - np.log(values[1])
    mean = float(logs.mean())
    spread = float(logs.std(ddof=1)) / math.sqrt(logs.size)
    reach = float(stats.t.ppf((1 + level) / 2, logs.size - 1)) * spread
    return math.exp(mean), math.exp(mean - reach), math.exp(mean + reach)
