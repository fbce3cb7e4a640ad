"""Remove tokens and pruned structures, and add attention outputs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.attention import (
    AttentionViews,
    MergePoints,
    Weights,
    find_attentions,
    follow,
    merge_points,
)
from vitdeploy.graph.analysis.prunable import Prunable
from vitdeploy.graph.analysis.rows import (
    Selected,
    origin,
    rows_of_inputs,
    selected_rows,
    slice_bounds,
    split_rows,
    split_sizes,
)
from vitdeploy.graph.edit import Editor, Numbers, drop_unused
from vitdeploy.graph.passes.qkv import merge, roles, separate
from vitdeploy.graph.values import array_of, dim

# --- Compute only the tokens that are read ----------------------------------------------------------------------------
# The last block's queries, projection and MLP run for the class token alone.
#
# A classifier reads one token of the last block (two in a distilled DeiT). Every row of a LayerNormalization, a linear,
# an activation or a residual sum depends only on the same row of its input, so the selection of rows can move from the
# end of the network up through all of them to attention, where it stops at the queries: keys and values still cover all
# tokens. This removes 6.9 % of the multiplications of a ViT-B/16 at 224 pixels.


_BOUNDS = ("starts", "ends", "axes")


# Nodes that need to compute only some rows: the rows, and their axis in each input that has them.
_Narrow = dict[ir.Node, tuple[Selected, dict[int, int]]]


def class_token_only(model: ir.Model) -> int:
    """Move selections of rows up through row-wise operations, into the queries of the last attention.

    Exact: every remaining number is computed as before (a runtime may sum a product of fewer rows in another order). A
    merged query-key-value linear is divided: the query's columns on the selected rows, key and value in one linear on
    all rows.

    Left unchanged: models whose other tokens are read too (average pooling, patch features as an output), selections of
    more than half of the rows, and graphs where the selection reaches no attention. Returns the number of attentions
    that now compute fewer rows.
    """
    editor = Editor(model)
    narrow = _plan(model)
    if not _attentions(narrow):
        return 0
    if _divide_merged(editor, model, narrow):
        drop_unused(model)
        narrow = _plan(model)
    _apply(editor, narrow)
    drop_unused(model)
    return _attentions(narrow)


def _attentions(narrow: _Narrow) -> int:
    return sum(node.op_type == "Softmax" for node in narrow)


def _plan(model: ir.Model) -> _Narrow:
    """The nodes of whose output only some rows are read, in graph order. Read-only."""
    narrow: _Narrow = {}
    for node in reversed(list(model.graph)):
        outputs = [output for output in node.outputs if list(output.uses()) or output.is_graph_output()]
        expected = [_expected(output, narrow) for output in outputs]
        first = expected[0] if expected else None
        if first is None or any(one is None or (one.axis, one.size) != (first.axis, first.size) for one in expected):
            continue
        inputs = rows_of_inputs(node, first.axis, first.size)
        if inputs is not None:
            rows = {row for one in expected if one is not None for row in one.rows}
            narrow[node] = Selected(first.axis, first.size, tuple(sorted(rows))), inputs
    return dict(reversed(narrow.items()))


def _expected(value: ir.Value, narrow: _Narrow) -> Selected | None:
    """The rows of `value` that its readers need; None if one of them needs all, or selects along another axis."""
    if value.is_graph_output():
        return None
    found = []
    for node, index in value.uses():
        if node in narrow:
            expected, inputs = narrow[node]
            axis = inputs.get(index)
            found.append(Selected(axis, expected.size, expected.rows) if axis is not None else None)
        else:
            found.append(selected_rows(node) if index == 0 else None)
    first = found[0] if found else None
    if first is None or any(one is None or one.axis != first.axis for one in found):
        return None
    rows = sorted({row for one in found if one is not None for row in one.rows})
    return Selected(first.axis, first.size, tuple(rows)) if 2 * len(rows) <= first.size else None


def _divide_merged(editor: Editor, model: ir.Model, narrow: _Narrow) -> int:
    """Split merged linears for queries that will be narrowed: one linear for the query, one for key and value."""
    count = 0
    for attention in find_attentions(model):
        merged = editor.linear_behind(origin(attention.value))
        if attention.softmax not in narrow or merged is None or "query" not in roles(merged.output, attention):
            continue
        parts = separate(editor, merged, attention)
        if parts.keys() >= {"key", "value"}:
            merge(editor, [parts["key"], parts["value"]])
        count += bool(parts)
    return count


def _apply(editor: Editor, narrow: _Narrow) -> None:
    have: dict[ir.Value, Selected] = {}  # the rows that the outputs of narrowed nodes hold
    picked: dict[tuple[ir.Value, int, tuple[int, ...]], ir.Value] = {}

    def pick(before: ir.Node, value: ir.Value, axis: int, rows: Sequence[int], size: int) -> ir.Value:
        """`rows` (of the original numbering) of `value`, which may have been narrowed already."""
        held = have[value].rows if value in have else tuple(range(size))
        if held == tuple(rows):
            return value
        key = (value, axis, tuple(rows))
        if key not in picked:
            picked[key] = _select(editor, before, value, axis, [held.index(row) for row in rows])
        return picked[key]

    for node, (expected, inputs) in narrow.items():
        for index, axis in inputs.items():
            value = node.inputs[index]
            assert value is not None
            node.replace_input_with(index, pick(node, value, axis, expected.rows, expected.size))
        for output in node.outputs:
            have[output] = expected
            if output.shape is not None:
                editor.resize(output, (expected.axis,), len(expected.rows))
    for value in list(have):
        for reader in dict.fromkeys(use.node for use in value.uses()):
            if reader not in narrow:
                _renumber(editor, reader, have[value])


def _renumber(editor: Editor, node: ir.Node, held: Selected) -> None:
    """Renumber a selection that reads a tensor which holds only the rows `held`."""
    value = node.inputs[0]
    assert value is not None
    if node.op_type == "Gather":
        indices = array_of(node.inputs[1], overridable=True)
        assert indices is not None
        places = [held.rows.index(int(index) % held.size) for index in indices.ravel()]
        editor.set_input(node, 1, np.array(places, np.int64).reshape(indices.shape))
        return
    bounds = slice_bounds(node) if node.op_type == "Slice" else None
    if bounds is not None:
        parts = [(node.outputs[0], list(range(held.size))[bounds[0][1]])]
    else:
        parts = [(output, rows) for output, rows in split_rows(node, held.size) if list(output.uses())]
    for output, rows in parts:
        places = [held.rows.index(row) for row in rows]
        whole = places == list(range(len(held.rows)))
        part = value if whole else _select(editor, node, value, held.axis, places)
        ir.convenience.replace_all_uses_with(output, part)


def _select(editor: Editor, before: ir.Node, value: ir.Value, axis: int, places: list[int]) -> ir.Value:
    """The rows of `value` at `places` along `axis`: a constant for a constant, else a Slice or a Gather."""
    name = str(before.name).rpartition("/")[0] or str(before.name)
    if (array := array_of(value, overridable=True)) is not None:
        return editor.constant(array.take(places, axis), f"{value.name}.rows")
    shape = list(value.shape) if value.shape is not None else None
    if shape is not None:
        shape[axis] = len(places)
    if places == list(range(places[0], places[0] + len(places))):
        bounds = (places[0], places[-1] + 1, axis)
        inputs = [
            editor.constant(np.array([bound], np.int64), f"{name}.{of}")
            for bound, of in zip(bounds, _BOUNDS, strict=True)
        ]
        [result] = editor.node(before, "Slice", [value, *inputs], name, shape)
    else:
        indices = editor.constant(np.array(places, np.int64), f"{name}.rows")
        [result] = editor.node(before, "Gather", [value, indices], name, shape, axis=axis)
    return result


# --- Merge similar tokens between attention and MLP -------------------------------------------------------------------
# All later operations then have fewer rows. Approximate, unlike other passes.
#
# Token merging (ToMe, arXiv 2210.09461): patches go alternately to two sets, A and B; each token of A finds the nearest
# of B (section 3.2), and the nearest pairs become one token each, the mean of all its patches. A token of s patches
# counts s times in all later attention (equation 1):
#
#     softmax(Q K^T / sqrt(d) + log s) V
#
# The distance is Euclidean, in the residual stream, whose numbers the mean replaces. The paper compares keys;
# docs/adr/0010 explains the difference. All shapes except the batch are static; all operators are standard ONNX.


# Used instead of minus half a squared distance; finite, because infinities produce NaN.
MASKED_SCORE = np.array(np.finfo(np.float32).min)


def merge_tokens(model: ir.Model, schedule: Mapping[int, int]) -> tuple[int, ...]:
    """Merge tokens after the attention of some blocks, in place.

    Args:
        model: a graph in canonical form; passes that need the rows of all tokens (`class_token_only`) run before.
        schedule: block (as in `merge_points`) -> number of tokens that remain after its attention. The number includes
            the tokens before the patches (class token, registers), which are never merged. Tokens keep their order.

    Returns: the number of tokens at first and after each block of the schedule.

    Raises:
        GraphError: the tokens of this graph cannot be merged at all, or not by this schedule.
    """
    points = merge_points(model)
    _check(schedule, points)
    editor, tokens, sizes = Editor(model), points.count, None
    logarithms: dict[ir.Node, ir.Value] = {}
    for block, remaining in sorted(schedule.items()):
        after = points.points[block]
        flow, readers = follow(model, after, points.prefix), list(after.uses())
        reads = {node for node, _ in readers}
        first = next(node for node in model.graph if node in reads)
        assert after.shape is not None
        batch = after.shape[0]
        writer = _Writer(editor, first, f"blocks.{block}.merge", batch, points.prefix, tokens, remaining)
        merged, sizes, logarithm = writer.merge(after, sizes)
        for node, index in readers:
            node.replace_input_with(index, merged)
        for value, axes in flow.axes.items():
            if value is not after:
                editor.resize(value, axes, remaining)
        logarithms.update((attention.softmax, logarithm) for attention in flow.attentions)
        tokens = remaining
    for softmax, logarithm in logarithms.items():
        scores = softmax.inputs[0]
        assert scores is not None
        name = f"{str(softmax.name).removesuffix('/Softmax')}.sizes"
        softmax.replace_input_with(0, editor.node(softmax, "Add", [scores, logarithm], name, scores.shape)[0])
    return (points.count, *(schedule[block] for block in sorted(schedule)))


def _check(schedule: Mapping[int, int], found: MergePoints) -> None:
    tokens = found.count
    for block, remaining in sorted(schedule.items()):
        if block not in found.points:
            raise GraphError(
                f"tokens cannot be merged in block {block}",
                found=f"{tokens} tokens, which can be merged in the blocks {', '.join(map(str, found.points))}",
                fix="choose one of these blocks",
            )
        least = tokens - (tokens - found.prefix) // 2
        if not least <= remaining < tokens:
            raise GraphError(
                f"{remaining} tokens cannot remain in block {block}",
                found=f"{tokens} tokens before the merge, {found.prefix} of them not patches",
                expected=f"{least} to {tokens - 1}: one merge removes at most half of the patches",
            )
        tokens = remaining


@dataclass(frozen=True)
class _Writer:
    """Writes one merge, from `count` tokens to `remaining`, before a node. Names of nodes begin with `name`."""

    editor: Editor
    before: ir.Node
    name: str
    batch: int | ir.SymbolicDim
    prefix: int
    count: int
    remaining: int

    def merge(self, tokens: ir.Value, sizes: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Merge `tokens` [batch, count, channels]. Returns the merged tokens; their sizes [batch, tokens, 1], that is
        the patches in each; and the logarithm of the sizes [batch, 1, 1, tokens], which is added to attention scores.

        Args:
            sizes: the sizes before the merge, [batch, count, 1]; None: one patch each.
        """
        stay, go, joined = self._match(tokens)
        own, others = self._pick(tokens, stay), self._pick(tokens, go)
        if sizes is None:
            added = self._op("ReduceSum", [joined, self._ints([2], "last")], self._column(self.remaining))
            sizes = self._op("Add", [added, self._constant(np.array(1, np.float32), "one")], added.shape)
        else:
            own_sizes, other_sizes = self._pick(sizes, stay), self._pick(sizes, go)
            added = self._op("MatMul", [joined, other_sizes], own_sizes.shape)
            own = self._op("Mul", [own, own_sizes], own.shape)
            others = self._op("Mul", [others, other_sizes], others.shape)
            sizes = self._op("Add", [own_sizes, added], added.shape)
        total = self._op("Add", [own, self._op("MatMul", [joined, others], own.shape)], own.shape)
        mean = self._op("Div", [total, sizes], own.shape)
        row = self._op(
            "Reshape", [sizes, self._ints([-1, 1, 1, self.remaining], "row")], [self.batch, 1, 1, self.remaining]
        )
        return mean, sizes, self._op("Log", [row], row.shape)

    def _match(self, tokens: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
        """(stay, go, joined): the indices of the tokens that stay [batch, remaining, 1] and that go [batch, going, 1];
        and a matrix [batch, remaining, going] with 1 where a token is merged into one that stays, else 0."""
        going, second = self.count - self.remaining, np.arange(self.prefix + 1, self.count, 2)
        near, partner = self._nearest(tokens, second)
        # Ascending: tokens without a partner first, the nearest last.
        _, order = self._ranked(near, self.count, self.count, axis=1, largest=0)
        parts = self._constant(np.array([self.remaining, going], np.int64), "parts")
        columns = [self._column(self.remaining), self._column(going)]
        stay, go = self.editor.node(self.before, "Split", [order, parts], self.name, *columns, axis=1)
        stay, _ = self._ranked(stay, self.remaining, self.remaining, axis=1, largest=0)
        row = [self.batch, 1, going]
        into = self._op("Reshape", [self._pick(partner, go), self._ints([-1, 1, going], "row")], row)
        into = self._op("Gather", [self._constant(second, "second"), into], row)
        joined = self._op("Equal", [into, stay], [self.batch, self.remaining, going])
        joined.type = ir.TensorType(ir.DataType.BOOL)
        joined = self._op("Cast", [joined], joined.shape, to=ir.DataType.FLOAT)
        joined.type = ir.TensorType(ir.DataType.FLOAT)
        return stay, go, joined

    def _nearest(self, tokens: ir.Value, second: npt.NDArray[np.int64]) -> tuple[ir.Value, ir.Value]:
        """For each token of A, minus half its squared distance to the nearest token of B, and the index of that token
        in B; both [batch, count, 1]. For all other tokens MASKED_SCORE, and any index.

            -|a - b|^2 / 2 = a . b - |b|^2 / 2 - |a|^2 / 2

        Args:
            second: the indices of the tokens of B.
        """
        batch, count, width, many = self.batch, self.count, dim(tokens, 2), len(second)
        bounds = [
            self._ints([bound], name)
            for bound, name in zip((self.prefix + 1, self.count, 1, 2), ("start", "end", "axis", "step"), strict=True)
        ]
        others = self._op("Slice", [tokens, *bounds], [batch, many, width])
        turned = self._op("Transpose", [others], [batch, width, many], perm=[0, 2, 1])
        products = self._op("MatMul", [tokens, turned], [batch, count, many])
        squares = self._op("ReduceSumSquare", [tokens, self._ints([2], "channels")], self._column(count))
        halves = self._op("Mul", [squares, self._constant(np.array(0.5, np.float32), "half")], self._column(count))
        of_others = self._op("Slice", [halves, *bounds], self._column(many))
        of_others = self._op("Transpose", [of_others], [batch, 1, many], perm=[0, 2, 1])
        nearness = self._op("Sub", [products, of_others], products.shape)
        best, partner = self._ranked(nearness, 1, count, axis=2)
        nearness = self._op("Sub", [best, halves], best.shape)
        patch = np.arange(count) - self.prefix
        first = self._constant(((patch >= 0) & (patch % 2 == 0))[:, None], "first")
        chosen = self._op("Where", [first, nearness, self._constant(MASKED_SCORE, "far")], best.shape)
        chosen.type = tokens.type
        return chosen, partner

    def _ranked(self, values: ir.Value, count: int, rows: int, **attributes: int) -> tuple[ir.Value, ir.Value]:
        """(the first `count` values, their indices), both [batch, rows, 1]."""
        shape = self._column(rows)
        best, numbers = self.editor.node(
            self.before, "TopK", [values, self._ints([count], "k")], self.name, shape, shape, **attributes
        )
        numbers.type = ir.TensorType(ir.DataType.INT64)
        return best, numbers

    def _pick(self, values: ir.Value, rows: ir.Value) -> ir.Value:
        """Select the rows with the indices `rows`, [batch, any, 1], of each image."""
        return self._op("GatherND", [values, rows], [self.batch, dim(rows, 1), dim(values, 2)], batch_dims=1)

    def _column(self, count: int) -> Sequence[Any]:
        return [self.batch, count, 1]

    def _op(self, operator: str, inputs: Sequence[ir.Value], shape: Any, **attributes: Any) -> ir.Value:
        return self.editor.node(self.before, operator, inputs, self.name, shape, **attributes)[0]

    def _constant(self, array: npt.NDArray[Any], name: str) -> ir.Value:
        return self.editor.constant(array, f"{self.name}.{name}")

    def _ints(self, values: Sequence[int], name: str) -> ir.Value:
        return self._constant(np.array(values, np.int64), name)


# --- Add attention outputs to a graph ---------------------------------------------------------------------------------
# The attention weights, or their rollout over the patches.
#
# A second reader of the softmax prevents every runtime from fusing the attention around it. So the weights are for
# analysis runs only, never for a graph that ships. The rollout itself is cheap: it computes only rows of matrices, from
# the last block to the first.


OUTPUT = "attention"


def mark(model: ir.Model, weights: Weights) -> str:
    """Make the weights, [batch, heads, queries, keys], an output of the graph, in place; return its name."""
    return _output(model, weights.attention.softmax.outputs[0])


def mark_mean(model: ir.Model, weights: Weights) -> str:
    """Make the mean over the heads, [batch, queries, keys], an output, in place; return its name. The weights of all
    heads and blocks of a large model would fill the memory."""
    editor, name = Editor(model), weights.name
    axis = editor.constant(np.array([-3], np.int64), f"{name}.heads")
    softmax = weights.attention.softmax.outputs[0]
    shape = [*list(softmax.shape or ())[:-3], weights.queries, weights.keys]
    [mean] = editor.node(weights.attention.mix, "ReduceMean", [softmax, axis], name, shape, keepdims=0)
    return _output(model, mean)


def _output(model: ir.Model, value: ir.Value) -> str:
    if not value.is_graph_output():
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        model.graph.outputs.append(value)
    return str(value.name)


def add_rollout(model: ir.Model, views: AttentionViews) -> str:
    """Add the attention rollout (Abnar & Zuidema, arXiv 2005.00928, section 3) of `views.rows` over the patches, in
    place; return the name of the output, float32 [batch, rows, columns].

    The map is the mean over `views.rows` of the whole rollout. The sum of a map is the share of the patches; the rest
    belongs to the tokens before them.

    Args:
        views: the views of `model` from `token_views`. If batch and heads share an axis, the map is correct for batch 1
            only.
    """
    editor = Editor(model)
    end = views.last.attention.mix
    before, last = views.blocks[:-1], views.last
    flow = _rows_read(editor, last, views.rows)
    for number, weights in enumerate(reversed(before)):
        name = f"{OUTPUT}/{len(before) - 1 - number}"
        softmax = weights.attention.softmax.outputs[0]
        [mixed] = editor.node(end, "MatMul", [flow, softmax], name, None)
        flow = _half_and_half(editor, end, _over_heads(editor, end, mixed, name), flow, name)
    start = editor.constant(np.array([views.prefix], np.int64), f"{OUTPUT}/start")
    stop = editor.constant(np.array([last.keys], np.int64), f"{OUTPUT}/stop")
    axis = editor.constant(np.array([-1], np.int64), f"{OUTPUT}/axis")
    [patches] = editor.node(end, "Slice", [flow, start, stop, axis], OUTPUT, None)
    sizes = editor.constant(np.array([-1, *views.grid], np.int64), f"{OUTPUT}/sizes")
    [grid] = editor.node(end, "Reshape", [patches, sizes], OUTPUT, [_batch(model), *views.grid])
    grid.name = OUTPUT
    grid.type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs.append(grid)
    return OUTPUT


def _rows_read(editor: Editor, last: Weights, rows: tuple[int, ...]) -> ir.Value:
    """The mean of some rows of the last block's matrix, [..., 1, keys]: a pooling query has no residual connection."""
    name, end, softmax = f"{OUTPUT}/last", last.attention.mix, last.attention.softmax.outputs[0]
    read = softmax
    if len(rows) < last.queries:
        picked = editor.constant(np.array(rows, np.int64), f"{name}/rows")
        [read] = editor.node(end, "Gather", [softmax, picked], name, None, axis=len(softmax.shape or ()) - 2)
    axes = editor.constant(np.array([-3, -2], np.int64), f"{name}/axes")
    [mean] = editor.node(end, "ReduceMean", [read, axes], name, None, keepdims=1)
    if last.learned:
        return mean
    itself = editor.constant(np.eye(last.queries, last.keys, dtype=np.float32)[list(rows)].mean(0)[None], f"{name}/eye")
    return _half_and_half(editor, end, mean, itself, name)


def _over_heads(editor: Editor, end: ir.Node, value: ir.Value, name: str) -> ir.Value:
    axes = editor.constant(np.array([-3], np.int64), f"{name}/heads")
    return editor.node(end, "ReduceMean", [value, axes], name, None, keepdims=1)[0]


def _half_and_half(editor: Editor, end: ir.Node, attended: ir.Value, itself: ir.Value, name: str) -> ir.Value:
    """The matrix of a block: half attention, half residual connection."""
    half = editor.constant(np.array(0.5, np.float32), f"{name}/half")
    [both] = editor.node(end, "Add", [attended, itself], name, None)
    return editor.node(end, "Mul", [both, half], name, None)[0]


def _batch(model: ir.Model) -> int | ir.SymbolicDim | None:
    """The leading axis of the input."""
    shape = model.graph.inputs[0].shape
    return shape[0] if shape is not None else None


# --- Remove structures (hidden channels or heads) before a linear; the caller compensates for them --------------------


def prune(editor: Editor, prunable: Prunable, kept: Sequence[int], weight: Numbers, bias: Numbers) -> None:
    """Keep only some structures before a linear, in place; they keep their order.

    Args:
        prunable: a structure of this graph in its current state.
        kept: the indices of the structures to keep, ascending, at least one.
        weight, bias: the new weight and bias of the reader, [kept channels, out] and [out].
    """
    for linear, columns in prunable.columns:
        stay = np.sort(columns[list(kept)].ravel())
        editor.set_linear(linear, linear.weight[:, stay], None if linear.bias is None else linear.bias[stay])
    for node in prunable.splits:
        first = node.inputs[0]
        assert first is not None and first.shape is not None
        whole = first.shape[prunable.axes[first]]
        assert isinstance(whole, int)
        sizes = [_left(prunable, kept, size) for size in split_sizes(node, whole) or ()]
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            editor.set_input(node, 1, np.array(sizes, np.int64))
    for value, axis in prunable.axes.items():
        if (size := dim(value, axis)) is not None:
            editor.resize(value, (axis,), _left(prunable, kept, size))
    editor.set_linear(prunable.reader, weight, bias)


def _left(prunable: Prunable, kept: Sequence[int], size: int) -> int:
    return size // prunable.count * len(kept)
