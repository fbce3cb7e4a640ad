"""Schedules of token merging that may pay off on a target: predicted from measured times, judged on calibration images.

How a linear's speed depends on its number of rows is a property of runtime, CPU and width: tiles decide, not MACs. So a
latency table says which numbers of tokens are good, and a merge goes to one of these.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from vitdeploy.graph.analysis.linears import find_linears
from vitdeploy.graph.analysis.tokens import follow, merge_points
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.graph.passes.token_merging import merge_tokens
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.search.expected import Expected
from vitdeploy.search.front import pareto_front
from vitdeploy.search.latency import LatencyTable
from vitdeploy.search.layer_graph import Shape, shapes_of
from vitdeploy.search.reference_outputs import ReferenceOutputs

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
