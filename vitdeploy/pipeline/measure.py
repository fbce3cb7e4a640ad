"""The bench of all artifacts of a job, and its context: latencies relative to the machine's measured peak rates."""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vitdeploy.benchmark.context import Context, Layer, Memory, Profile
from vitdeploy.benchmark.protocol import Protocol, parse_scenario
from vitdeploy.benchmark.results import DEFAULT, BenchRun
from vitdeploy.benchmark.run import BenchCandidate, alone, expected, run_benchmark
from vitdeploy.benchmark.summary import Metric, Ratio, Row, alone_reason, block_medians, judged, rows, samples
from vitdeploy.benchmark.survey import surveyed
from vitdeploy.document import bench
from vitdeploy.errors import VitdeployError
from vitdeploy.graph.analysis.work import Work, count_work
from vitdeploy.graph.io.admit import admit_graph
from vitdeploy.models.source import Source
from vitdeploy.progress import Progress
from vitdeploy.runtime.backend import RUNTIME
from vitdeploy.runtime.interpreter import module_argv
from vitdeploy.spec import EngineSpec, decode
from vitdeploy.stages.reference_model import to_request
from vitdeploy.stages.step import ORIGINAL

# --- Latency relative to the machine's peak rates ---------------------------------------------------------------------
# The roofline model (Williams, Waterman and Patterson 2009): a model of F operations and B bytes takes at least F /
# (compute rate) and at least B / (memory rate), whichever is more. Here the rates are measured, each precision has its
# own, and the bytes count only if they exceed the last-level cache, which is faster than memory.


# The number of layer kinds that a line names.
NAMED_KINDS = 2
# The number of a block in the name of a layer: that of "blocks.3.mlp.fc1", not that of "fc1" or "MatMul_2".
BLOCK = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")
# From this share of the operations on, a line names one precision only.
NEARLY_ALL = 0.995
# From this relative difference on, two latencies of one artifact are reported as different.
MOVED_SHARE = 0.1
ABOVE_RATE = "above 100 %: faster than the probe, which ran at another time and with other shapes"


def context_facts(
    context: Context | None,
    results: Sequence[Row],
    workloads: Mapping[str, Work | str],
    waits: bool = False,
    undecided: Collection[str] = (),
) -> bench.ContextFacts | None:
    """The `context` of a bench; None if it was not measured.

    Args:
        workloads: by artifact, the work of one query, or why it is unknown.
        waits: the latencies include time in a queue, and so are not compared with peak rates.
        undecided: artifacts with an unreliable latency, which get no conclusions.
    """
    if context is None:
        return None
    return bench.ContextFacts(
        _machine(context),
        context.rates,
        context.memory,
        tuple(bench.Omission(str(each), each.why) for each in context.left_out),
        tuple(
            _artifact(
                row,
                context,
                workloads.get(row.artifact, "counted for engines only"),
                waits=waits,
                decided=row.artifact not in undecided,
            )
            for row in results
        ),
    )


def _machine(context: Context) -> str:
    """The machine's rates in a line; empty if none is known."""
    targets: dict[str, list[str]] = {}
    for rate in context.rates:
        targets.setdefault(rate.target, []).append(f"{rate.precision.upper()} {_giga(rate.flops_per_second)}")
    parts = [f"{target} {', '.join(rates)} GFLOP/s" for target, rates in targets.items()]
    if context.memory is not None:
        threads = context.memory.threads
        copied = f"copied by {threads} thread{'s' if threads > 1 else ''}"
        parts.append(f"memory {_giga(context.memory.bytes_per_second)} GB/s {copied}")
    return "; ".join(parts)


def _artifact(row: Row, context: Context, work: Work | str, *, waits: bool, decided: bool) -> bench.ArtifactContext:
    latency = row.latency_ms.p50 if decided and not waits else None
    profile = next((each for each in context.profiles if each.artifact == row.artifact), None)
    rates = {rate.precision: rate.flops_per_second for rate in context.rates if rate.target == row.target}
    known = None if isinstance(work, str) else work
    roof = _roof(known, rates, context.memory, latency)
    time = _time(profile)
    bound = _bound(roof, time)
    return bench.ArtifactContext(
        artifact=row.artifact,
        batch=row.batch.single,
        latency_ms=latency,
        work=None if known is None else bench.WorkFacts(**vars(known), bytes=known.bytes),
        work_unknown=work if isinstance(work, str) else None,
        roof=roof,
        time=time,
        layers=() if profile is None else _layers(profile),
        groups=() if profile is None else _groups(profile),
        profile=None if profile is None else bench.ProfileFacts(profile.runs, profile.per_layer_ms),
        bound=bound,
        line=_line(bound, roof, time, latency) if decided else None,
    )


def _roof(
    work: Work | None, rates: Mapping[str, float], memory: Memory | None, latency: float | None
) -> bench.Roof | None:
    """The roofline of an artifact; None if the work, a rate or the latency is unknown."""
    if work is None or latency is None or not work.flops or set(work.flops) - set(rates):
        return None
    compute = sum(1e3 * flops / rates[precision] for precision, flops in work.flops.items())
    fits = memory is None or (memory.cache_bytes is not None and work.bytes <= memory.cache_bytes)
    moved = None if memory is None or fits else 1e3 * work.bytes / memory.bytes_per_second
    return bench.Roof(
        compute_ms=compute,
        compute_share=compute / latency,
        memory_ms=moved,
        memory_share=None if moved is None else moved / latency,
        fits_in_cache=None if memory is None else fits,
        flops_per_second=1e3 * sum(work.flops.values()) / latency,
        bytes_per_second=1e3 * work.bytes / latency,
        flops=dict(work.flops),
        rates={precision: rates[precision] for precision in work.flops},
        copy_rate=None if memory is None else memory.bytes_per_second,
    )


def _time(profile: Profile | None) -> bench.TimeShares | None:
    if profile is None or not profile.layers:
        return None
    layers = sum(layer.milliseconds for layer in profile.layers)
    whole = max(layers, profile.latency_ms)

    def shares(names: Callable[[Layer], str], layers: Sequence[Layer]) -> dict[str, float]:
        return {name: milliseconds / whole for name, milliseconds in _sums(names, layers).items()} if whole else {}

    return bench.TimeShares(
        latency_ms=profile.latency_ms,
        layers_ms=layers,
        outside_ms=profile.latency_ms - layers,
        outside_share=max(0.0, profile.latency_ms - layers) / whole if whole else 0.0,
        by_precision_ms=_sums(_precision, profile.layers),
        products=shares(_precision, [layer for layer in profile.layers if layer.product]),
        others=shares(_kind, [layer for layer in profile.layers if not layer.product]),
    )


def _sums(names: Callable[[Layer], str], layers: Sequence[Layer]) -> dict[str, float]:
    """Milliseconds by the name that `names` returns for a layer, the largest first."""
    found: dict[str, float] = {}
    for layer in layers:
        found[names(layer)] = found.get(names(layer), 0.0) + layer.milliseconds
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def _precision(layer: Layer) -> str:
    return layer.precision


def _kind(layer: Layer) -> str:
    """A layer's kind in short: for a fused layer, its first operator."""
    return layer.kind.removeprefix("Subgraph of ").partition(",")[0]


def _layers(profile: Profile) -> tuple[bench.LayerTime, ...]:
    """All layers, the slowest first, with their shares of the layers' total time."""
    total = sum(layer.milliseconds for layer in profile.layers) or 1.0
    return tuple(
        bench.LayerTime(
            layer.name,
            layer.kind,
            layer.precision,
            layer.milliseconds,
            layer.milliseconds / total,
            layer.product,
            tuple(layer.fuses),
        )
        for layer in sorted(profile.layers, key=lambda layer: -layer.milliseconds)
    )


def _groups(profile: Profile) -> tuple[bench.LayerGroup, ...]:
    """Totals of layers whose names differ only in the block number, the slowest first."""
    total = sum(layer.milliseconds for layer in profile.layers) or 1.0
    groups: dict[tuple[str, str, str], list[float]] = {}
    for layer in profile.layers:
        groups.setdefault((BLOCK.sub("*", layer.name), layer.kind, layer.precision), []).append(layer.milliseconds)
    return tuple(
        bench.LayerGroup(*key, len(times), sum(times), sum(times) / total)
        for key, times in sorted(groups.items(), key=lambda item: -sum(item[1]))
    )


def _bound(roof: bench.Roof | None, time: bench.TimeShares | None) -> str | None:
    """The largest part of the time: "compute" or "memory", "other layers", or "overhead" outside all layers."""
    roofs = None if roof is None else "memory" if (roof.memory_ms or 0.0) > roof.compute_ms else "compute"
    if time is None:
        return roofs
    parts = {
        "compute": sum(time.products.values()),
        "other layers": sum(time.others.values()),
        "overhead": time.outside_share,
    }
    largest = max(parts, key=lambda name: parts[name])
    return roofs or largest if largest == "compute" else largest


def _line(
    bound: str | None, roof: bench.Roof | None, time: bench.TimeShares | None, latency: float | None
) -> str | None:
    """What limits the speed, in one line; None if unknown."""
    if bound is None:
        return None
    reached = "" if roof is None else _memory(roof) if bound == "memory" else _compute(roof)
    parts = "" if time is None else ", ".join(_parts(time))
    moved = ""
    if time is not None and latency and abs(time.latency_ms / latency - 1) > MOVED_SHARE:
        moved = f"the machine's speed changed: {latency:.2f} ms in the bench, {time.latency_ms:.2f} ms in the profile"
    return f"{bound}: {'; '.join(part for part in (reached, parts, moved) if part)}"


def _compute(roof: bench.Roof) -> str:
    flops, rates, total = roof.flops, roof.rates, sum(roof.flops.values())
    main = max(flops, key=lambda each: flops[each])
    if flops[main] >= NEARLY_ALL * total:
        found = (
            f"{_percent(roof.compute_share)} of the peak {main.upper()} GEMM rate "
            f"({_giga(roof.flops_per_second)} of {_giga(rates[main])} GFLOP/s)"
        )
    else:
        each = ", ".join(
            f"{precision.upper()} {_giga(rates[precision])} for {_percent(flops[precision] / total)} of the operations"
            for precision in sorted(flops, key=lambda each: -flops[each])
        )
        found = f"{_percent(roof.compute_share)} of the peak GEMM rates (GFLOP/s: {each})"
    return found if roof.compute_share <= 1 else f"{found}, {ABOVE_RATE}"


def _memory(roof: bench.Roof) -> str:
    share, rate = roof.memory_share or 0.0, roof.copy_rate or 0.0
    found = f"{_percent(share)} of the peak memory rate of {_giga(rate)} GB/s"
    return found if share <= 1 else f"{found}, {ABOVE_RATE}"


def _parts(time: bench.TimeShares) -> list[str]:
    """The parts of the time, in percent; parts below half a percent are left out."""
    parts = {f"products in {precision.upper()}": share for precision, share in time.products.items()}
    others = list(time.others)
    if others:
        parts[f"layers without products ({', '.join(others[:NAMED_KINDS])})"] = sum(time.others.values())
    parts["outside the layers"] = time.outside_share
    return [f"{_percent(share)} {name}" for name, share in parts.items() if share >= 0.005]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _giga(value: float) -> str:
    return f"{value / 1e9:,.0f}" if value >= 1e12 else f"{value / 1e9:.3g}"


# --- Bench the original and the engines in one benchmark run, and compare every pair that matters ---------------------


# The metric of a ratio, by its scenario.
METRICS: dict[str, Metric] = {"single": "latency", "offline": "throughput"}


def original_candidate(source: Source, name: str = ORIGINAL) -> BenchCandidate:
    """The original (a PyTorch model in eager mode, or an ONNX file), in its own process."""
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
    still_open: Callable[[bench.Bench], Collection[str]] | None = None,
) -> bench.Bench:
    """The `bench` part of a report, with the ratios of `pairs`. `still_open`: as for `run_benchmark`, but it gets the
    report so far.

    With `context`, the machine and the layers of each engine are measured afterwards. `progress` also reports waiting,
    and how long the bench will take.

    Raises:
        WorkerError: a measuring process died. Errors of a runtime propagate unchanged.
    """

    def tell(step: str) -> Progress:
        return lambda text, done, total: progress(text if total == 1 else step, done, total)

    with alone(tell("bench")):
        times = expected(bench_candidates, protocol, context=context, looks=still_open is not None)
        progress(f"benchmark of {_count(len(bench_candidates))}: {times}", 1, 1)
        bench_run = run_benchmark(
            bench_candidates,
            protocol,
            tell("bench"),
            pairs=pairs,
            still_open=still_open and (lambda so_far: still_open(summarise(so_far, pairs, percents))),
        )
        if not context:
            return summarise(bench_run, pairs, percents)
        bench_run = surveyed(bench_run, bench_candidates, tell("measure peak rates and profiles"))
    workloads = workloads_of(bench_candidates, protocol.batch_of(protocol.latency_scenario))
    return summarise(bench_run, pairs, percents, workloads)


def _count(number: int) -> str:
    return f"{number} {'artifact' if number == 1 else 'artifacts'}"


def summarise(
    bench_run: BenchRun,
    pairs: Sequence[tuple[str, str]],
    percents: Sequence[float],
    workloads: Mapping[str, Work | str] | None = None,
) -> bench.Bench:
    """Convert measurements to the form of the report, with the ratios of the named pairs."""
    protocol = bench_run.protocol
    results = rows(bench_run, percents)
    waits = parse_scenario(protocol.latency_scenario).kind == "server"
    found = ratios(bench_run, pairs)
    unreliable = undecided(bench_run, found)
    return bench.Bench(
        bench.ProtocolFacts(
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
    """The ratio a / b of each pair, for latency ("single") and for throughput ("offline"), from the median queries of
    paired rounds."""
    return [
        judged(bench_run, a, b, scenario, metric)
        for a, b in pairs
        for scenario, metric in METRICS.items()
        if scenario in bench_run.protocol.scenarios
    ]


def undecided(bench_run: BenchRun, found: Sequence[Ratio]) -> dict[str, str]:
    """The reasons of undecided artifacts: that of the artifact's ratio to the original, or else of its first ratio; for
    an artifact that is first in no ratio, that of its own latency."""
    reasons = {}
    for entry in bench_run.entries:
        own = [ratio for ratio in found if ratio.a == entry.artifact]
        own.sort(key=lambda ratio: ratio.b != ORIGINAL)  # stable: the latency of a pair stays before its throughput
        because = own[0].reason if own else alone_reason(bench_run, entry)
        if because:
            reasons[entry.artifact] = because
    return reasons


# --- The work (operations and bytes moved) of each engine of a bench, counted in its graph ----------------------------


def workloads_of(bench_candidates: Sequence[BenchCandidate], batch: int) -> dict[str, Work | str]:
    """The work of one query at `batch`, or why it is unknown, by artifact; engines only."""
    found = {}
    for bench_candidate in bench_candidates:
        if "engine" in bench_candidate.request:
            engine = decode(EngineSpec, bench_candidate.request["engine"])
            found[bench_candidate.artifact] = work_of(
                Path(bench_candidate.request["folder"]) / engine.graph, engine, batch
            )
    return found


def work_of(graph: Path, engine: EngineSpec, batch: int) -> Work | str:
    """The work of an engine compiled from `graph`, by the precisions that it runs in; or why it is unknown."""
    if engine.parts:
        return "it depends on the length of the sequences"
    try:
        work = count_work(admit_graph(graph), batch)
    except VitdeployError as error:
        return f"{error.message}: {error.found}"
    # Half precision that is a runtime setting is not visible in the graph.
    float_precision = RUNTIME[engine.target].float_precision(engine.options)
    flops = Counter[str]()
    for precision, count in work.flops.items():
        flops[float_precision if precision == "fp32" else precision] += count
    return replace(work, flops=dict(flops))
