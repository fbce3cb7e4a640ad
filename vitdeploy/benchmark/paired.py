"""The ratio of two artifacts, from the rounds that both were measured in; numpy only, so that it runs on devices
too."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitdeploy.benchmark.quiet import left_over
from vitdeploy.benchmark.results import Round, Values

# The share of paired values that is trimmed on either side of the mean.
TRIMMED = 0.2
# Two processes of one artifact differ for as long as they live, by where their memory lies: the log of their latency
# ratio has a standard deviation that a few processes estimate poorly. The estimate is shrunk towards this one, which
# counts as that many more processes. It was 0.8 % on the machine where it was measured; with 2 %, intervals still cover
# if it is 2.5 % (docs/performance.md, "The protocol").
PROCESS_SPREAD, PROCESS_FREEDOM = 0.02, 3
# The upper bound of the autocorrelation of neighbouring blocks: a few rounds cannot show more.
MOST_ALIKE = 0.8
# How far the interval of a narrow ratio reaches to either side: with 3 %, a ratio of 1.05 is found 9 times in 10. A
# ratio far from 1 is as clear with more, an eighth of its logarithm.
NARROW_REACH, FAR_SHARE = 0.03, 1 / 8
# Student's t for 95 %, two-sided, by its degrees of freedom from 1 on.
QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131),
    *(2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class PairedRatio:
    """A ratio's natural logarithm, its standard error, and the degrees of freedom of Student's t for its interval.

    `spread` is the standard deviation of the paired values' log ratios, disturbed ones clipped. `between`: the part of
    the error that is due to differences between processes. `bias`: how far the logarithm may be off in addition,
    however often it is measured.
    """

    log: float
    error: float
    freedom: int
    spread: float
    between: float = 0.0
    bias: float = 0.0

    @property
    def reach(self) -> float:
        """How far the 95 % interval of the logarithm reaches to either side."""
        return quantile(self.freedom) * self.error + self.bias

    @property
    def interval(self) -> tuple[float, float, float]:
        """The ratio itself, and the lower and upper end of its 95 % interval."""
        ratio, wider = math.exp(self.log), math.exp(self.reach)
        return ratio, ratio / wider, ratio * wider

    @property
    def narrow(self) -> bool:
        """Whether the ratio is precise enough to stop measuring.

        This rule depends on the error and hardly on the ratio, so the interval keeps its coverage (Chow
        and Robbins 1965, "On the asymptotic theory of fixed-width sequential confidence intervals for the mean", Annals
        of Mathematical Statistics 36:457-462). Measuring until a ratio differs from 1 would find differences that do
        not exist.
        """
        return self.reach <= max(NARROW_REACH, FAR_SHARE * abs(self.log))


def quantile(freedom: int) -> float:
    """Student's t for a two-sided interval of 95 %."""
    return QUANTILES[freedom - 1] if freedom <= len(QUANTILES) else 1.96 + 2.4 / freedom


def ratio_of_rounds(a: Sequence[Round], b: Sequence[Round]) -> PairedRatio:
    """The latency of `a` over that of `b`, from the median queries of paired rounds: the mean and error of `clustered`,
    with a bias for what others used during these rounds.

    Raises:
        ValueError: as `paired_ratio`.
    """
    found = clustered(_logs(medians_of(a), medians_of(b)), [block.process for block in a])
    return dataclasses.replace(found, bias=max(left_over(a), left_over(b)))


def ratio_of_medians(a: Sequence[float], b: Sequence[float]) -> PairedRatio:
    """As `ratio_of_rounds`, from median latencies of rounds that were all measured in one process per artifact.

    Raises:
        ValueError: as `paired_ratio`.
    """
    return clustered(_logs(a, b), [0] * len(a))


def medians_of(rounds: Sequence[Round]) -> list[float]:
    return [float(np.median(block.latencies_ms)) for block in rounds]


def clustered(logs: Values, processes: Sequence[int]) -> PairedRatio:
    """The 20 % trimmed mean of values that were measured in several processes, with an error that accounts for these.

    Rounds of one process share its deviation, and neighbours may be correlated: treated as independent, the rounds
    understate the error. So it is a cluster-robust error (Liang and Zeger 1986, "Longitudinal data analysis using
    generalized linear models", Biometrika 73:13-22): each round's influence on the trimmed mean, summed per process.
    With three processes it has two degrees of freedom, so it is shrunk towards what the rounds and `PROCESS_SPREAD`
    predict (Smyth 2004, "Linear models and empirical Bayes methods for assessing differential expression in microarray
    experiments", Statistical Applications in Genetics and Molecular Biology 3:3).
    """
    kept, influence = _trimmed(logs)
    of = np.asarray(processes)
    groups = [influence[of == each] for each in dict.fromkeys(processes)]
    count, each = len(groups), logs.size / len(groups)
    centred = [group - group.mean() for group in groups]
    freedom_within = logs.size - count
    squares = sum(float(group @ group) for group in centred)
    within = squares / freedom_within if freedom_within else float(influence @ influence) / max(1, logs.size - 1)
    alike = _alike(centred, each)
    noise = within / each * (1 + alike) / (1 - alike)
    sums = sum(float(group.sum()) ** 2 for group in groups)
    found = count**2 / (count - 1) / logs.size**2 * sums if count > 1 else 0.0
    freedom = PROCESS_FREEDOM + count - 1

    def drawn(expected: float, seen: float) -> float:
        return math.sqrt((PROCESS_FREEDOM * expected + (count - 1) * seen) / freedom / count)

    error = drawn(PROCESS_SPREAD**2 + noise, found)
    between = drawn(PROCESS_SPREAD**2, max(0.0, found - noise))
    spread = float(np.clip(logs, kept[0], kept[-1]).std(ddof=1)) if logs.size > 1 else 0.0
    return PairedRatio(float(kept.mean()), error, freedom, spread, between)


def _trimmed(logs: Values) -> tuple[Values, Values]:
    """The sorted values that are kept, and each value's influence on their mean (times the number of values)."""
    ordered = np.sort(logs)
    cut = int(TRIMMED * logs.size)
    kept = ordered[cut : logs.size - cut]
    clipped = np.clip(logs, kept[0], kept[-1])
    influence: Values = (clipped - clipped.mean()) * logs.size / kept.size
    return kept, influence


def _alike(centred: Sequence[Values], each: float) -> float:
    """The autocorrelation of neighbouring rounds of a process, corrected for the bias of few rounds (Marriott and Pope
    1954, "Bias in the estimation of autocorrelations", Biometrika 41:390-402)."""
    squares = sum(float(group @ group) for group in centred)
    if squares <= 0 or each <= 1:
        return 0.0
    found = sum(float(group[1:] @ group[:-1]) for group in centred) / squares * each / (each - 1)
    return min(max(0.0, found + (1 + 3 * max(0.0, found)) / each), MOST_ALIKE)


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> PairedRatio:
    """The ratio a/b of independent pairs of positive values, some of which were disturbed.

    It is the 20 % trimmed mean of log(a_i / b_i), and its error comes from the winsorised standard deviation (Tukey and
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
