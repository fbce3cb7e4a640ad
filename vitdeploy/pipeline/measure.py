"""Bench the original and the engines in one benchmark run, and compare every pair that matters."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from vitdeploy.benchmark.candidate import BenchCandidate
from vitdeploy.benchmark.decided import WILD_SPREAD, alone_reason, judged
from vitdeploy.benchmark.expected import expected
from vitdeploy.benchmark.percentiles import DEFAULT
from vitdeploy.benchmark.protocol import Protocol, parse_scenario
from vitdeploy.benchmark.results import BenchRun
from vitdeploy.benchmark.run import alone, run_benchmark
from vitdeploy.benchmark.summary import block_medians, rows, samples
from vitdeploy.benchmark.survey import surveyed
from vitdeploy.document.bench import Bench, Metric, ProtocolFacts, Ratio
from vitdeploy.graph.analysis.work import Work
from vitdeploy.models.source import Source
from vitdeploy.pipeline.roofline import context_facts
from vitdeploy.pipeline.workload import workloads_of
from vitdeploy.progress import Progress
from vitdeploy.runtime.interpreter import module_argv
from vitdeploy.stages.reference_model import to_request
from vitdeploy.stages.step import ORIGINAL

# What a ratio is of, by the scenario that it was measured in.
METRICS: dict[str, Metric] = {"single": "latency", "offline": "throughput"}
NOT_DECIDED = "not decided"


def original_candidate(source: Source, name: str = ORIGINAL) -> BenchCandidate:
    """The original (a PyTorch model in eager mode, or an ONNX file), in a process of its own."""
    worker = module_argv("vitdeploy.pipeline.reference_worker")
    return BenchCandidate(name, "original", "fp32", worker, to_request(source))


def measure(
    bench_candidates: Sequence[BenchCandidate],
    protocol: Protocol,
    pairs: Sequence[tuple[str, str]],
    progress: Progress,
    percents: Sequence[float] = DEFAULT,
    *,
    context: bool = False,
    settled: Callable[[Bench], bool] | None = None,
) -> Bench:
    """The `bench` part of a report, with the ratios of `pairs`. It ends early where `settled` says so of it.

    With `context`, the machine and the layers of each engine are measured afterwards. A separate progress reports what
    it waits for, and how long it will take.

    Raises:
        WorkerError: a measuring process died. Errors of a runtime propagate unchanged.
    """

    def tell(step: str) -> Progress:
        return lambda text, done, total: progress(text if total == 1 else step, done, total)

    with alone(tell("bench")):
        times = expected(bench_candidates, protocol, context=context, looks=settled is not None)
        progress(f"{len(bench_candidates)} to measure, {times}", 1, 1)
        bench_run = run_benchmark(
            bench_candidates,
            protocol,
            tell("bench"),
            pairs=pairs,
            settled=settled and (lambda found: settled(summarise(found, pairs, percents))),
        )
        if not context:
            return summarise(bench_run, pairs, percents)
        bench_run = surveyed(bench_run, bench_candidates, tell("context"))
    workloads = workloads_of(bench_candidates, protocol.batch_of(protocol.latency_scenario))
    return summarise(bench_run, pairs, percents, workloads)


def summarise(
    bench_run: BenchRun,
    pairs: Sequence[tuple[str, str]],
    percents: Sequence[float],
    workloads: Mapping[str, Work | str] | None = None,
) -> Bench:
    """Convert measurements to the form of the report, with the ratios of the named pairs."""
    protocol = bench_run.protocol
    results = rows(bench_run, percents)
    waits = parse_scenario(protocol.latency_scenario).kind == "server"
    found = ratios(bench_run, pairs)
    unreliable = undecided(bench_run, found)
    return Bench(
        ProtocolFacts(
            {name: len(bench_run.entries[0].rounds[name]) for name in protocol.scenarios},
            protocol.block_seconds,
            tuple(protocol.scenarios),
            tuple(protocol.batch),
            protocol.threads,
            len({block.process for entry in bench_run.entries for each in entry.rounds.values() for block in each}),
        ),
        tuple(results),
        tuple(found),
        samples(bench_run),
        block_medians(bench_run),
        unreliable,
        context_facts(bench_run.context, results, workloads or {}, waits, unreliable),
    )


def ratios(bench_run: BenchRun, pairs: Sequence[tuple[str, str]]) -> list[Ratio]:
    """a / b of each pair, of latency ("single") and of throughput ("offline"), by the median queries of paired rounds;
    the verdict on what is not decided, and has no bounds, is `NOT_DECIDED`, or what seems."""
    return [
        _ratio(bench_run, a, b, scenario)
        for a, b in pairs
        for scenario in METRICS
        if scenario in bench_run.protocol.scenarios
    ]


def _ratio(bench_run: BenchRun, a: str, b: str, scenario: str) -> Ratio:
    metric = METRICS[scenario]
    over, under = (a, b) if metric == "latency" else (b, a)
    found = judged(bench_run, over, under, scenario)
    ratio, low, high = found.ratio.interval
    milliseconds = found.over_ms, found.under_ms
    made = Ratio(
        a,
        b,
        metric,
        ratio if math.isnan(found.estimate) else found.estimate,
        (low, high),
        decided=found.decided,
        reason=found.reason,
        a_ms=milliseconds[over != a],
        b_ms=milliseconds[over == a],
        unstable=found.ratio.spread > WILD_SPREAD,
        bounds=found.bounds,
    )
    sign = 1 if metric == "latency" else -1
    low, high = made.sure
    if low <= 1 <= high:
        words = ("seems faster", "no difference" if found.decided else NOT_DECIDED, "seems slower")
        return replace(made, verdict=words[1 + sign * found.seems])
    return replace(made, verdict="slower" if (low > 1) == (sign > 0) else "faster")


def undecided(bench_run: BenchRun, found: Sequence[Ratio]) -> dict[str, str]:
    """The reasons by artifact: that of the ratio which claims are made of (to the original, or else its first), or, of
    one that is the first of no ratio, that of its own latency."""
    reasons = {}
    for entry in bench_run.entries:
        own = [ratio for ratio in found if ratio.a == entry.artifact]
        own.sort(key=lambda ratio: ratio.b != ORIGINAL)  # of one pair, that of the latency stays the first
        because = own[0].reason if own else alone_reason(bench_run, entry)
        if because:
            reasons[entry.artifact] = because
    return reasons
