"""From the measurements of a contest to the numbers of a report: percentiles, throughput, flags. All JSON-ready."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.bench.contest import Contest, Entry, Round

# MLPerf's early stopping: the least number of queries for a statement about p99 with 99 % confidence.
P99_QUERIES = 662
UNSTABLE = 0.05

Values = npt.NDArray[np.float64]


def rows(contest: Contest) -> list[dict[str, Any]]:
    """One row per contestant, in the contest's order.

    `latency_ms` (p50, p90, p99, mean) is of the scenario "single", `throughput` (images per second) of "offline"; if
    only one of them was run, both are of that one. `batch` has the batch size of each. `samples` is the number of
    queries behind `latency_ms`.
    """
    return [_row(contest, entry) for entry in contest.entries]


def _row(contest: Contest, entry: Entry) -> dict[str, Any]:
    single, offline = _latency_scenario(contest), _throughput_scenario(contest)
    latencies = _latencies(entry.rounds[single])
    return {
        "artifact": entry.artifact,
        "target": entry.target,
        "precision": entry.precision,
        "provider": entry.provider,
        "batch": {"single": contest.protocol.batch_of(single), "offline": contest.protocol.batch_of(offline)},
        "latency_ms": {
            "p50": percentile(latencies, 50),
            "p90": percentile(latencies, 90),
            "p99": percentile(latencies, 99),
            "mean": float(latencies.mean()),
        },
        "throughput": _throughput(entry.rounds[offline]),
        "flags": _flags(contest, entry),
        "samples": int(latencies.size),
        "load_seconds": float(entry.load_seconds),
        "first_inference_ms": float(entry.first_inference_ms),
    }


def percentile(values: Values, percent: int) -> float:
    """The nearest-rank percentile, a value that was measured: the ceil(percent / 100 * n)-th smallest of n."""
    rank = max(1, -(-percent * values.size // 100))
    return float(np.sort(values)[rank - 1])


def block_medians(contest: Contest) -> dict[str, list[float]]:
    """Per artifact the median latency of each round, in ms, in the order of time."""
    return {entry.artifact: _medians(contest, entry) for entry in contest.entries}


def samples(contest: Contest, limit: int = 600) -> dict[str, list[float]]:
    """Per artifact at most `limit` latencies in ms, picked evenly over time."""
    scenario = _latency_scenario(contest)
    return {entry.artifact: _evenly(_latencies(entry.rounds[scenario]), limit) for entry in contest.entries}


def _latency_scenario(contest: Contest) -> str:
    return "single" if "single" in contest.protocol.scenarios else contest.protocol.scenarios[0]


def _throughput_scenario(contest: Contest) -> str:
    return "offline" if "offline" in contest.protocol.scenarios else contest.protocol.scenarios[0]


def _latencies(rounds: Sequence[Round]) -> Values:
    return np.concatenate([block.latencies_ms for block in rounds])


def _throughput(rounds: Sequence[Round]) -> float:
    """Images per second over all rounds."""
    images = sum(block.batch * block.latencies_ms.size for block in rounds)
    return float(images / sum(block.seconds for block in rounds))


def _medians(contest: Contest, entry: Entry) -> list[float]:
    return [float(np.median(block.latencies_ms)) for block in entry.rounds[_latency_scenario(contest)]]


def _evenly(values: Values, limit: int) -> list[float]:
    if values.size > limit:
        values = values[np.linspace(0, values.size - 1, limit).round().astype(int)]
    return [float(value) for value in values]


def _flags(contest: Contest, entry: Entry) -> list[str]:
    """What makes a row less than a good measurement.

    "unstable": the round medians have a coefficient of variation over 5 %. "short": too few queries for an honest p99.
    "contended": the machine had more to do than it has CPUs when the contest started.
    """
    medians = np.asarray(_medians(contest, entry))
    queries = sum(block.latencies_ms.size for block in entry.rounds[_latency_scenario(contest)])
    flags = []
    if medians.size > 1 and medians.std(ddof=1) > UNSTABLE * medians.mean():
        flags.append("unstable")
    if queries < P99_QUERIES:
        flags.append("short")
    if contest.load_average is not None and contest.load_average > contest.cpus + 0.5:
        flags.append("contended")
    return flags
