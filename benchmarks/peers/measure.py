"""The contests of one model: which there are, how a run of one is kept as JSON, and what follows from several."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.bench.contest import Contest, Contestant, Entry, Protocol, Round, run_contest
from vitdeploy.bench.summary import block_medians, rows
from vitdeploy.verify.intervals import log_ratio

WORKER = Path(__file__).resolve().parent / "worker.py"


@dataclass(frozen=True)
class Scenario:
    """`metric` is what its ratios are of: the latency of a query, or images per second."""

    name: str
    mode: str
    batch: int
    streams: int
    metric: str
    text: str


SCENARIOS = {
    each.name: each
    for each in (
        Scenario("single", "single", 1, 1, "latency", "one image at a time, all threads"),
        Scenario("offline", "offline", 8, 1, "throughput", "batches of 8, all threads"),
        Scenario("streams", "offline", 8, 2, "throughput", "two streams of one thread, each one image at a time"),
    )
}


def run(
    scenario: Scenario,
    runs: Mapping[str, Mapping[str, Any]],
    rounds: int,
    threads: int,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """One contest of the artifacts, by name how they are run; the answer is JSON-ready, every query in it."""
    contestants = [
        Contestant(name, "", "", (sys.executable, str(WORKER)), {**request, "streams": scenario.streams})
        for name, request in runs.items()
    ]
    contest = run_contest(contestants, _protocol(scenario, rounds, threads), progress)
    return {
        "load_average": contest.load_average,
        "cpus": contest.cpus,
        "rounds": rounds,
        "entries": {entry.artifact: _encoded(entry, scenario) for entry in contest.entries},
    }


def _protocol(scenario: Scenario, rounds: int, threads: int) -> Protocol:
    return Protocol((scenario.mode,), (scenario.batch,), duration=0.0, min_rounds=rounds, threads=threads)


def _encoded(entry: Entry, scenario: Scenario) -> dict[str, Any]:
    blocks = [
        {"latencies_ms": [round(value, 5) for value in block.latencies_ms.tolist()], "seconds": block.seconds}
        for block in entry.rounds[scenario.mode]
    ]
    facts = {"load_seconds": entry.load_seconds, "first_inference_ms": entry.first_inference_ms}
    return {"provider": entry.provider, **facts, "rounds": blocks}


def summary(scenario: Scenario, sessions: Sequence[Mapping[str, Any]], threads: int) -> dict[str, Any]:
    """Rows and the ratios of all pairs, of the artifacts that every session has; their rounds are put together."""
    names = [name for name in sessions[0]["entries"] if all(name in each["entries"] for each in sessions)]
    contest = _pooled(scenario, sessions, names, threads)
    if scenario.metric == "latency":
        values: Mapping[str, Sequence[float]] = block_medians(contest)
    else:
        values = {e.artifact: [block.images_per_second for block in e.rounds[scenario.mode]] for e in contest.entries}
    return {
        "scenario": scenario.name,
        "rounds": [each["rounds"] for each in sessions],
        "metric": scenario.metric,
        "rows": {row["artifact"]: row for row in rows(contest)},
        "ratios": [_ratio(a, b, values) for a, b in itertools.permutations(names, 2)],
    }


def _pooled(scenario: Scenario, sessions: Sequence[Mapping[str, Any]], names: list[str], threads: int) -> Contest:
    entries = []
    for name in names:
        found = [each["entries"][name] for each in sessions]
        blocks = [
            Round(scenario.batch, np.asarray(block["latencies_ms"], np.float64), block["seconds"])
            for one in found
            for block in one["rounds"]
        ]
        facts = found[0]["provider"], found[0]["load_seconds"], found[0]["first_inference_ms"]
        entries.append(Entry(name, "", "", *facts, rounds={scenario.mode: blocks}))
    loads = [each["load_average"] for each in sessions if each["load_average"] is not None]
    protocol = _protocol(scenario, sum(each["rounds"] for each in sessions), threads)
    return Contest(protocol, tuple(entries), max(loads, default=None), sessions[0]["cpus"])


def _ratio(a: str, b: str, values: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    if len(values[a]) < 2:  # a single round has no interval
        return {"a": a, "b": b, "ratio": values[a][0] / values[b][0], "ci95": None}
    ratio, low, high = log_ratio(values[a], values[b])
    return {"a": a, "b": b, "ratio": ratio, "ci95": [low, high]}
