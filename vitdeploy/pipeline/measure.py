"""Bench the original and the engines in one contest, and compare every pair that matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from vitdeploy.bench.contest import Contestant, run_contest
from vitdeploy.bench.percentiles import DEFAULT
from vitdeploy.bench.protocol import Protocol
from vitdeploy.bench.results import Contest
from vitdeploy.bench.summary import block_medians, rows, samples
from vitdeploy.models.source import Source
from vitdeploy.pipeline.origin import ORIGINAL, to_request
from vitdeploy.pipeline.progress import Progress
from vitdeploy.runtime.interpreter import module_argv
from vitdeploy.verify.intervals import trimmed_log_ratio

# The standard deviation of the log of the latency ratio of two processes of one artifact that the interval allows for:
# by where their memory lies they differ as long as they live (docs/performance.md, "The protocol").
PROCESS_SPREAD = 0.008
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
) -> dict[str, Any]:
    """The `bench` part of a report.

    Raises:
        WorkerError: a measuring process died. Errors of a runtime come through as they are.
    """
    contest = run_contest(contestants, protocol, lambda text, done, total: progress("bench", done, total))
    return summarise(contest, pairs, percents)


def summarise(contest: Contest, pairs: Sequence[tuple[str, str]], percents: Sequence[float]) -> dict[str, Any]:
    """Protocol, results, ratios of the named pairs, samples."""
    protocol = contest.protocol
    return {
        "protocol": {
            "rounds": protocol.rounds,
            "block_seconds": protocol.block_seconds,
            "scenarios": list(protocol.scenarios),
            "batch": list(protocol.batch),
            "threads": protocol.threads,
            "processes": protocol.processes,
        },
        "results": rows(contest, percents),
        "ratios": ratios(contest, pairs),
        "samples_ms": samples(contest),
        "block_medians_ms": block_medians(contest),
    }


def ratios(contest: Contest, pairs: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """a / b of each pair, of latency ("single") and of throughput ("offline"), by the median queries of paired rounds.

    `verdict`: what the interval says of the first of the two: faster, slower, or no difference.
    """
    return [
        _ratio(contest, a, b, scenario)
        for a, b in pairs
        for scenario in METRICS
        if scenario in contest.protocol.scenarios
    ]


def _ratio(contest: Contest, a: str, b: str, scenario: str) -> dict[str, Any]:
    rounds = {entry.artifact: entry.rounds[scenario] for entry in contest.entries}
    medians = {name: [float(np.median(block.latencies_ms)) for block in rounds[name]] for name in (a, b)}
    processes = len({block.process for block in rounds[a]})
    metric = METRICS[scenario]
    over, under = (a, b) if metric == "latency" else (b, a)
    ratio, low, high = trimmed_log_ratio(
        medians[over], medians[under], process_spread=PROCESS_SPREAD, processes=processes
    )
    faster, slower = (high < 1, low > 1) if metric == "latency" else (low > 1, high < 1)
    verdict = "faster" if faster else "slower" if slower else "no difference"
    return {"a": a, "b": b, "metric": metric, "ratio": ratio, "ci95": [low, high], "verdict": verdict}
