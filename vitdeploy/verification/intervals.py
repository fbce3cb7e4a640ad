"""Intervals of rates and of means."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from vitdeploy.extensions import lazy

stats = lazy("scipy.stats")  # loaded at first use: benchmark processes import this module and do not need it

# --- Confidence intervals for reported numbers: a proportion, the difference of two paired ones, a ratio of times -----


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
    """The interval of p_a - p_b, in -1..1, with `a` and `b` tried on the same items.

    The arguments count the items that both got right, only `a`, only `b`, and neither.

    Newcombe 1998, "Improved confidence intervals for the difference between binomial proportions based on paired data",
    Statistics in Medicine 17:2635-2650, method 10. With the Wilson limits l, u of both proportions, the lower limit is
    (p_a - p_b) - sqrt(x^2 - 2 phi x y + y^2) for x = p_a - l_a and y = u_b - p_b; the upper one mirrors it.

    Raises:
        ValueError: a negative count, or no item at all.
    """
    # Python integers: the product of four margins does not fit into 64 bits.
    both, only_a, only_b, neither = int(both), int(only_a), int(only_b), int(neither)
    n = both + only_a + only_b + neither
    if min(both, only_a, only_b, neither) < 0 or n == 0:
        raise ValueError(f"counts must be at least 0, and at least one above 0: {(both, only_a, only_b, neither)}")
    p_a, p_b = (both + only_a) / n, (both + only_b) / n
    low_a, high_a = wilson(both + only_a, n, level)
    low_b, high_b = wilson(both + only_b, n, level)
    phi = _corrected_phi(both, only_a, only_b, neither)
    below = _combine(p_a - low_a, high_b - p_b, phi)
    above = _combine(high_a - p_a, p_b - low_b, phi)
    difference = (only_a - only_b) / n
    return max(-1.0, difference - below), min(1.0, difference + above)


def unpaired_difference(a: int, n_a: int, b: int, n_b: int, level: float = 0.95) -> tuple[float, float]:
    """The interval of p_a - p_b, in -1..1, of `a` successes in `n_a` trials and `b` in `n_b`, which are independent.

    Newcombe 1998, "Interval estimation for the difference between independent proportions: comparison of eleven
    methods", Statistics in Medicine 17:873-890, method 10: the formula of `paired_difference` with phi = 0.

    Raises:
        ValueError: fewer than one trial, or successes outside 0..n.
    """
    p_a, p_b = a / n_a if n_a else 0.0, b / n_b if n_b else 0.0
    (low_a, high_a), (low_b, high_b) = wilson(a, n_a, level), wilson(b, n_b, level)
    difference = p_a - p_b
    return difference - math.hypot(p_a - low_a, high_b - p_b), difference + math.hypot(high_a - p_a, p_b - low_b)


def _corrected_phi(both: int, only_a: int, only_b: int, neither: int) -> float:
    """Return the correlation of the two outcomes; method 10's continuity correction reduces a positive one."""
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


def unpaired_log_ratio(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """Return the ratio a/b of positive values measured without alternation, with its interval: (ratio, lower, upper).

    The ratio is that of the geometric means; the interval is from Welch 1947, "The generalization of 'Student's'
    problem when several different population variances are involved", Biometrika 34:28-35, on logarithms.

    Raises:
        ValueError: fewer than two values on a side, or one that is not positive and finite.
    """
    found = stats.ttest_ind(_logs(a), _logs(b), equal_var=False)
    interval = found.confidence_interval(level)
    mean = float(np.mean(_logs(a)) - np.mean(_logs(b)))
    return math.exp(mean), math.exp(float(interval.low)), math.exp(float(interval.high))


def _logs(values: Sequence[float]) -> npt.NDArray[np.float64]:
    array = np.asarray(values, np.float64)
    if array.ndim != 1 or array.size < 2:
        raise ValueError(f"at least two values are required on each side, found {len(values)}")
    if not (np.isfinite(array).all() and (array > 0).all()):
        raise ValueError("all values must be positive and finite")
    return np.log(array)


# --- Bootstrap intervals for measures that are not a mean over images, such as mAP: the images are resampled ----------
# Efron & Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13: the percentile interval. It draws whole
# images, not single objects or tokens, since the contents of one image are not independent. Two measures share each
# draw, so the interval of their difference is paired.
#
# With few images (below about 30) it is too narrow, and if all images agree its width is zero. Therefore no interval
# here is narrower than that of as many independent trials as there were objects: see `least_of_share` and
# `least_of_difference`.


# Efron & Tibshirani ask for at least 1000 for the ends of a 95 % interval (chapter 14.3).
REPLICATES = 1000
# Numbers of the draws held in memory at once: all draws for up to 4,194 images.
BLOCK = 1 << 22

Floats = npt.NDArray[np.float64]


def draws(n: int, seed: int) -> Floats:
    """Return how often each of n images occurs in each draw of n with replacement, float64 [REPLICATES, n] of whole
    numbers.

    From `numpy.random.RandomState(seed)`, whose stream is frozen (NEP 19).
    """
    return np.random.RandomState(seed).multinomial(n, np.full(n, 1 / n), size=REPLICATES).astype(np.float64)


def replicates(n: int, seed: int, measure: Callable[[Floats], Floats]) -> Floats:
    """Return `measure` of all `draws`, computed for some rows at once so that the draws of many images are never in
    memory together. `measure` returns one row per row."""
    generator, shares, rows = np.random.RandomState(seed), np.full(n, 1 / n), max(1, BLOCK // n)
    sizes = [min(rows, REPLICATES - start) for start in range(0, REPLICATES, rows)]
    return np.concatenate([measure(generator.multinomial(n, shares, size=size).astype(np.float64)) for size in sizes])


def percentile_interval(
    estimate: float, replicates: Floats, least: tuple[float, float], limits: tuple[float, float]
) -> tuple[float, float]:
    """Return the 95 % percentile interval, widened to reach `least` below and above the estimate, within `limits`.

    Replicates that are NaN (a draw without any object) are left out.
    """
    defined = replicates[np.isfinite(replicates)]
    low, high = np.percentile(defined, [2.5, 97.5]) if len(defined) else (estimate, estimate)
    return (
        float(max(limits[0], min(low, estimate - least[0]))),
        float(min(limits[1], max(high, estimate + least[1]))),
    )


def least_of_share(share: float, trials: int) -> tuple[float, float]:
    """Return how far Wilson's interval for about `share` (0..1) of independent `trials` reaches below and above, in
    percent."""
    if not trials:
        return 100.0, 100.0  # no trials: any value is possible
    successes = round(share * trials)
    low, high = wilson(successes, trials)
    return 100 * (successes / trials - low), 100 * (high - successes / trials)


def least_of_difference(a: npt.NDArray[np.bool_], b: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """As `least_of_share`, for the share right in `a` minus that in `b`, two answers to the same questions, in
    points."""
    if not len(a):
        return 100.0, 100.0  # no trials: any value is possible
    low, high = paired_difference(int((a & b).sum()), int((a & ~b).sum()), int((b & ~a).sum()), int((~a & ~b).sum()))
    difference = float(a.mean() - b.mean())
    return 100 * (difference - low), 100 * (high - difference)
