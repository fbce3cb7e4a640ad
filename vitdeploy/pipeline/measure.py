"""Bench the original and the engines in one contest, and compare every pair that matters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vitdeploy.bench.contest import run_contest
from vitdeploy.bench.contestant import Contestant
from vitdeploy.bench.flags import UNSTABLE
from vitdeploy.bench.paired import ratio_of_rounds
from vitdeploy.bench.percentiles import DEFAULT
from vitdeploy.bench.protocol import Protocol, parse_scenario
from vitdeploy.bench.results import Contest
from vitdeploy.bench.summary import block_medians, rows, samples
from vitdeploy.bench.survey import surveyed
from vitdeploy.graph.work import Work
from vitdeploy.models.given import Source
from vitdeploy.pipeline.origin import ORIGINAL, to_request
from vitdeploy.pipeline.progress import Progress
from vitdeploy.pipeline.roofline import context_facts
from vitdeploy.pipeline.works import works_of
from vitdeploy.runtime.interpreter import module_argv
from vitdeploy.verify.intervals import student

# What a ratio is of, by the scenario that it was measured in.
METRICS = {"single": "latency", "offline": "throughput"}


def original_contestant(source: Source, name: str = ORIGINAL) -> Contestant:
    """The original (a PyTorch model in eager mode, or an ONNX file), in a process of its own."""
    worker = module_argv("vitdeploy.pipeline.reference_worker")
    return Contestant(name, "original", "fp32", worker, to_request(source))


def measure(
    contestants: Sequence[Contestant],
    protocol: Protocol,
    pairs: Sequence[tuple[str, str]],
    progress: Progress,
    percents: Sequence[float] = DEFAULT,
    *,
    context: bool = False,
) -> dict[str, Any]:
    """The `bench` part of a report, with the ratios of `pairs`.

    With `context`, the machine and the layers of each engine are measured after it.

    Raises:
        WorkerError: a measuring process died. Errors of a runtime come through as they are.
    """
    contest = run_contest(contestants, protocol, lambda text, done, total: progress("bench", done, total), pairs=pairs)
    if not context:
        return summarise(contest, pairs, percents)
    contest = surveyed(contest, contestants, lambda text, done, total: progress("context", done, total))
    works = works_of(contestants, protocol.batch_of(protocol.latency_scenario))
    return summarise(contest, pairs, percents, works)


def summarise(
    contest: Contest,
    pairs: Sequence[tuple[str, str]],
    percents: Sequence[float],
    works: Mapping[str, Work | str] | None = None,
) -> dict[str, Any]:
    """Protocol, results, ratios of the named pairs, samples; context, where it was measured (see `context_facts`)."""
    protocol = contest.protocol
    results = rows(contest, percents)
    waits = parse_scenario(protocol.latency_scenario).kind == "server"
    return {
        "protocol": {
            "rounds": {name: len(contest.entries[0].rounds[name]) for name in protocol.scenarios},
            "block_seconds": protocol.block_seconds,
            "scenarios": list(protocol.scenarios),
            "batch": list(protocol.batch),
            "threads": protocol.threads,
            "processes": protocol.processes,
        },
        "results": results,
        "ratios": ratios(contest, pairs),
        "samples_ms": samples(contest),
        "block_medians_ms": block_medians(contest),
        "context": context_facts(contest.context, results, works or {}, waits),
    }


def ratios(contest: Contest, pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """a / b of each pair, of latency ("single") and of throughput ("offline"), by the median queries of paired rounds.

    `verdict`: what the interval says of the first of the two: faster, slower, or no difference. `unstable`: the ratios
    of paired rounds vary too much, whatever each of the two did by itself.
    """
    return [
        _ratio(contest, a, b, scenario)
        for a, b in pairs
        for scenario in METRICS
        if scenario in contest.protocol.scenarios
    ]


def _ratio(contest: Contest, a: str, b: str, scenario: str) -> dict[str, Any]:
    rounds = {entry.artifact: entry.rounds[scenario] for entry in contest.entries}
    metric = METRICS[scenario]
    over, under = (a, b) if metric == "latency" else (b, a)
    found = ratio_of_rounds(rounds[over], rounds[under])
    ratio, low, high = student(found.log, found.error, found.freedom)
    faster, slower = (high < 1, low > 1) if metric == "latency" else (low > 1, high < 1)
    verdict = "faster" if faster else "slower" if slower else "no difference"
    common = {"a": a, "b": b, "metric": metric}
    return {**common, "ratio": ratio, "ci95": [low, high], "verdict": verdict, "unstable": found.spread > UNSTABLE}
