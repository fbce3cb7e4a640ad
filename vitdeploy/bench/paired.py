"""The ratio of two artifacts, by the rounds that both were measured in; numpy alone, so that devices can ask it too."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitdeploy.bench.results import Round, Values

# The share of paired values that is left out on either side of the mean.
TRIMMED = 0.2
# The standard deviation of the log of the latency ratio of two processes of one artifact that is allowed for: by where
# their memory lies they differ as long as they live (docs/performance.md, "The protocol").
PROCESS_SPREAD = 0.008
# How far the interval of a narrow ratio reaches to either side: with 3 %, one of 1.05 is found 9 times in 10. A ratio
# that is far from 1 is as clear with more, an eighth of its logarithm.
NARROW, FAR = 0.03, 1 / 8
# Student's t for 95 % and the 12 of 20 rounds that are kept; for more rounds it is less.
QUANTILE = 2.2


@dataclass(frozen=True)
class PairedRatio:
    """A ratio's natural logarithm, its standard error, and the degrees of freedom of Student's t for its interval.

    `spread` is the standard deviation of the paired values' log ratios, disturbed ones clipped.
    """

    log: float
    error: float
    freedom: int
    spread: float

    @property
    def narrow(self) -> bool:
        """Whether it is known well enough, so that nothing more need be measured.

        As this asks for the error and hardly for the ratio, the interval covers as it would without being asked (Chow
        and Robbins 1965, "On the asymptotic theory of fixed-width sequential confidence intervals for the mean", Annals
        of Mathematical Statistics 36:457-462). To go on until a ratio differs from 1 would find what is not there.
        """
        return QUANTILE * self.error <= max(NARROW, FAR * abs(self.log))


def ratio_of_rounds(a: Sequence[Round], b: Sequence[Round]) -> PairedRatio:
    """The latency of `a` over that of `b`, by the median queries of paired rounds.

    What all rounds of a pair of processes have in common is no noise of a round: `PROCESS_SPREAD` is added for it.

    Raises:
        ValueError: as `paired_ratio`.
    """
    medians = [[float(np.median(block.latencies_ms)) for block in rounds] for rounds in (a, b)]
    found = paired_ratio(*medians)
    processes = len({block.process for block in a})
    error = math.hypot(found.error, PROCESS_SPREAD / math.sqrt(processes))
    return PairedRatio(found.log, error, found.freedom, found.spread)


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> PairedRatio:
    """The ratio a/b of paired positive values, some of which were disturbed.

    It is the 20 % trimmed mean of log(a_i / b_i), and its error is by the winsorised standard deviation (Tukey and
    McLaughlin 1963, "Less vulnerable confidence and significance procedures for location based on a single sample",
    Sankhya A 25:331-352). A disturbance that lasts for seconds hits one of two blocks or both: few log ratios are far
    off, on either side, and a plain mean would follow them.

    Raises:
        ValueError: fewer than two pairs, different lengths, or a value that is not positive and finite.
    """
    logs = np.sort(_logs(a, b))
    cut = int(TRIMMED * logs.size)
    kept = logs[cut : logs.size - cut]
    spread = float(np.clip(logs, kept[0], kept[-1]).std(ddof=1))
    error = spread / (kept.size / logs.size * math.sqrt(logs.size))
    return PairedRatio(float(kept.mean()), error, kept.size - 1, spread)


def _logs(a: Sequence[float], b: Sequence[float]) -> Values:
    if len(a) != len(b) or len(a) < 2:
        raise ValueError(f"at least two pairs are needed, found {len(a)} and {len(b)} values")
    values = np.asarray([a, b], np.float64)
    if not (np.isfinite(values).all() and (values > 0).all()):
        raise ValueError("all values must be positive and finite")
    found: Values = np.log(values[0]) - np.log(values[1])
    return found
