"""The frame of all searches: variants are made, measured against each other, and the surely best one is taken.

What is tried, and what it may cost, stands in the file of each search: `rows`, `high_precision`, `mixed`, `pruning`.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from scipy import stats

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.evidence import medians_of, ratio_of_rounds, together
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.results import BenchRun, Round
from vitdeploy.benchmark.run import BenchCandidate, engine_candidate, run_benchmark
from vitdeploy.benchmark.summary import disturbed_reason
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.graph.analysis.rows import count_int8
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.progress import Progress
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.runner import Array
from vitdeploy.search.reference import Distances, Expected, ReferenceOutputs
from vitdeploy.spec import EngineSpec, FloatRest, Precision
from vitdeploy.verification.intervals import student

# What identifies the device of a time; a different operating system kernel or Python does not change the device.
FINGERPRINT = ("cpu", "isa", "cores", "quota", "machine", "board", "caches", "emulated")
# A claim of a few percent needs more than one process of each: processes differ by as much.
ROUNDS, BLOCK_SECONDS, WARMUP_SECONDS, PROCESSES = 16, 0.25, 0.5, 4
LEVEL = 0.95
# MACs of linears and convolutions at batch 1. Below, an engine is done before a few percent can be told apart: calling
# the kernels twice for rows in parts costs more there than fuller tiles save (the digits, 115 million, took 1.19 of
# their time with 64 and 1 rows), and no layer takes long enough.
LEAST_MACS = 400_000_000

T = TypeVar("T")


# --- The results of searches, as their files have them ----------------------------------------------------------------


@dataclass(frozen=True)
class VariantTiming:
    """Median latencies, round by round, and their ratio to those of the first variant with its interval; the first's
    own is 1. The intervals of several variants hold jointly at 95 % (Bonferroni)."""

    rounds_ms: tuple[float, ...]
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0


Timed = TypeVar("Timed", bound=VariantTiming)


@dataclass(frozen=True)
class Measurement:
    """What all results of measurements say: the target; when it was (ISO date), and on which device (see
    `fingerprint`); `disturbed`: why the times are unreliable, "" if nothing says so."""

    target: str
    measured: str
    device: dict[str, str]
    disturbed: str = field(default="", kw_only=True)


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def measured_here(target: str) -> dict[str, Any]:
    """The first fields of a `Measurement` on this machine."""
    return {"target": target, "measured": now(), "device": fingerprint(target)}


def fingerprint(target: str) -> dict[str, str]:
    """What identifies this machine's times: the CPU, its instruction sets and cores, the board if it has a name, the
    version of the runtime."""
    host, package = describe_host(), TARGETS[target].package
    return {**{key: host[key] for key in FINGERPRINT if key in host}, package: importlib.metadata.version(package)}


def too_few(macs: int, what: str = "") -> str:
    """Why nothing is measured of a model with so many MACs; "" if something is."""
    return f"{macs / 1e6:.0f} million products at batch 1, which are too few{what}" if macs < LEAST_MACS else ""


# --- Make and measure -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GraphVariant:
    """One candidate of a search, by name. `write` puts its graph, placed, into an empty folder, and gives the file.
    `float_rest`: what its engine computes its float operators in."""

    name: str
    write: Callable[[Path], Path]
    float_rest: FloatRest = "fp32"


@dataclass(frozen=True)
class MeasuredVariant:
    """The timing of a variant; and of its answers, where there are any, the distances [images] from the float graph's
    and what is expected of a classifier's."""

    timing: VariantTiming
    distances: Distances
    expected: Expected | None


def save_in(model: ir.Model, folder: Path) -> Path:
    """The file of a model in a folder, for `GraphVariant.write`."""
    save_graph(model, folder / "model.onnx")
    return folder / "model.onnx"


def measure(
    variants: Sequence[GraphVariant],
    target: str,
    batch: int,
    texts: tuple[str, str],
    progress: Progress,
    *,
    precision: Precision = "int8",
    reference_outputs: ReferenceOutputs | None = None,
) -> tuple[list[MeasuredVariant], str]:
    """The engines of variants in alternating blocks, the first being what the others are compared with; and why their
    times are unreliable, "" if nothing says so.

    Args:
        texts: what progress says of making, where {} is a variant's name, and of timing them.
        reference_outputs: on whose images each engine is run too.

    Raises:
        CapabilityError, EngineError, WorkerError: as `compile_engine` and `run_benchmark`. Errors of `write` propagate.
    """
    candidates, answered = list[BenchCandidate](), list[tuple[Distances, Expected | None]]()
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as scratch:
        for done, variant in enumerate(variants):
            progress(texts[0].format(variant.name), done, len(variants))
            out, graph = Path(scratch) / variant.name, Path(scratch) / "graph"
            graph.mkdir()
            file, rest = variant.write(graph), variant.float_rest
            model, distances, expected = load_graph(file), np.zeros(0), None
            if reference_outputs is not None:
                answers = answers_of(model, target, precision, reference_outputs, rest)
                distances, expected = reference_outputs.distance(answers), reference_outputs.expected(answers)
            answered.append((distances, expected))
            engine = engine_of(model, file, out, target, precision, batch, rest)
            candidates.append(engine_candidate(engine, out, variant.name))
            shutil.rmtree(graph)
        progress(texts[0].format(variants[-1].name), len(variants), len(variants))
        bench_run = run_benchmark(candidates, in_turns(), lambda text, done, total: progress(texts[1], done, total))
    timings, disturbed = judged(bench_run)
    return [MeasuredVariant(timing, *each) for timing, each in zip(timings, answered, strict=True)], disturbed


def answers_of(
    model: ir.Model,
    target: str,
    precision: Precision,
    reference_outputs: ReferenceOutputs,
    float_rest: FloatRest = "fp32",
) -> dict[str, Array]:
    """The outputs of a placement on its own runtime, [images, ...] by name.

    Raises:
        EngineError, CapabilityError: as `compilation.engine.compile_engine`.
    """
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        graph, out = save_in(model, Path(folder)), Path(folder) / "engine"
        engine = engine_of(model, graph, out, target, precision, reference_outputs.batch, float_rest)
        with make_runner(out, engine) as runner:
            return reference_outputs.ask(runner)


def engine_of(
    model: ir.Model, graph: Path, out: Path, target: str, precision: Precision, batch: int, float_rest: FloatRest
) -> EngineSpec:
    """The engine of a placed model, which lies in the file `graph`, in the new folder `out`."""
    out.mkdir()
    placed = count_int8(model)
    return compile_engine(
        graph, out, target=target, precision=precision, batch=batch, placed=placed, float_rest=float_rest
    )


def in_turns() -> Protocol:
    """How variants are measured, here and on devices."""
    return Protocol.of_singles(BLOCK_SECONDS, WARMUP_SECONDS, ROUNDS, processes=PROCESSES)


def judged(bench_run: BenchRun) -> tuple[list[VariantTiming], str]:
    """The timings of a benchmark run under `in_turns`, its first artifact's first, and why they are unreliable, "" if
    nothing says so."""
    rounds = together(bench_run.protocol, bench_run.entries, bench_run.protocol.latency_scenario)
    return timings_of(rounds), disturbed_reason(bench_run)


def timings_of(measured: Sequence[Sequence[Round]]) -> list[VariantTiming]:
    """The timings from the rounds that all engines share, the first engine's first."""
    reference, *others = measured
    level = 1 - (1 - LEVEL) / max(len(others), 1)
    return [VariantTiming(tuple(medians_of(reference))), *(_compared(each, reference, level) for each in others)]


def _compared(rounds: Sequence[Round], reference: Sequence[Round], level: float) -> VariantTiming:
    ratio_found = ratio_of_rounds(rounds, reference)
    wider = math.exp(ratio_found.bias)
    ratio, low, high = student(ratio_found.log, ratio_found.error, ratio_found.freedom, level)
    return VariantTiming(tuple(medians_of(rounds)), ratio, low / wider, high * wider)


# --- Decide -----------------------------------------------------------------------------------------------------------


def surely_fastest(timings: Sequence[Timed], disturbed: str) -> Timed | None:
    """The fastest of those that are surely faster than the first; None without any, or of unreliable times."""
    surely = [each for each in timings[1:] if each.high < 1 and not disturbed]
    return min(surely, key=lambda each: each.ratio, default=None)


def undominated(items: Sequence[T], distance: Callable[[T], float], faster: Callable[[T, T], bool]) -> list[T]:
    """The items that no other of at most their `distance` is proven to be `faster` than, in ascending order of it: what
    remains of a front where times prove little."""
    order = sorted(items, key=distance)
    return [
        item
        for item in order
        if not any(other is not item and distance(other) <= distance(item) and faster(other, item) for other in order)
    ]


def pareto_front(items: Sequence[T], measures: Callable[[T], tuple[float, float]]) -> list[T]:
    """The items that no other matches or beats in both measures, in ascending order of the first.

    Args:
        measures: of an item; less is better. Of items that are equal in both, the first one stays.
    """
    front: list[T] = []
    for item in sorted(items, key=measures):
        if not front or measures(item)[1] < measures(front[-1])[1]:
            front.append(item)
    return front


def counted(items: Sequence[T], text: str, progress: Progress) -> Iterator[T]:
    """The items, while `progress` is told how many are done."""
    for done, item in enumerate(items):
        progress(text, done, len(items))
        yield item
    progress(text, len(items), len(items))


def mean_interval(values: npt.NDArray[np.floating]) -> tuple[float, float, float]:
    """The mean of some values with its 95 % t-interval. For one value, whose interval is unbounded, both bounds are the
    mean."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, mean, mean
    reach = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)
    return mean, mean - reach, mean + reach
