"""The precision of a latency and a throughput: 95 % intervals that account for blocks and processes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from vitdeploy.benchmark.paired import clustered, medians_of, quantile
from vitdeploy.benchmark.percentiles import nearest_rank
from vitdeploy.benchmark.results import Round, Values

# (lower, upper); None if the measurement does not bound it.
Interval = tuple[float | None, float | None]


def percentile_interval(rounds: Sequence[Round], percent: float) -> Interval:
    """The interval of one percentile of latency, in ms.

    Its ends are two of the latencies, by rank, from the error of the share of queries below the percentile, with blocks
    as clusters (Woodruff 1952, "Confidence intervals for medians and other position measures", Journal of the American
    Statistical Association 47:635-646). It is widened by the differences between processes, which all blocks of one
    share.
    """
    blocks = [block.latencies_ms for block in rounds if block.latencies_ms.size]
    count = sum(values.size for values in blocks)
    if len(blocks) < 2:
        return None, None
    every = np.sort(np.concatenate(blocks))
    found, share = nearest_rank(every, percent), percent / 100
    residuals = np.array([np.count_nonzero(values <= found) - share * values.size for values in blocks])
    clusters = math.sqrt(len(blocks) / (len(blocks) - 1) * float(residuals @ residuals)) / count
    reach = quantile(len(blocks) - 1) * max(clusters, math.sqrt(share * (1 - share) / count))
    low, high = math.floor(count * (share - reach)), math.ceil(count * (share + reach))
    wider = math.exp(_between_processes(rounds))
    return (
        float(every[low - 1]) / wider if low >= 1 else None,
        float(every[high - 1]) * wider if high <= count else None,
    )


def _between_processes(rounds: Sequence[Round]) -> float:
    """How far an interval reaches, as a logarithm, from differences between processes alone."""
    filled = [block for block in rounds if block.latencies_ms.size]
    found = clustered(_logs(medians_of(filled)), [block.process for block in filled])
    return quantile(found.freedom) * found.between


def throughput_interval(rounds: Sequence[Round], throughput: float) -> Interval:
    """The interval of images per second around that of all rounds together; computed like that of a ratio."""
    filled = [block for block in rounds if block.latencies_ms.size]
    if len(filled) < 2:
        return None, None
    found = clustered(_logs([block.images_per_second for block in filled]), [block.process for block in filled])
    wider = math.exp(found.reach)
    return throughput / wider, throughput * wider


def _logs(values: Sequence[float]) -> Values:
    found: Values = np.log(np.asarray(values, np.float64))
    return found
