"""Choose the rows of products: their number, their parts, and schedules of token merging."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.attention import find_attentions, follow, merge_points
from vitdeploy.graph.analysis.rows import count_int8, find_linears
from vitdeploy.graph.io.files import load_graph, save_graph
from vitdeploy.graph.passes.rows import (
    align_rows,
    complete_shapes,
    layers_by_tokens,
    parts_of,
    split_rows,
    token_stream,
)
from vitdeploy.graph.passes.tokens import merge_tokens
from vitdeploy.progress import Progress
from vitdeploy.search import costs, frame
from vitdeploy.search.layers import Shape, shapes_of

# --- Rows in parts, or more rows than tokens: the form of a placed model with the lowest layer costs ------------------


# For more rows than tokens, the next multiples of these are tried.
MULTIPLES = (2, 8, 16)
# A form is chosen if its layers take at most this share of their time: the costs are accurate to a few percent.
WORTH_PARTS = 0.97


@dataclass(frozen=True)
class RowParts:
    """The `parts` in which a placed model computes its rows; one number means extra rows in one part, None one row per
    token.

    `ratio`: the time of its layers divided by that with one row for each of `tokens`, by the costs of `table`.
    `reason`: why the tokens allow only one form, if so.
    """

    target: str
    batch: int
    table: str
    tokens: int = 0
    parts: tuple[int, ...] | None = None
    ratio: float = 1.0
    reason: str = ""


def choose_row_parts(graph: Path, batch: int, table: costs.CostTable) -> RowParts:
    """The form of `alternatives_of` whose layers take the least time. The images of a batch share a product with the
    rows of all; rows are split only at batch 1, since each part of several images is first copied together."""
    alternatives, layers, reason = alternatives_of(graph)
    chosen = RowParts(table.target, batch, str(table), alternatives[0][0], reason=reason)
    if reason:
        return chosen

    def time(parts: Sequence[int]) -> float:
        return sum(table.parts(Shape(1, k, n), [batch * rows for rows in parts]) for k, n in layers)

    times = {parts: time(parts) for parts in alternatives if batch == 1 or len(parts) == 1}
    whole, best = times[alternatives[0]], min(times, key=lambda parts: times[parts])
    if times[best] > WORTH_PARTS * whole:
        return chosen
    return replace(chosen, parts=best, ratio=times[best] / whole)


def alternatives_of(graph: Path) -> tuple[list[tuple[int, ...]], list[tuple[int, int]], str]:
    """The parts in which a placed model can compute its rows, all at once first; inputs and outputs of each layer over
    these tokens; and why the tokens allow only one form, else ""."""
    model = load_graph(graph)
    layers = layers_by_tokens(model)
    tokens = next(iter(layers), 1)
    alternatives, more = [(tokens,), *parts_of(tokens)], more_rows(tokens)
    if more and _takes_more(model, tokens, more[0]):
        alternatives += [(rows,) for rows in more]
    if not layers:
        return alternatives, [], "no linear over a fixed number of tokens"
    alone = f"{tokens} rows are whole tiles, or less than one tile" if len(alternatives) == 1 else ""
    return alternatives, layers[tokens], alone


def more_rows(tokens: int) -> list[int]:
    """Numbers of rows that are whole tiles and valid for `align_rows`, ascending."""
    rounded = {-(-tokens // multiple) * multiple for multiple in MULTIPLES}
    return sorted(rows for rows in rounded if tokens < rows < 2 * tokens)


def _takes_more(model: ir.Model, tokens: int, rows: int) -> bool:
    """Whether a graph with complete shapes can have this number of rows instead of its tokens. Changes the graph."""
    try:
        return token_stream(find_attentions(model))[1] == tokens and align_rows(model, rows) > 0
    except GraphError:
        return False


def in_parts(graph: Path, parts: Sequence[int] | None, out: Path) -> int:
    """Write a placed graph with its rows in parts; return the number of its linears and convolutions in INT8.

    Args:
        parts: as for `split_rows`; one number for this many rows (`align_rows`); None for all rows at once.

    Raises:
        GraphError: the graph does not allow these parts, or this number of rows.
    """
    model = load_graph(graph)
    if parts is not None and len(parts) == 1:
        complete_shapes(model)
        align_rows(model, parts[0])
    elif parts is not None:
        split_rows(model, parts)
    save_graph(model, out)
    return count_int8(model)


# --- Schedules of token merging that may pay off on a target ----------------------------------------------------------
# Predicted from measured times, and evaluated on calibration images.
#
# The speed of a linear depends on its number of rows by runtime, CPU and width: tiles decide, not MACs. So a cost table
# gives the good numbers of tokens, and a merge leaves one of these.


# Token counts are tried in multiples of the rows that kernels process at once, up to this many multiples.
TILE, MOST = 16, 8
# A schedule is tried if the linears take at most this share of their time, since merging itself takes time.
WORTH = 0.97


@dataclass(frozen=True)
class TokenStream:
    """The parts of a graph that a schedule changes: its tokens, the shape of each linear over all of them, and, by
    block, the linears after the attention of that block."""

    count: int
    prefix: int
    shapes: Mapping[str, Shape]
    behind: Mapping[int, frozenset[str]]


@dataclass(frozen=True)
class Schedule:
    """`merges`: pairs (block, remaining tokens). `time`: the time of all linears over all tokens, as a share of their
    time without merging. `distance`: from the float graph's answers, mean over the images; `expected`: for a
    classifier, else None.
    """

    merges: tuple[tuple[int, int], ...]
    time: float
    distance: float
    expected: frame.Expected | None


def find_tokens(model: ir.Model) -> TokenStream:
    """The tokens of a graph; raises GraphError if they cannot be merged."""
    points = merge_points(model)
    linears = [linear for linear in find_linears(model) if linear.kind == "matmul"]
    shapes = shapes_of(model, [linear.name for linear in linears])
    behind = {}
    for block, after in points.points.items():
        axes = follow(model, after, points.prefix).axes
        behind[block] = frozenset(linear.name for linear in linears if linear.input in axes)
    over = {name: shape for name, shape in shapes.items() if shape.rows == points.count}
    return TokenStream(points.count, points.prefix, over, behind)


def counts_to_try(tokens: TokenStream) -> tuple[int, ...]:
    """The token counts that a merge may leave, in descending order: a merge removes at most half of the patches."""
    least = tokens.count - (tokens.count - tokens.prefix) // 2
    counts = [count for count in range(TILE, tokens.count, TILE) if count >= least]
    return tuple(counts[::-1][:: -(-len(counts) // MOST) or 1])


def predict_times(tokens: TokenStream, table: costs.CostTable | None) -> dict[tuple[tuple[int, int], ...], float]:
    """Schedules of one or two merges that pay off, with the remaining share of the linears' time by a cost table, or of
    their MACs without one.

    Merges follow the attention of the second block, of the middle one, or both: few, and not too early.
    """

    def time_of(rows: Mapping[str, int]) -> float:
        shapes = (replace(shape, rows=rows.get(name, tokens.count)) for name, shape in tokens.shapes.items())
        return sum(table.layer(shape, "int8") if table is not None else shape.macs for shape in shapes)

    whole, shares = time_of({}), {}
    for merges in _schedules(tokens):
        rows = {name: count for block, count in merges for name in tokens.behind[block]}
        share = time_of(rows) / whole
        if share <= WORTH:
            shares[merges] = share
    return shares


def _schedules(tokens: TokenStream) -> Iterator[tuple[tuple[int, int], ...]]:
    blocks, counts = sorted(tokens.behind), counts_to_try(tokens)
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
    reference_outputs: frame.ReferenceOutputs,
    progress: Progress,
) -> list[Schedule]:
    """Measure the effect of these schedules on the answers of a float graph.

    Args:
        reference_outputs: the reference outputs of this graph, without merging.
    """
    tried = []
    for merges, time in frame.counted(list(predicted.items()), "try token merging schedules", progress):
        model = load_graph(graph)
        merge_tokens(model, dict(merges))
        reached = reference_outputs.reached(reference_outputs.of_float(model))
        tried.append(Schedule(merges, time, reached.distance, reached.expected))
    return tried


def select(schedules: Sequence[Schedule], acceptable: Callable[[Schedule], bool]) -> list[Schedule]:
    """The schedule with the smallest distance and the fastest one, from the Pareto front of acceptable schedules."""
    front = frame.pareto_front(
        [schedule for schedule in schedules if acceptable(schedule)], lambda each: (each.distance, each.time)
    )
    return front if len(front) < 2 else [front[0], front[-1]]
