"""Rows of a product: how many, in which parts, and schedules of merged tokens."""

from __future__ import annotations

import datetime
import functools
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from vitdeploy.benchmark.run import BenchCandidate, engine_candidate
from vitdeploy.compilation.engine import compile_engine
from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.attention import find_attentions, follow, merge_points
from vitdeploy.graph.analysis.rows import count_int8, find_linears
from vitdeploy.graph.edit import drop_unused
from vitdeploy.graph.io.files import get_metadata, load_graph, save_graph
from vitdeploy.graph.passes.rows import align_rows, parts_of, token_stream, work_by_tokens
from vitdeploy.graph.passes.tokens import merge_tokens
from vitdeploy.quantization.placement import place, shape
from vitdeploy.quantization.ranges import score_tensors
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.search.expected import Expected
from vitdeploy.search.graphs import ReferenceOutputs
from vitdeploy.search.high_precision import Timing, compiled, time_alternatives
from vitdeploy.search.latency import (
    BOUNDS,
    LatencyTable,
    PartsTable,
    PartsTiming,
    Shape,
    fingerprint,
    in_parts,
    shapes_of,
)
from vitdeploy.search.trials import pareto_front
from vitdeploy.spec import FloatRest, Precision

# --- Measures, on the target and the model itself, the number of rows at which the linears of a ViT are fastest -------
# The placements for this use arbitrary ranges: times depend on shapes, not on values.


MULTIPLES = (8, 16, 32, 64)


@dataclass(frozen=True)
class RowTiming:
    """The model with `rows` rows. `rounds_ms`: its median latency in each round. `ratio`, `low`, `high`: its latency
    over that with one row per token, with the interval; 1 for that one itself."""

    rows: int
    rounds_ms: tuple[float, ...]
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class RowTable:
    """The measurements of one model at batch 1; the first of `timings` is that of one row per token.

    The intervals hold jointly at 95 % (Bonferroni). `measured`: ISO date; `device`: as in a latency table. `disturbed`:
    why the times are unreliable, in which case none is the best.
    """

    target: str
    precision: Precision
    measured: str
    device: dict[str, str]
    tokens: int
    timings: tuple[RowTiming, ...]
    disturbed: str = ""

    @property
    def best(self) -> RowTiming:
        """The fastest of those that are provably faster than one row per token; without any, that one."""
        first, *others = self.timings
        surely = (each for each in others if each.high < 1 and not self.disturbed)
        return min(surely, key=lambda each: each.ratio, default=first)

    @property
    def aligned(self) -> int | None:
        """The number of rows that is provably faster than one per token; None without any."""
        return None if self.best.rows == self.tokens else self.best.rows


def candidates(tokens: int) -> tuple[int, ...]:
    """The number of tokens, and the next multiples of likely kernel tile sizes."""
    rounded = {-(-tokens // of) * of for of in MULTIPLES}
    return (tokens, *sorted(rows for rows in rounded if tokens < rows < 2 * tokens))


def measure_rows(
    graph: Path,
    target: str,
    precision: Precision = "int8",
    *,
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> RowTable:
    """Measure a model with each number of rows in `candidates` against the others, in alternating blocks.

    Args:
        graph: a float graph as `optimize` leaves it, with one row for each token.
        precision: "int8", with every layer in it that the target places, or one of a float graph.

    Raises:
        GraphError: the rows cannot be aligned, as `align_rows` says.
        CapabilityError, EngineError, WorkerError: as `compile_engine` and `run_benchmark`.
    """
    tokens = token_stream(find_attentions(load_graph(graph)))[1]
    numbers = candidates(tokens)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        bench_candidates = []
        for done, rows in enumerate(numbers):
            progress(f"prepare {rows} rows for {target}", done, len(numbers))
            bench_candidates.append(_bench_candidate(graph, rows, target, precision, Path(folder)))
        found, disturbed = time_alternatives(
            bench_candidates, lambda done, total: progress("time the rows", done, total)
        )
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    timings = tuple(RowTiming(rows, **vars(each)) for rows, each in zip(numbers, found, strict=True))
    return RowTable(target, precision, now, fingerprint(target), tokens, timings, disturbed)


def _bench_candidate(graph: Path, rows: int, target: str, precision: Precision, folder: Path) -> BenchCandidate:
    model = load_graph(graph)
    align_rows(model, rows)
    if precision == "int8":
        shape(model, target)
        names = [str(linear.input.name) for linear in find_linears(model)]
        place(model, dict.fromkeys([*names, *score_tensors(model).values()], BOUNDS), target)
        drop_unused(model)
    placed, out = folder / f"{rows}.onnx", folder / str(rows)
    save_graph(model, placed)
    out.mkdir()
    engine = compile_engine(placed, out, target=target, precision=precision, batch=1, placed=count_int8(model))
    placed.unlink()
    return engine_candidate(engine, out, str(rows))


# --- Measures ---------------------------------------------------------------------------------------------------------
# on the target and the placed model itself, whether its linears are faster with their rows in parts, or with. more rows
# than tokens.


# Of products at batch 1 in linears over tokens. Below, calling the kernels twice costs more than fuller tiles save: the
# digits, 115 million, took 1.19 of their time with 64 and 1 rows.
LEAST_MACS = 400_000_000
# Of which kernels may take whole tiles.
PART_MULTIPLES = (8, 16)


def measure_row_parts(
    graph: Path,
    target: str,
    batch: int,
    *,
    float_rest: FloatRest = "fp32",
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> PartsTable:
    """Measure a placed model with its rows in each of `parts_of`, and with more of them, against one a token, in
    alternating blocks. `float_rest`: in which precision the engine computes its float operators.

    Raises:
        CapabilityError, EngineError, WorkerError: as `compile_engine` and `run_benchmark`.
    """
    precision = get_metadata(load_graph(graph), str(graph)).precision or "fp32"
    alternatives, reason = alternatives_of(graph)
    if reason:
        return table_of(target, batch, fingerprint(target), reason=reason)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        candidates = []
        for done, parts in enumerate(alternatives):
            progress(f"prepare rows in parts for {target}", done, len(alternatives))
            compiling = functools.partial(_candidate, target=target, precision=precision, batch=batch, rest=float_rest)
            candidates.append(compiling(graph, parts if done else None, Path(folder)))
        found, disturbed = time_alternatives(
            candidates, lambda done, total: progress("time the rows in parts", done, total)
        )
    return table_of(target, batch, fingerprint(target), zip(alternatives, found, strict=True), disturbed=disturbed)


def alternatives_of(graph: Path) -> tuple[list[tuple[int, ...]], str]:
    """In what parts a placed model may compute its rows, all at once first; and why nothing is worth measuring, "" if
    there is something."""
    model = load_graph(graph)
    work = work_by_tokens(model)
    tokens = next(iter(work), 1)
    alternatives, more = [(tokens,), *parts_of(tokens)], more_rows(tokens)
    if more and _takes_more(model, tokens, more[0]):
        alternatives += [(rows,) for rows in more]
    return alternatives, _without_alternative(work, alternatives)


def table_of(
    target: str,
    batch: int,
    device: Mapping[str, str],
    measured: Iterable[tuple[tuple[int, ...], Timing]] = (),
    *,
    reason: str = "",
    disturbed: str = "",
) -> PartsTable:
    """The table of what was `measured` now; fields as in `PartsTable`."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    timings = tuple(PartsTiming(parts, **vars(each)) for parts, each in measured)
    return PartsTable(target, batch, now, dict(device), timings, reason, disturbed)


def more_rows(tokens: int) -> list[int]:
    """Numbers of rows that may be faster than one a token, of those that `align_rows` takes."""
    rounded = {-(-tokens // multiple) * multiple for multiple in PART_MULTIPLES}
    return sorted(rows for rows in rounded if tokens < rows < 2 * tokens)


def _takes_more(model: ir.Model, tokens: int, rows: int) -> bool:
    """Whether a graph, whose shapes are complete, can have so many rows in place of its tokens. Changes it."""
    try:
        return token_stream(find_attentions(model))[1] == tokens and align_rows(model, rows) > 0
    except GraphError:
        return False


def _without_alternative(work: Mapping[int, int], alternatives: Sequence[tuple[int, ...]]) -> str:
    """Why nothing is measured; "" if there is something to measure."""
    if not work:
        return "no linear over a fixed number of tokens"
    if len(alternatives) == 1:
        return f"{alternatives[0][0]} rows are whole tiles, or less than one"
    least = next(iter(work.values()))
    return f"{least / 1e6:.0f} million products at batch 1, which are too few" if least < LEAST_MACS else ""


def _candidate(
    graph: Path,
    parts: tuple[int, ...] | None,
    folder: Path,
    *,
    target: str,
    precision: Precision,
    batch: int,
    rest: FloatRest,
) -> BenchCandidate:
    name = "+".join(map(str, parts or ("whole",)))
    written, out = folder / f"{name}.onnx", folder / name
    placed = in_parts(graph, parts, written)
    candidate = compiled(written, out, target, precision, batch, placed, name, rest)
    written.unlink()
    return candidate


# --- Schedules of token merging that may pay off on a target ----------------------------------------------------------
# predicted from measured times, judged on calibration images.
#
# How a linear's speed depends on its number of rows is a property of runtime, CPU and width: tiles decide, not MACs. So
# a latency table says which numbers of tokens are good, and a merge goes to one of these.


# Numbers of tokens are tried in multiples of the rows that kernels work on at once, up to this many of them.
TILE, MOST = 16, 8
# A schedule is tried if the linears take at most this share of their time, since merging takes time too.
WORTH = 0.97

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Tokens:
    """What a schedule changes in a graph: its tokens, the shape of each linear that reads all of them, and, by block,
    the linears behind the attention of that block."""

    count: int
    prefix: int
    shapes: Mapping[str, Shape]
    behind: Mapping[int, frozenset[str]]


@dataclass(frozen=True)
class Schedule:
    """`merges`: (block, tokens that remain) each. `time`: of all linears over all tokens, as a share of their time
    without merging. `distance`: from the float graph's answers, mean over the images; `expected`: for a classifier,
    else None.
    """

    merges: tuple[tuple[int, int], ...]
    time: float
    distance: float
    expected: Expected | None


def find_tokens(model: ir.Model) -> Tokens:
    """The tokens of a graph; raises GraphError if they cannot be merged."""
    found = merge_points(model)
    linears = [linear for linear in find_linears(model) if linear.kind == "matmul"]
    shapes = shapes_of(model, [linear.name for linear in linears])
    behind = {}
    for block, point in found.points.items():
        axes = follow(model, point.after, found.prefix).axes
        behind[block] = frozenset(linear.name for linear in linears if linear.input in axes)
    over = {name: shape for name, shape in shapes.items() if shape.rows == found.count}
    return Tokens(found.count, found.prefix, over, behind)


def counts_to_time(tokens: Tokens) -> tuple[int, ...]:
    """Numbers of tokens that a merge may leave, in descending order: a merge removes at most half of the patches."""
    least = tokens.count - (tokens.count - tokens.prefix) // 2
    counts = [count for count in range(TILE, tokens.count, TILE) if count >= least]
    return tuple(counts[::-1][:: -(-len(counts) // MOST) or 1])


def shapes_to_time(tokens: Tokens) -> list[Shape]:
    """The shapes that `predict_times` looks up in a latency table."""
    counts = (tokens.count, *counts_to_time(tokens))
    return [replace(shape, rows=count) for shape in dict.fromkeys(tokens.shapes.values()) for count in counts]


def predict_times(tokens: Tokens, table: LatencyTable) -> dict[tuple[tuple[int, int], ...], float]:
    """Schedules of one or two merges that pay off, with the remaining share of the linears' time.

    Merges follow the attention of the second block, of the middle one, or both: few, and not too early.

    Raises:
        InputError: a shape is not in the table.
    """

    def microseconds(rows: Mapping[str, int]) -> float:
        shapes = (replace(shape, rows=rows.get(name, tokens.count)) for name, shape in tokens.shapes.items())
        return sum(table.timing(shape, "int8").microseconds for shape in shapes)

    whole, found = microseconds({}), {}
    for merges in _schedules(tokens):
        rows = {name: count for block, count in merges for name in tokens.behind[block]}
        share = microseconds(rows) / whole
        if share <= WORTH:
            found[merges] = share
    return found


def _schedules(tokens: Tokens) -> Iterator[tuple[tuple[int, int], ...]]:
    blocks, counts = sorted(tokens.behind), counts_to_time(tokens)
    if len(blocks) < 2 or not counts:
        return
    early, late = blocks[1], blocks[len(blocks) // 2]
    for block in dict.fromkeys((early, late)):
        for count in counts:
            yield ((block, count),)
    if late > early:
        first = counts[0]
        least = first - (first - tokens.prefix) // 2
        yield from (((early, first), (late, count)) for count in counts[1:] if count >= least)


def try_schedules(
    graph: Path,
    predicted: Mapping[tuple[tuple[int, int], ...], float],
    reference_outputs: ReferenceOutputs,
    progress: Progress,
) -> list[Schedule]:
    """Measure the effect of these schedules on the answers of a float graph.

    Args:
        reference outputs: of this graph, without any merging.
    """
    found = []
    for done, (merges, time) in enumerate(predicted.items()):
        progress("try schedules of token merging", done, len(predicted))
        model = load_graph(graph)
        merge_tokens(model, dict(merges))
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
            file = Path(folder) / "merged.onnx"
            save_graph(model, file)
            with OnnxRuntimeRunner(file, name="merged", batch=reference_outputs.batch) as runner:
                answers = reference_outputs.ask(runner)
        found.append(
            Schedule(
                merges, time, float(reference_outputs.distance(answers).mean()), reference_outputs.expected(answers)
            )
        )
    progress("try schedules of token merging", len(predicted), len(predicted))
    return found


def select(schedules: Sequence[Schedule], acceptable: Callable[[Schedule], bool]) -> list[Schedule]:
    """The one that changes least and the fastest one, from the Pareto front of the acceptable schedules."""
    front = pareto_front([each for each in schedules if acceptable(each)], lambda each: (each.distance, each.time))
    return front if len(front) < 2 else [front[0], front[-1]]
