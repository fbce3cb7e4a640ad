"""Ratios of times that were measured alternately, as the benchmarks print them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats

from vitdeploy.benchmark.evidence import TRIMMED, PairedRatio, log_quotients


def student(log: float, error: float, freedom: int) -> tuple[float, float, float]:
    """The ratio whose natural logarithm was estimated, with Student's t interval at 95 %: (ratio, lower, upper).

    error: the standard error of the logarithm, with `freedom` degrees of freedom.
    """
    reach = float(stats.t.ppf(0.975, freedom)) * error
    return math.exp(log), math.exp(log - reach), math.exp(log + reach)


def log_ratio(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float]:
    """The ratio a/b of paired positive values with its 95 % interval: (ratio, lower, upper).

    The ratio is the geometric mean of a_i / b_i; the interval is Student's t interval of the mean of log(a_i / b_i)
    (Student 1908, "The probable error of a mean", Biometrika 6:1-25), taken back by exp.

    Raises:
        ValueError: fewer than two pairs, different lengths, or a value that is not positive and finite.
    """
    logs = log_quotients(a, b)
    return student(float(logs.mean()), float(logs.std(ddof=1)) / math.sqrt(logs.size), logs.size - 1)


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> PairedRatio:
    """The ratio a/b of independent pairs of positive values, some of which were disturbed.

    It is the 20 % trimmed mean of log(a_i / b_i), and its error comes from the winsorised standard deviation (Tukey and
    McLaughlin 1963, "Less vulnerable confidence and significance procedures for location based on a single sample",
    Sankhya A 25:331-352). A disturbance that lasts for seconds hits one of two blocks or both: few log ratios are far
    off, on either side, and a plain mean would follow them. Errors as `log_ratio`.
    """
    logs = np.sort(log_quotients(a, b))
    cut = int(TRIMMED * logs.size)
    kept = logs[cut : logs.size - cut]
    spread = float(np.clip(logs, kept[0], kept[-1]).std(ddof=1))
    error = spread / (kept.size / logs.size * math.sqrt(logs.size))
    return PairedRatio(float(kept.mean()), error, kept.size - 1, spread)
