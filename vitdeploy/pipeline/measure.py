"""Bench the original and the engines in one contest, and compare every pair that matters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitdeploy.bench.contest import Contest, Contestant, Protocol, run_contest
from vitdeploy.bench.summary import block_medians, rows, samples
from vitdeploy.models.source import Source
from vitdeploy.pipeline.origin import ORIGINAL, to_request
from vitdeploy.pipeline.progress import Progress
from vitdeploy.runtime.interpreter import module_argv
from vitdeploy.verify.intervals import log_ratio


def original_contestant(source: Source, name: str = ORIGINAL) -> Contestant:
    """The original (a PyTorch model in eager mode, or an ONNX file), in a process of its own."""
    worker = module_argv("vitdeploy.pipeline.reference_worker")
    return Contestant(name, "original", "fp32", worker, to_request(source))


def measure(
    contestants: Sequence[Contestant], protocol: Protocol, pairs: Sequence[tuple[str, str]], progress: Progress
) -> dict[str, Any]:
    """The `bench` part of a report: protocol, results, ratios of the named pairs, samples.

    Raises:
        WorkerError: a measuring process died. Errors of a runtime come through as they are.
    """
    contest = run_contest(contestants, protocol, lambda text, done, total: progress("bench", done, total))
    return {
        "protocol": {
            "rounds": protocol.rounds,
            "block_seconds": protocol.block_seconds,
            "scenarios": list(protocol.scenarios),
            "batch": list(protocol.batch),
            "threads": protocol.threads,
        },
        "results": rows(contest),
        "ratios": [row for a, b in pairs for row in _ratios(contest, a, b)],
        "samples_ms": samples(contest),
        "block_medians_ms": block_medians(contest),
    }


def _ratios(contest: Contest, a: str, b: str) -> list[dict[str, Any]]:
    """a / b for latency (round medians) and throughput (round means), each with the t-interval on log ratios."""
    found = []
    if "single" in contest.protocol.scenarios:
        medians = block_medians(contest)
        found.append(_ratio(a, b, "latency", medians[a], medians[b]))
    if "offline" in contest.protocol.scenarios:
        rates = {e.artifact: [r.images_per_second for r in e.rounds["offline"]] for e in contest.entries}
        found.append(_ratio(a, b, "throughput", rates[a], rates[b]))
    return found


def _ratio(a: str, b: str, metric: str, values_a: Sequence[float], values_b: Sequence[float]) -> dict[str, Any]:
    ratio, low, high = log_ratio(values_a, values_b)
    return {"a": a, "b": b, "metric": metric, "ratio": ratio, "ci95": [low, high]}
