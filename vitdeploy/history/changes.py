"""Detect changes in a series of latencies: PELT on the logarithms of results, with a penalty that bounds false alarms.

Properties of such series: results scatter by a few percent, some are outliers, and on a shared machine neighbouring
results are correlated. The steps:

1. Replace outliers by the median of the results around them (Hampel's filter: Pearson 2002, "Outliers in process
   modeling and identification", IEEE Transactions on Control Systems Technology 10:55-63).
2. Model the noise around the levels as a sum of white noise and noise with a geometrically decaying correlation, fitted
   to its periodogram by maximum likelihood (Whittle 1953, "Estimation and information in stationary time series", Arkiv
   for Matematik 2:423-434).
3. Accept a change if it lowers the squared error by a penalty in units of the variance of a long mean, which accounts
   for the correlation. That variance is an estimate, so the penalty is a quantile of F. All possible places of a change
   share `ALARMS`.
4. Find the changes with the least sum of errors and penalties exactly (PELT: Killick, Fearnhead and Eckley 2012,
   "Optimal detection of changepoints with a linear computational cost", Journal of the American Statistical Association
   107:1590-1598; the package ruptures). The new levels refine the noise model, so steps 2 to 4 repeat until they
   converge.

docs/scale.md reports detection and false alarm rates on simulated series.
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

# Upper bound (by the union bound, for known noise) on the share of unchanged series in which a change is found.
ALARMS = 0.01
# The fewest results to estimate the noise, and the fewest to count as a level rather than outliers.
LEAST_RESULTS, LEAST_OF_LEVEL = 10, 4
# Results on either side of the median of the outlier filter, and its threshold in deviations.
_BESIDE, _FAR = 4, 3.0
# Grid of the noise model: the decay of the correlation per result, and the share of the variance that is correlated.
_DECAYS, _SHARES = np.linspace(0.2, 0.9, 15), np.linspace(0.1, 1.0, 10)
# The median of |x| of a normal distribution, in standard deviations.
_MEDIAN = 0.6744897501960817
# The smallest noise: timer resolution and rounding.
_LEAST_NOISE = 1e-3
# Degrees of freedom of the variance of a long mean, per independent result. That variance describes the slowest part of
# the noise, of which a series shows little. By simulation (benchmarks/history_changes.py): twice this value gives false
# changes in 5 % of series with correlated noise; half of it misses many changes.
_FREEDOM = 0.25
# The changes are not known when the noise is first estimated: start from the largest, one per this many results.
_RESULTS_AN_EDGE = 50
_MOST_TURNS = 10


@dataclass(frozen=True)
class Noise:
    """`deviation`: the standard deviation of the logarithms of single results. `correlation`: between neighbours.
    `long_run`: the deviation of the mean of n results times sqrt(n), for large n; `freedom`: its degrees of freedom."""

    deviation: float
    correlation: float
    long_run: float
    freedom: float


@dataclass(frozen=True)
class Change:
    """`first`: the index of the first result after the change. `before`, `after`: the geometric means of both sides up
    to the next changes; `ratio`: after / before, with its 95 % interval."""

    first: int
    before: float
    after: float
    ratio: float
    ci95: tuple[float, float]


def find_changes(latencies: Sequence[float]) -> tuple[list[Change], Noise]:
    """Return the level changes of latencies (or other positive numbers) in the order of measurement, and the noise.

    Raises:
        ValueError: fewer than `LEAST_RESULTS` numbers, or one not above 0. MissingPackageError: without ruptures.
    """
    values = np.asarray(latencies, np.float64)
    if values.size < LEAST_RESULTS or not np.all(np.isfinite(values) & (values > 0)):
        raise ValueError(f"expected at least {LEAST_RESULTS} numbers above 0")
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
    """Return the values, float64 [n], with each that is more than `_FAR` deviations from the median around it replaced
    by that median. The series is mirrored at both ends and at `edges` (the first indices of new levels), so that only
    results of the same level count, and a new level is not filtered once it has `LEAST_OF_LEVEL` results.
    """
    around = np.concatenate([_medians(level) for level in np.split(logs, list(edges))])
    reach = _FAR * max(float(np.median(np.abs(logs - around))) / _MEDIAN, _LEAST_NOISE)
    return np.where(np.abs(logs - around) > reach, around, logs)


def _medians(logs: Values) -> Values:
    """Return the moving median of the values."""
    mirrored = np.pad(logs, _BESIDE, mode="symmetric")
    found: Values = np.median(np.lib.stride_tricks.sliding_window_view(mirrored, 2 * _BESIDE + 1), axis=1)
    return found


def noise_of(logs: Values, edges: Sequence[int] = ()) -> Noise:
    """Return the noise around levels that change at `edges`, the first indices of new levels.

    A share s of the variance v has a correlation that decays by d per result. Its spectral density at the frequency w
    is v (1 - s + s (1 - d^2) / (1 - 2 d cos w + d^2)). The chosen d and s minimise the sum over frequencies of
    log(density) + periodogram / density (Whittle's likelihood).
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
    variance *= logs.size / max(1, logs.size - len(levels))  # each mean takes one degree of freedom
    long_run = variance * (1 - share + share * (1 + decay) / (1 - decay))
    freedom = max(2.0, _FREEDOM * logs.size * variance / long_run)
    return Noise(math.sqrt(variance), float(share * decay), math.sqrt(long_run), freedom)


def _penalty(size: int, freedom: float) -> float:
    """Return the least reduction of the squared error by a change, in units of the noise. Chance reaches it at one of
    `size` places in at most `ALARMS` of all series, as the reduction by one change follows F(1, freedom)."""
    return float(stats.f.isf(ALARMS / size, 1, freedom))


def _segments(values: Values, *, count: int | None = None, penalty: float | None = None) -> list[int]:
    """Return the first index of each segment except the first, for `count` changes or by a `penalty` per change."""
    try:
        import ruptures
    except ModuleNotFoundError as error:
        raise MissingPackageError("ruptures", "data", "change detection", error=error) from None
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
