"""Layers and float operators in another precision, by times and errors."""

from __future__ import annotations

import datetime
import math
import tempfile
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.benchmark.evidence import medians_of, ratio_of_rounds, together
from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.results import BenchRun, Round
from vitdeploy.benchmark.run import BenchCandidate, engine_candidate, run_benchmark
from vitdeploy.benchmark.summary import disturbed_reason
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.graph.analysis.rows import count_int8, find_linears
from vitdeploy.graph.analysis.work import layer_macs
from vitdeploy.graph.io.files import load_graph
from vitdeploy.search.expected import Expected
from vitdeploy.search.graphs import ReferenceOutputs
from vitdeploy.search.latency import fingerprint
from vitdeploy.search.mixed import Sensitivity
from vitdeploy.search.trials import Reached, answers_of
from vitdeploy.spec import FloatRest, Precision
from vitdeploy.verification.intervals import student

# --- The result of a search for layers that are taken out of plain INT8, and what it measured -------------------------


Form = Literal["dynamic", "float"]


@dataclass(frozen=True)
class Raised:
    """Layers out of plain INT8, in `form`: "dynamic" (INT8 weights, and activations that the runtime quantizes) or
    "float"; and why."""

    layers: tuple[str, ...]
    form: Form
    why: str = ""


@dataclass(frozen=True)
class Rung:
    """One set of layers out of plain INT8. `share`: of all MACs. `ratio`, `low`, `high`: the latency over that of plain
    INT8, with the interval; `rounds_ms`: the median latency of each round. `reached`: on the calibration images, by the
    engine itself."""

    layers: tuple[str, ...]
    share: float
    rounds_ms: tuple[float, ...]
    ratio: float
    low: float
    high: float
    reached: Reached


@dataclass(frozen=True)
class HighPrecision:
    """What was measured of layers out of plain INT8, and which of them are: `layers`, in `form`.

    `form`: as in `Raised`. `price`: the most that they may add to the latency, in percent. `int8`: without any, on the
    calibration images. `rungs`: of more and more layers. `why`: what decided. `disturbed`: why the times are
    unreliable, in which case only the first rung may be taken. `measured`: ISO date; `device`: as in a latency table.
    The intervals hold jointly at 95 % (Bonferroni).
    """

    target: str
    form: Form
    price: float
    images: int
    measured: str
    device: dict[str, str]
    why: str
    int8: Reached | None = None
    rungs: tuple[Rung, ...] = ()
    layers: tuple[str, ...] = ()
    disturbed: str = ""

    @property
    def raised(self) -> Raised | None:
        return Raised(self.layers, self.form, self.why) if self.layers else None


# --- Layers whose INT8 costs much and saves little: which to take out of plain INT8, and in which form ----------------


# Of all MACs of linears and convolutions, at most this share is left out of INT8 where no latency can be measured.
MACS_SHARE = 0.1
# Shares that are tried where it can be, by the form: float takes several times as long as INT8; INT8 whose activations
# the runtime quantizes 1.2 to 1.5 times.
SHARES: dict[str, tuple[float, ...]] = {"dynamic": (0.1, 0.2, 0.35), "float": (0.03, 0.06, 0.1)}
# Where engines compute float operators in bf16: layers out of plain INT8 are then products in bf16 of INT8 weights.
HALF_SHARES = (0.1, 0.2, 0.35, 0.6, 1.0)
# A layer with operators in front that only INT8 needs (`channel_split`) is left for a part of its price: they go too.
SPLIT_PRICE = 1 / 3
# Expected agreement, in percent, from which on nothing more is bought.
ENOUGH = 99.0


def high_precision_layers(
    model: ir.Model,
    costs: Sensitivity,
    share: float = MACS_SHARE,
    *,
    cheaper: Collection[str] = (),
    allowed: Collection[str] | None = None,
) -> list[str]:
    """The layers that cost most for their MACs, up to a share of all MACs; only those whose share of the costs exceeds
    their share of the MACs.

    Args:
        model: the float graph that the costs are of.
        share: of the MACs of all linears and convolutions.
        cheaper: layers whose price is `SPLIT_PRICE` of that of their MACs.
        allowed: only these; None: any.
    """
    macs = {linear.name: layer_macs(model, linear) or 0 for linear in find_linears(model)}
    total, taken, chosen = max(sum(macs.values()), 1), 0, []
    price = {name: max(count * (SPLIT_PRICE if name in cheaper else 1), 1) for name, count in macs.items()}
    for each in sorted(costs.layers, key=lambda each: each.cost.share / price[each.cost.name], reverse=True):
        name = each.cost.name
        if each.cost.share <= price[name] / total:
            break
        if taken + macs[name] <= share * total and (allowed is None or name in allowed):
            taken += macs[name]
            chosen.append(name)
    return chosen


def ladder(
    model: ir.Model,
    costs: Sensitivity,
    form: Form,
    cheaper: Collection[str] = (),
    kept: Collection[str] = (),
    shares: Sequence[float] = (),
) -> list[tuple[tuple[str, ...], float]]:
    """Sets of layers for each of the `shares`, by default the form's, and their share of the MACs; without empty and
    equal ones.

    Args:
        model, cheaper: as in `high_precision_layers`.
        kept: layers that stay in plain INT8, where the form is "dynamic".
    """
    linears = find_linears(model)
    macs = {linear.name: layer_macs(model, linear) or 0 for linear in linears}
    allowed = {linear.name for linear in linears if linear.name not in kept} if form == "dynamic" else None
    discount = cheaper if form == "dynamic" else ()
    found = [
        tuple(high_precision_layers(model, costs, share, cheaper=discount, allowed=allowed))
        for share in shares or SHARES[form]
    ]
    total = max(sum(macs.values()), 1)
    return [(layers, sum(macs[name] for name in layers) / total) for layers in dict.fromkeys(found) if layers]


def choose_rung(int8: Reached, rungs: Sequence[Rung], price: float, disturbed: str) -> tuple[tuple[str, ...], str]:
    """The layers of the rung to take, none for plain INT8, and why.

    Of those within the price it is the first that is expected to keep `ENOUGH` of the answers, else the one that is
    nearest to the float graph, if it is nearer than plain INT8. Where times are unreliable only the first may be taken.
    """
    most = 1 + price / 100
    within = [rung for rung in rungs if rung.ratio <= most]
    if disturbed:
        within = list(rungs[:1])
    nearer = [rung for rung in within if rung.reached.distance < int8.distance]
    if not nearer:
        dear = f"all add more than {price:g} % to the latency" if not within else "none brings the answers nearer"
        return (), f"of {len(rungs)} sets of layers {dear}"
    enough = [rung for rung in nearer if _agreement(rung.reached.expected) >= ENOUGH]
    best = enough[0] if enough else min(nearer, key=lambda rung: rung.reached.distance)
    distance = f"the distance falls from {int8.distance:.2g} to {best.reached.distance:.2g}"
    if disturbed:
        return best.layers, f"{distance}; the times are unreliable ({disturbed}), so only the fewest layers were taken"
    return best.layers, f"{distance} for {best.ratio:.2f} [{best.low:.2f}, {best.high:.2f}] of the latency"


def _agreement(expected: Expected | None) -> float:
    return expected.agreement if expected is not None else 0.0


# --- What was measured of the float operators of an INT8 engine in bf16, and which precision that makes them have -----


# Of the distance that INT8 has. With enough images any rounding is surely further; layers out of plain INT8, which are
# chosen after it, take back more than this for less time than bf16 saves.
MOST_FURTHER = 0.2


@dataclass(frozen=True)
class FloatRestTable:
    """What was measured of an INT8 placement with its float operators in fp32 and in bf16.

    `ratio`, `low`, `high`: the latency with bf16 over that with fp32, with its 95 % interval. `distances`: mean, of the
    answers of fp32 and of bf16 from the float graph's on the calibration images; `further`: the bounds of the 95 %
    interval of how much further those of bf16 are. Without a measurement `reason` says why. `disturbed`: why the times
    are unreliable, in which case it is fp32. `measured`: ISO date; `device`: as in a latency table.
    """

    target: str
    batch: int
    measured: str
    device: dict[str, str]
    reason: str = ""
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0
    distances: tuple[float, float] = (0.0, 0.0)
    further: tuple[float, float] = (0.0, 0.0)
    disturbed: str = ""

    @property
    def best(self) -> FloatRest:
        """bf16 if it is surely faster and not surely further from the float graph by more than `MOST_FURTHER`."""
        faster = not self.reason and not self.disturbed and self.high < 1
        return "bf16" if faster and self.further[0] <= MOST_FURTHER * self.distances[0] else "fp32"


# --- Times engines of one function against each other, and says which is surely faster than the first -----------------


# A claim of a few percent needs more than one process of each: processes differ by as much.
ROUNDS, BLOCK_SECONDS, WARMUP_SECONDS, PROCESSES = 16, 0.25, 0.5, 4
LEVEL = 0.95


@dataclass(frozen=True)
class Timing:
    """Median latencies, round by round, and their ratio to those of the first engine with its interval; the first's own
    is 1."""

    rounds_ms: tuple[float, ...]
    ratio: float = 1.0
    low: float = 1.0
    high: float = 1.0


def compiled(
    graph: Path,
    out: Path,
    target: str,
    precision: Precision,
    batch: int,
    placed: int,
    name: str,
    float_rest: FloatRest = "fp32",
) -> BenchCandidate:
    """The engine of a placed graph, in the new folder `out`, as a candidate of that name.

    Args:
        placed: how many linears and convolutions the graph has in INT8.

    Raises:
        CapabilityError, EngineError: as `compile_engine`.
    """
    out.mkdir()
    engine = compile_engine(
        graph, out, target=target, precision=precision, batch=batch, placed=placed, float_rest=float_rest
    )
    return engine_candidate(engine, out, name)


def time_alternatives(
    candidates: Sequence[BenchCandidate], progress: Callable[[int, int], None]
) -> tuple[list[Timing], str]:
    """The engines in alternating blocks, and why their times are unreliable, "" if nothing says so.

    Raises:
        WorkerError: as `run_benchmark`.
    """
    return judged(run_benchmark(candidates, in_turns(), lambda text, done, total: progress(done, total)))


def in_turns() -> Protocol:
    """How alternatives are measured, here and on devices."""
    return Protocol.of_singles(BLOCK_SECONDS, WARMUP_SECONDS, ROUNDS, processes=PROCESSES)


def judged(bench_run: BenchRun) -> tuple[list[Timing], str]:
    """The timings of a benchmark run under `in_turns`, its first artifact's first, and why they are unreliable, "" if
    nothing says so."""
    rounds = together(bench_run.protocol, bench_run.entries, bench_run.protocol.latency_scenario)
    return timings_of(rounds), disturbed_reason(bench_run)


def timings_of(measured: Sequence[Sequence[Round]]) -> list[Timing]:
    """The timings from the rounds that all engines share, the first engine's first. The intervals hold jointly at 95 %
    (Bonferroni)."""
    reference, *others = measured
    level = 1 - (1 - LEVEL) / max(len(others), 1)
    return [Timing(tuple(medians_of(reference))), *(_compared(each, reference, level) for each in others)]


def _compared(rounds: Sequence[Round], reference: Sequence[Round], level: float) -> Timing:
    found = ratio_of_rounds(rounds, reference)
    wider = math.exp(found.bias)
    ratio, low, high = student(found.log, found.error, found.freedom, level)
    return Timing(tuple(medians_of(rounds)), ratio, low / wider, high * wider)


# --- Measures, on the target, an INT8 engine with its float operators in fp32 and in bf16: time, and answers ----------


RESTS: tuple[FloatRest, FloatRest] = ("fp32", "bf16")


def not_measured(target: str, batch: int, reason: str) -> FloatRestTable:
    return FloatRestTable(target, batch, _now(), fingerprint(target), reason)


def measure_float_rest(
    graph: Path,
    target: str,
    batch: int,
    reference_outputs: ReferenceOutputs,
    *,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> FloatRestTable:
    """Time a placed INT8 graph with its float operators in fp32 and in bf16, in alternating blocks, and run both on the
    images of the reference outputs.

    Raises:
        CapabilityError, EngineError, WorkerError: as `compile_engine` and `run_benchmark`.
    """
    model = load_graph(graph)
    placed, text = count_int8(model), f"float operators in bf16 for {target}"
    candidates, distances = [], list[npt.NDArray[np.float64]]()
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        for done, rest in enumerate(RESTS):
            progress(text, done, len(RESTS))
            answers = answers_of(load_graph(graph), target, "int8", reference_outputs, rest)
            distances.append(reference_outputs.distance(answers))
            candidates.append(compiled(graph, Path(folder) / rest, target, "int8", batch, placed, rest, rest))
        progress(text, len(RESTS), len(RESTS))
        (_, timing), disturbed = time_alternatives(
            candidates, lambda done, total: progress("time bf16 against fp32", done, total)
        )
    return FloatRestTable(
        *(target, batch, _now(), fingerprint(target), ""),
        *(timing.ratio, timing.low, timing.high),
        (float(distances[0].mean()), float(distances[1].mean())),
        _interval(distances[1] - distances[0]),
        disturbed,
    )


def _interval(differences: npt.NDArray[np.float64]) -> tuple[float, float]:
    """The 95 % interval of the mean of paired differences, by Student's t; the mean itself where nothing varies."""
    mean = float(differences.mean())
    if len(differences) < 2 or float(differences.std()) == 0:
        return mean, mean
    from scipy import stats

    found = stats.ttest_1samp(differences, 0.0).confidence_interval(0.95)
    return float(found.low), float(found.high)


def _now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
