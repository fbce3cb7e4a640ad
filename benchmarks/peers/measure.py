"""The benchmark runs of one model: which there are, how a run of one is kept as JSON, and what follows from several."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ratios import log_ratio
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.results import BenchRun, Measurements, Round
from vitdeploy.benchmark.run import BenchCandidate, run_benchmark
from vitdeploy.benchmark.summary import block_medians, rows
from vitdeploy.spec import encode

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
    ids: Mapping[str, str],
    rounds: int,
    threads: int,
    progress: Callable[[str, int, int], None],
) -> dict[str, Any]:
    """One benchmark run of the artifacts, by name how they are run ("python" is the interpreter) and which they are.

    The answer is JSON-ready, with every query in it.
    """
    candidates = [
        BenchCandidate(name, "", "", (request["python"], str(WORKER)), {**request, "streams": scenario.streams})
        for name, request in runs.items()
    ]
    bench_run = run_benchmark(candidates, _protocol(scenario, rounds, threads), progress)
    return {
        "load_average": bench_run.load_average,
        "cpus": bench_run.cpus,
        "rounds": rounds,
        "entries": {e.artifact: {"id": ids[e.artifact], **_encoded(e, scenario)} for e in bench_run.entries},
    }


def _protocol(scenario: Scenario, rounds: int, threads: int) -> Protocol:
    return Protocol((scenario.mode,), (scenario.batch,), duration=0.0, min_rounds=rounds, threads=threads, processes=1)


def _encoded(entry: Measurements, scenario: Scenario) -> dict[str, Any]:
    blocks = [
        {"latencies_ms": [round(value, 5) for value in block.latencies_ms.tolist()], "seconds": block.seconds}
        for block in entry.rounds[scenario.mode]
    ]
    facts = {"load_seconds": entry.load_seconds, "first_inference_ms": entry.first_inference_ms}
    return {"provider": entry.provider, **facts, "rounds": blocks}


def summary(scenario: Scenario, sessions: Sequence[Mapping[str, Any]], threads: int) -> dict[str, Any]:
    """Rows, and the ratios of all pairs. The rounds of all sessions are joined; a ratio uses the sessions with both.

    Rounds of two artifacts are paired only within a session, in which they alternated.
    """
    bench_runs = [_bench_run(scenario, session, threads) for session in sessions]
    names = list(dict.fromkeys(entry.artifact for bench_run in bench_runs for entry in bench_run.entries))
    values = [_values(scenario, bench_run) for bench_run in bench_runs]
    ratios = (_ratio(a, b, values) for a, b in itertools.permutations(names, 2))
    return {
        "scenario": scenario.name,
        "metric": scenario.metric,
        "rounds": {name: sum(len(each.get(name, ())) for each in values) for name in names},
        "rows": {row.artifact: encode(row) for row in rows(_joined(bench_runs, names))},
        "ratios": [each for each in ratios if each is not None],
    }


def _bench_run(scenario: Scenario, session: Mapping[str, Any], threads: int) -> BenchRun:
    entries = []
    for name, found in session["entries"].items():
        blocks = [
            Round(scenario.batch, np.asarray(block["latencies_ms"], np.float64), block["seconds"])
            for block in found["rounds"]
        ]
        facts = found["provider"], found["load_seconds"], found["first_inference_ms"]
        entries.append(Measurements(name, "", "", *facts, rounds={scenario.mode: blocks}))
    protocol = _protocol(scenario, session["rounds"], threads)
    return BenchRun(protocol, tuple(entries), session["load_average"], session["cpus"])


def _values(scenario: Scenario, bench_run: BenchRun) -> Mapping[str, Sequence[float]]:
    """What ratios are of, by artifact, one value a round."""
    if scenario.metric == "latency":
        return block_medians(bench_run)
    return {e.artifact: [block.images_per_second for block in e.rounds[scenario.mode]] for e in bench_run.entries}


def _joined(bench_runs: Sequence[BenchRun], names: Sequence[str]) -> BenchRun:
    """One benchmark run of all, as if every artifact had run on; contended where one of them was."""
    entries = []
    for name in names:
        parts = [entry for bench_run in bench_runs for entry in bench_run.entries if entry.artifact == name]
        rounds = {mode: [block for part in parts for block in part.rounds[mode]] for mode in parts[0].rounds}
        entries.append(dataclasses.replace(parts[0], rounds=rounds))
    loads = [bench_run.load_average for bench_run in bench_runs if bench_run.load_average is not None]
    return dataclasses.replace(bench_runs[0], entries=tuple(entries), load_average=max(loads, default=None))


def _ratio(a: str, b: str, sessions: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, Any] | None:
    """a / b with its interval (None for a single round), or None where they never met."""
    common = [values for values in sessions if a in values and b in values]
    ours, theirs = ([value for values in common for value in values[name]] for name in (a, b))
    if len(ours) < 2:
        return {"a": a, "b": b, "ratio": ours[0] / theirs[0], "ci95": None} if ours else None
    ratio, low, high = log_ratio(ours, theirs)
    return {"a": a, "b": b, "ratio": ratio, "ci95": [low, high]}
