"""Bootstrap intervals for measures that are not a mean over images, such as mAP: the images are resampled.

Efron & Tibshirani 1993, "An Introduction to the Bootstrap", chapter 13: the percentile interval. It draws whole images,
never single objects or tokens, since the contents of one image are not independent. Two measures share each draw, which
makes the interval of their difference a paired one.

Its limits: with few images (say, below 30) it is too narrow, and if all images agree its width is zero, so three images
would prove anything. Therefore no interval here is narrower than that of as many independent trials as there were
objects: see `least_of_share` and `least_of_difference`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vitdeploy.verification.intervals import paired_difference, wilson

# Efron & Tibshirani ask for at least 1000 for the ends of a 95 % interval (chapter 14.3).
REPLICATES = 1000
# Numbers of the draws that are held at a time: all of them of up to 4,194 images.
BLOCK = 1 << 22

Floats = npt.NDArray[np.float64]


def draws(n: int, seed: int) -> Floats:
    """How often each of n images is in each draw of n with replacement, float64 [REPLICATES, n] of whole numbers.

    From `numpy.random.RandomState(seed)`, whose stream is frozen (NEP 19).
    """
    return np.random.RandomState(seed).multinomial(n, np.full(n, 1 / n), size=REPLICATES).astype(np.float64)


def replicates(n: int, seed: int, measure: Callable[[Floats], Floats]) -> Floats:
    """What `measure` says of each of the `draws`, joined: of some rows of them at a time it gives as many rows. The
    draws of many images are never in memory together."""
    generator, shares, rows = np.random.RandomState(seed), np.full(n, 1 / n), max(1, BLOCK // n)
    sizes = [min(rows, REPLICATES - start) for start in range(0, REPLICATES, rows)]
    return np.concatenate([measure(generator.multinomial(n, shares, size=size).astype(np.float64)) for size in sizes])


def percentile_interval(
    estimate: float, replicates: Floats, least: tuple[float, float], limits: tuple[float, float]
) -> tuple[float, float]:
    """The 95 % percentile interval, widened to reach `least` below and above the estimate, within `limits`.

    Replicates that are NaN (a draw without any object) are left out.
    """
    defined = replicates[np.isfinite(replicates)]
    low, high = np.percentile(defined, [2.5, 97.5]) if len(defined) else (estimate, estimate)
    return (
        float(max(limits[0], min(low, estimate - least[0]))),
        float(min(limits[1], max(high, estimate + least[1]))),
    )


def least_of_share(share: float, trials: int) -> tuple[float, float]:
    """How far Wilson's interval for about `share` (0..1) of independent `trials` reaches below and above, in
    percent."""
    if not trials:
        return 100.0, 100.0  # nothing was tried, so anything may be
    successes = round(share * trials)
    low, high = wilson(successes, trials)
    return 100 * (successes / trials - low), 100 * (high - successes / trials)


def least_of_difference(a: npt.NDArray[np.bool_], b: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """As `least_of_share`, for the share right in `a` minus that in `b`, two answers to the same questions, in
    points."""
    if not len(a):
        return 100.0, 100.0  # nothing was tried, so anything may be
    low, high = paired_difference(int((a & b).sum()), int((a & ~b).sum()), int((b & ~a).sum()), int((~a & ~b).sum()))
    difference = float(a.mean() - b.mean())
    return 100 * (difference - low), 100 * (high - difference)
