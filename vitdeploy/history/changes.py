"""Where a series of latencies changed: PELT on the logarithms of results, with a penalty that says how often chance
does the same.

What is known of such series: results scatter by a few percent, some are far off, and neighbours are alike on a shared
machine. So:

1. Single results that are far off are taken for the median of those around them (Hampel's filter: Pearson 2002,
   "Outliers in process modeling and identification", IEEE Transactions on Control Systems Technology 10:55-63).
2. The noise around the levels is taken for a sum of white noise and noise whose correlation decays geometrically, which
   are fitted to its periodogram by the greatest likelihood (Whittle 1953, "Estimation and information in stationary
   time series", Arkiv for Matematik 2:423-434).
3. A change has to lower the squared error by a penalty in units of the variance of a long mean, which accounts for the
   correlation. As that variance is an estimate, the penalty is a quantile of F. All places where a change may be share
   `ALARMS`.
4. The changes with the least sum of errors and penalties are found exactly (PELT: Killick, Fearnhead and Eckley 2012,
   "Optimal detection of changepoints with a linear computational cost", Journal of the American Statistical Association
   107:1590-1598; the package ruptures). Their edges say more of the noise, so 2 to 4 are done until nothing moves.

docs/scale.md has what this finds, and how often it is wrong, on simulated series.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import MissingPackageError
from vitdeploy.extensions import lazy

stats = lazy("scipy.stats")
Values = npt.NDArray[np.float64]

# The share of series without a change in which one is found, at most, by the union bound, were the noise known.
ALARMS = 0.01
# With fewer results the noise is not known; a level needs as many results to be one and no outlier.
LEAST_RESULTS, LEAST_OF_LEVEL = 10, 4
# Results on either side of the median that an outlier is far from, and how far.
_BESIDE, _FAR = 4, 3.0
# The decays of the correlation from one result to the next that are tried, and the shares of the variance that has it.
_DECAYS, _SHARES = np.linspace(0.2, 0.9, 15), np.linspace(0.1, 1.0, 10)
# The median of |x| of a normal distribution, in standard deviations.
_MEDIAN = 0.6744897501960817
# Clocks of runtimes, and how they round, are no better than this.
_LEAST_NOISE = 1e-3
# The degrees of freedom of the variance of a long mean, for each result that is independent of the others: it is of the
# slowest part of the noise, of which a series shows little. By simulation (benchmarks/history_changes.py): with
# twice as many chance makes changes in 5 % of series whose noise is correlated, with half as many few are found.
_FREEDOM = 0.25
# Where changes may be is not known when the noise is estimated: the largest ones are taken, one for so many results.
_RESULTS_AN_EDGE = 50
_MOST_TURNS = 10


@dataclass(frozen=True)
class Noise:
    """`deviation`: of single results, of their logarithms. `correlation`: of neighbours. `long_run`: the deviation of
    the mean of n results times sqrt(n), for large n. `freedom`: the degrees of freedom of that."""

    deviation: float
    correlation: float
    long_run: float
    freedom: float


@dataclass(frozen=True)
class Change:
    """`first`: the index of the first result after it. `ratio`: after / before, of the geometric means of both sides up
    to the next changes, with its 95 % interval; `before` and `after` are these means."""

    first: int
    before: float
    after: float
    ratio: float
    ci95: tuple[float, float]


def find_changes(latencies: Sequence[float]) -> tuple[list[Change], Noise]:
    """The changes of the level of latencies (or others above 0) in the order in which they were measured, and the
    noise that they stand out of.

    Raises:
        ValueError: fewer than `LEAST_RESULTS`, or one that is not above 0. MissingPackageError: without ruptures.
    """
    values = np.asarray(latencies, np.float64)
    if values.size < LEAST_RESULTS or not np.all(np.isfinite(values) & (values > 0)):
        raise ValueError(f"wanted at least {LEAST_RESULTS} numbers above 0")
    measured = np.log(values)
    found = _segments(without_outliers(measured), count=1 + values.size // _RESULTS_AN_EDGE)
    for _ in range(_MOST_TURNS):
        firsts = found
        logs = without_outliers(measured, firsts)
        noise = noise_of(logs, firsts)
        found = _segments(logs / noise.long_run, penalty=_penalty(values.size, noise.freedom))
        if found == firsts:
            break
    edges = [0, *found, values.size]
    return [
        _change(logs[start:first], logs[first:end], first, noise)
        for start, first, end in zip(edges, edges[1:], edges[2:], strict=False)
    ], noise


def without_outliers(logs: Values, edges: Sequence[int] = ()) -> Values:
    """The values, float64 [n], with the median of those around it in the place of each that is further than `_FAR`
    deviations from that. At either end, and at `edges`, the first indices of new levels, the series is mirrored: what
    is around a result is of its level, and a new level is none of outliers as soon as it has `LEAST_OF_LEVEL` results.
    """
    around = np.concatenate([_medians(level) for level in np.split(logs, list(edges))])
    reach = _FAR * max(float(np.median(np.abs(logs - around))) / _MEDIAN, _LEAST_NOISE)
    return np.where(np.abs(logs - around) > reach, around, logs)


def _medians(logs: Values) -> Values:
    """The median of each value and those around it."""
    mirrored = np.pad(logs, _BESIDE, mode="symmetric")
    found: Values = np.median(np.lib.stride_tricks.sliding_window_view(mirrored, 2 * _BESIDE + 1), axis=1)
    return found


def noise_of(logs: Values, edges: Sequence[int] = ()) -> Noise:
    """The noise around levels that change at `edges`, the first indices of new ones.

    A share s of the variance v has a correlation that decays by d a result, which at the frequency w is the spectral
    density v (1 - s + s (1 - d^2) / (1 - 2 d cos w + d^2)). Of all d and s that are tried, those with the least
    sum over frequencies of log(density) + periodogram / density: Whittle's likelihood.
    """
    levels = np.split(logs, list(edges))
    around = np.concatenate([level - level.mean() for level in levels])
    power = np.abs(np.fft.rfft(around))[1:] ** 2 / around.size
    cosines = np.cos(2 * np.pi * np.arange(1, power.size + 1) / around.size)
    fits = []
    for decay, share in [(0.0, 0.0), *itertools.product(_DECAYS, _SHARES)]:
        shape = 1 - share + share * (1 - decay**2) / (1 - 2 * decay * cosines + decay**2)
        variance = max(float(np.mean(power / shape)), _LEAST_NOISE**2)
        fits.append((np.sum(np.log(variance * shape) + power / (variance * shape)), variance, decay, share))
    _, variance, decay, share = min(fits)
    variance *= logs.size / max(1, logs.size - len(levels))  # each mean has taken one degree of freedom
    long_run = variance * (1 - share + share * (1 + decay) / (1 - decay))
    freedom = max(2.0, _FREEDOM * logs.size * variance / long_run)
    return Noise(math.sqrt(variance), float(share * decay), math.sqrt(long_run), freedom)


def _penalty(size: int, freedom: float) -> float:
    """What a change has to lower the squared error by, in units of the noise: chance does so at one of `size` places in
    `ALARMS` of all series at most, as the lowered error of one change has a distribution F(1, freedom)."""
    return float(stats.f.isf(ALARMS / size, 1, freedom))


def _segments(values: Values, *, count: int | None = None, penalty: float | None = None) -> list[int]:
    """The first index of each segment but the first one: of `count` changes, or of as many as pay their penalty."""
    try:
        import ruptures
    except ModuleNotFoundError as error:
        raise MissingPackageError("ruptures", "history", "finding where a series changed", error=error) from None
    # The linear kernel's cost is the squared error around the mean.
    search = ruptures.KernelCPD(kernel="linear", min_size=LEAST_OF_LEVEL).fit(values[:, None])
    return [int(end) for end in search.predict(n_bkps=count, pen=penalty)[:-1]]


def _change(before: Values, after: Values, first: int, noise: Noise) -> Change:
    lower, upper = float(before.mean()), float(after.mean())
    error = noise.long_run * math.sqrt(1 / before.size + 1 / after.size)
    reach = float(stats.t.ppf(0.975, noise.freedom)) * error
    difference = upper - lower
    bounds = math.exp(difference - reach), math.exp(difference + reach)
    return Change(first, math.exp(lower), math.exp(upper), math.exp(difference), bounds)
