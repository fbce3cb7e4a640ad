"""Percentiles of latency, and what a given number of queries allows to claim about them.

A percentile is the nearest-rank one, a measured latency. What a number of queries says about the percentile of all
future queries follows from the binomial distribution: of n queries, the number above the true percentile p is
binomial with probability 1 - p. MLPerf's early stopping uses it with confidence 0.99 and tolerance 0 (MLCommons,
inference_rules.adoc, appendix "Early Stopping Criterion"; loadgen/early_stopping.cc).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import numpy.typing as npt

CONFIDENCE = 0.99
MOST_QUERIES = 1 << 62
DEFAULT = (50.0, 90.0, 99.0)

Values = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Percentile:
    """One percentile of `queries` latencies, in their unit.

    value: the nearest-rank percentile. With fewer than `needed` queries it is instead the largest latency that the
        true percentile reaches with 99 % confidence, and `at_least` is true; None if there is none.
    upper: MLPerf's early-stopping estimate, which the true percentile does not exceed with 99 % confidence; None with
        fewer than `needed` queries.
    """

    percent: float
    value: float | None
    at_least: bool
    upper: float | None
    queries: int
    needed: int

    @property
    def name(self) -> str:
        """Such as "p99.9"."""
        return f"p{self.percent:g}"


def percentiles(values: Values, percents: Sequence[float] = DEFAULT) -> list[Percentile]:
    """Each requested percentile, in the order given, of any number of latencies, including none."""
    ordered = np.sort(values)
    return [_percentile(ordered, percent) for percent in percents]


def _percentile(ordered: Values, percent: float) -> Percentile:
    needed, count = queries_needed(percent), int(ordered.size)
    if count >= needed:
        upper = float(ordered[count - over_latency(count, percent)])
        return Percentile(percent, nearest_rank(ordered, percent), False, upper, count, needed)
    rank = least_rank(count, percent)
    return Percentile(percent, float(ordered[rank - 1]) if rank else None, True, None, count, needed)


def nearest_rank(values: Values, percent: float) -> float:
    """The ceil(percent / 100 * n)-th smallest of n values, at least one."""
    # As an exact fraction of the decimal: 99.9 % of 1,000 are 999, not 999.0000000000001.
    rank = max(1, math.ceil(Fraction(str(percent)) * values.size / 100))
    return float(np.sort(values)[rank - 1])


def queries_needed(percent: float) -> int:
    """The least number of queries for a statement about a percentile: one may be above it, with 99 % confidence.

    The smallest n with P(Binomial(n, 1 - p) <= 1) <= 0.01: 64 for p90, 662 for p99, 6,636 for p99.9.
    """
    below, above = percent / 100, 1 - percent / 100

    def enough(count: int) -> bool:
        return below**count + count * above * below ** (count - 1) <= 1 - CONFIDENCE

    return bisect.bisect_left(range(MOST_QUERIES), True, 1, key=enough)


def over_latency(count: int, percent: float) -> int:
    """How many of `count` queries may lie above the early-stopping estimate or be it: the largest t with
    P(Binomial(count, 1 - p) <= t) <= 0.01. 0 where `count` is less than `queries_needed`."""
    reached = np.flatnonzero(_distribution(count, 1 - percent / 100) <= 1 - CONFIDENCE)
    return int(reached[-1]) if reached.size else 0


def least_rank(count: int, percent: float) -> int:
    """The largest rank k, from 1, whose latency is at most the true percentile with 99 % confidence; 0 without one.

    The k-th smallest exceeds the percentile only if more than count - k queries do.
    """
    above = np.flatnonzero(_distribution(count, 1 - percent / 100) >= CONFIDENCE)
    return count - int(above[0])


def _distribution(count: int, probability: float) -> Values:
    """P(Binomial(count, probability) <= k) for k = 0 .. count."""
    factorials = np.concatenate([[0.0], np.cumsum(np.log(np.arange(1, count + 1)))])
    k = np.arange(count + 1)
    logs = factorials[-1] - factorials - factorials[::-1]
    logs += k * math.log(probability) + (count - k) * math.log1p(-probability)
    found: Values = np.minimum(np.cumsum(np.exp(logs)), 1.0)
    return found
