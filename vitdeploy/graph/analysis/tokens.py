"""The tokens of a Vision Transformer's graph: how many, which come before the patches, and what is computed of each.

Nothing is changed here. A token axis is followed forwards through operations that work on each row alone
(`rowwise.py`), through attention, which reads tokens as queries, as keys and as values, and to selections of the tokens
before the patches, where it ends. Anything else depends on how many tokens there are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.attention import Attention, find_attentions
from vitdeploy.graph.analysis.layout import slice_bounds
from vitdeploy.graph.analysis.rowwise import rows_of_inputs, selected_rows
from vitdeploy.graph.values import ancestors, dim, integers_of, is_constant, only_user

Mask = npt.NDArray[np.bool_]
# Of residual streams and of what attention makes of them: [batch, tokens, channels] and [batch, heads, queries, keys].
TOKENS, KEYS = 1, 3


@dataclass(frozen=True)
class MergePoint:
    """A place between attention and MLP where tokens can be merged.

    `block`: number of the attention in the graph, from 0. `before` and `after`: the residual stream in front of it, and
    with its result added; both [batch, tokens, channels].
    """

    block: int
    attention: Attention
    before: ir.Value
    after: ir.Value


@dataclass(frozen=True)
class MergePoints:
    """`count` tokens, the first `prefix` of which (class, distillation, registers) are not patches; points by block."""

    count: int
    prefix: int
    points: dict[int, MergePoint]


@dataclass(frozen=True)
class TokenFlow:
    """The token axes of every tensor that holds something for each token, and the attentions to these tokens."""

    axes: dict[ir.Value, set[int]]
    attentions: list[Attention]


class _Stopped(Exception):
    """Why a token axis cannot be followed."""


def merge_points(model: ir.Model) -> MergePoints:
    """Find the places where tokens can be merged, in a graph in canonical form.

    Raises:
        GraphError: there are none. No attention of all tokens to each other; the number of tokens already changes; an
            output, or an operation, depends on every token.
    """
    attentions = find_attentions(model)
    streams = {block: (each, residual(each)) for block, each in enumerate(attentions)}
    found = {i: MergePoint(i, each, *stream) for i, (each, stream) in streams.items() if stream is not None}
    counts = dict.fromkeys(dim(each.softmax.outputs[0], -1) for each in attentions)
    if not found or len(counts) > 1:
        over = f"attention to {' and '.join(map(str, counts))} tokens" if counts else "no attention"
        raise _refused(over, "self-attention to the same tokens in every block")
    [count] = [dim(point.after, TOKENS) for point in found.values()][:1]
    assert count is not None
    first = next(iter(found.values()))
    of_image = _of_image(first.before, TOKENS, count)
    prefix = int(of_image.argmax())
    if not of_image[prefix:].all():
        raise _refused("tokens that are no patches behind or between those of the image", "them before the patches")
    points, reason = {}, ""
    for block, point in found.items():
        try:
            flow = follow(model, point.before, prefix)
        except _Stopped as stop:
            reason = reason or str(stop)
        else:
            if point.attention in flow.attentions and flow.axes.get(point.after) == {TOKENS}:
                points[block] = point
    if not points:
        raise _refused(reason, "tokens that only attention, row-wise operations and the choice of a class token read")
    return MergePoints(count, prefix, points)


def follow(model: ir.Model, stream: ir.Value, prefix: int) -> TokenFlow:
    """Everything that is computed of the tokens of `stream`, [batch, tokens, channels].

    Raises:
        _Stopped: they cannot be followed to the end.
    """
    flow, attentions = TokenFlow({stream: {TOKENS}}, []), find_attentions(model)
    by_node = {node: each for each in attentions for node in (each.scores, each.softmax, each.mix)}
    size = dim(stream, TOKENS)
    assert size is not None
    for node in model.graph:
        axes = {
            axis
            for index, value in enumerate(node.inputs)
            if value is not None
            for own in flow.axes.get(value, ())
            if (axis := _behind(node, index, own, size, prefix, flow, by_node.get(node))) is not None
        }
        if axes:
            flow.axes.update((output, axes) for output in node.outputs)
        if node in by_node and node is by_node[node].softmax and KEYS in axes:
            flow.attentions.append(by_node[node])
    for value in flow.axes:
        if value.is_graph_output():
            raise _Stopped(f"the output {value.name}, which holds something of each token")
    return flow


def _behind(
    node: ir.Node, index: int, axis: int, size: int, prefix: int, flow: TokenFlow, attention: Attention | None
) -> int | None:
    """The axis of the outputs along which the tokens lie that one input holds along `axis`; None if they end."""
    value = node.inputs[index]
    assert value is not None and value.shape is not None
    last = len(value.shape) - 1
    if attention is not None and node is attention.scores and index == 1 and axis == last:
        return _keys(node)
    if attention is not None and node is attention.softmax and axis == last:
        return _keys(node)
    if attention is not None and node is attention.mix and axis == last - index:
        other = node.inputs[1 - index]
        if other is not None and other.shape is not None and len(other.shape) - 2 + index in flow.axes.get(other, ()):
            return None
    if index == 0 and reads_first(node, axis, prefix):
        return None
    for out in range(len(node.outputs[0].shape or ())):
        rows = rows_of_inputs(node, out, size) if dim(node.outputs[0], out) == size else None
        if rows is not None and rows.get(index) == axis:
            for i, own in rows.items():
                other = node.inputs[i]
                if other is not None and own not in flow.axes.get(other, ()):
                    raise _Stopped(f"{node.name}, where {other.name} holds a number for each token")
            return out
    raise _Stopped(f"{node.name} ({node.op_type}), which depends on every token")


def _keys(node: ir.Node) -> int:
    if len(node.outputs[0].shape or ()) != KEYS + 1:
        raise _Stopped(f"{node.name}, where batch and heads share an axis")
    return KEYS


def reads_first(node: ir.Node, axis: int, count: int) -> bool:
    """Whether a node selects some of the first `count` rows of its first input along `axis`, by indices that stay valid
    whatever follows these rows."""
    selected = selected_rows(node)
    if selected is None or selected.axis != axis or not all(row < count for row in selected.rows):
        return False
    if node.op_type == "Slice":
        return all(0 <= end <= count for _, cut in slice_bounds(node) or () for end in (cut.start, cut.stop))
    return node.op_type == "Gather" and min(integers_of(node.inputs[1]) or [0]) >= 0


def residual(attention: Attention) -> tuple[ir.Value, ir.Value] | None:
    """(before, after): the operands [batch, tokens, channels] of the sum that adds the result of self-attention."""
    weights = attention.softmax.outputs[0]
    count, value = dim(weights, -1), attention.mix.outputs[0]
    if count is None or dim(weights, -2) != count:
        return None
    while (node := only_user(value)) is not None:
        others = [other for other in node.inputs if other is not value and other is not None]
        if node.op_type == "Add" and len(others) == 1 and not is_constant(others[0], overridable=True):
            after = node.outputs[0]
            shapes = [list(each.shape or ()) for each in (others[0], after)]
            fits = shapes[0][1:] == shapes[1][1:] and len(shapes[1]) == TOKENS + 2 and shapes[1][TOKENS] == count
            return (others[0], after) if fits else None
        value = node.outputs[0]
    return None


def _of_image(value: ir.Value, axis: int, size: int) -> Mask:
    """Which rows along an axis of `size` depend on the content of a graph input, [size]. In a residual stream in front
    of any attention these are the patches."""
    if not _depends(value):
        return np.zeros(size, bool)
    node = value.producer()
    if node is None:
        return np.ones(size, bool)
    if node.op_type == "Concat" and node.attributes.get_int("axis", 0) in (axis, axis - len(value.shape or ())):
        return np.concatenate([_of_image(each, axis, dim(each, axis) or 0) for each in node.inputs if each is not None])
    pads = integers_of(node.inputs[1]) if node.op_type == "Pad" and len(node.inputs) < 4 else None
    if pads is not None and node.inputs[0] is not None:
        before, behind = pads[axis], pads[axis + len(pads) // 2]
        return np.pad(_of_image(node.inputs[0], axis, size - before - behind), (before, behind))
    rows = rows_of_inputs(node, axis, size)
    if rows is None:
        return np.ones(size, bool)
    found = np.zeros(size, bool)
    for i, each in enumerate(node.inputs):
        if each is not None:
            found |= _of_image(each, axis=rows[i], size=size) if i in rows else _depends(each)
    return found


def _depends(value: ir.Value) -> bool:
    """Whether a tensor depends on the content of a graph input, not on its size alone."""
    values = [value, *(each for node in ancestors(value, past_sizes=False) for each in node.inputs if each is not None)]
    return any(each.is_graph_input() for each in values)


def _refused(found: str, wanted: str) -> GraphError:
    return GraphError(
        "the tokens of this graph cannot be merged", found=found, wanted=wanted, fix="leave token merging out"
    )
