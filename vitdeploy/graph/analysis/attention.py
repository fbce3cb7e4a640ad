"""Find attention, tokens and the residual stream in a graph."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph import values
from vitdeploy.graph.analysis.rows import (
    Linear,
    Rows,
    is_layout,
    reshape_sizes,
    rows_of_inputs,
    selected_rows,
    slice_bounds,
)

# --- Find attention: softmax over the keys of a product of two computed tensors, then its product with the values -----
# mix = softmax(f(Q K^T)) V          f: masks, position biases, factors that are equal along a row
#
# Source: arXiv 1706.03762, equation 1. The form is MatMul, Softmax, MatMul, as exporters write it; `rows.py` finds the
# linears that compute the three operands.


@dataclass(frozen=True)
class Attention:
    """The three nodes of one attention, and the nodes between the first two.

    `scores` is MatMul(Q, K^T) [..., queries, keys], `softmax` is over its last axis, `mix` is MatMul(softmax, V).
    `between` are the nodes from the scores to the softmax, which are the only readers of their values. A number added
    to a whole row of the scores stays one through all of them, so it does not change the softmax.
    """

    scores: ir.Node
    between: tuple[ir.Node, ...]
    softmax: ir.Node
    mix: ir.Node

    @property
    def query(self) -> ir.Value:
        return _input(self.scores, 0)

    @property
    def key(self) -> ir.Value:
        """K^T: [..., channels, keys]."""
        return _input(self.scores, 1)

    @property
    def value(self) -> ir.Value:
        return _input(self.mix, 1)


def find_attentions(model: ir.Model) -> list[Attention]:
    """All attentions of the main graph, in graph order."""
    found = []
    for node in model.graph:
        if node.op_type == "Softmax" and over_last_axis(node):
            way = _to_scores(_input(node, 0))
            mixes = [use.node for use in node.outputs[0].uses() if use.node.op_type == "MatMul" and use.idx == 0]
            if way is not None and len(mixes) == 1:
                found.append(Attention(way[0], tuple(way[1:]), node, mixes[0]))
    return found


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def over_last_axis(node: ir.Node) -> bool:
    """Whether a Softmax runs over the last axis of its input."""
    axis, shape = node.attributes.get_int("axis", -1), node.outputs[0].shape or _input(node, 0).shape
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


def _to_scores(value: ir.Value) -> list[ir.Node] | None:
    """The nodes from MatMul(Q, K^T) to `value`, in graph order; None if no such path exists."""
    node = value.producer()
    if node is None or values.only_user(value) is None:
        return None
    if node.op_type == "MatMul":
        return [node] if values.floats_of(node.inputs[1]) is None else None
    for operand in _row_operands(node):
        way = _to_scores(operand)
        if way is not None:
            return [*way, node]
    return None


def _row_operands(node: ir.Node) -> list[ir.Value]:
    """The inputs for which adding a number to a row adds a number to that row of the output."""
    inputs = [value for value in node.inputs if value is not None]
    if node.op_type == "Add":
        return [value for value in inputs if values.floats_of(value) is None]
    if node.op_type in ("Mul", "Div"):
        [left, right] = inputs
        if _equal_along_rows(right):
            return [left]
        return [right] if node.op_type == "Mul" and _equal_along_rows(left) else []
    if node.op_type == "Where":
        [_, kept, other] = inputs
        return [kept] if _minus_infinity(other) else [other] if _minus_infinity(kept) else []
    if node.op_type == "Reshape":
        [before, _] = inputs
        sizes, shape = reshape_sizes(node), before.shape
        return [before] if sizes and shape is not None and isinstance(shape[-1], int) and sizes[-1] == shape[-1] else []
    return []


def _minus_infinity(value: ir.Value) -> bool:
    """Whether a mask sets scores to minus infinity; a finite value would not follow a shift of its row."""
    array = values.floats_of(value)
    return array is not None and bool(np.isneginf(array).all())


def _equal_along_rows(value: ir.Value) -> bool:
    array = values.floats_of(value)
    return array is not None and (array.ndim == 0 or array.shape[-1] == 1)


# --- The attention weights of a graph ---------------------------------------------------------------------------------
# Their sizes, and the ones that attention maps are made from.


@dataclass(frozen=True)
class Weights:
    """The weights softmax(Q K^T) of one attention: `queries` rows over `keys` columns, for each head.

    windowed: the leading axis holds more than the batch and the heads, so each row sees only some of the keys.
    learned: the queries are parameters, the same for every image (attention pooling, or object queries).
    """

    attention: Attention
    queries: int
    keys: int
    windowed: bool
    learned: bool

    @property
    def name(self) -> str:
        """The module path from the exporter."""
        return str(self.attention.softmax.name).removesuffix("/Softmax")


def find_weights(model: ir.Model) -> list[Weights]:
    """The weights of all attentions with known sizes, in graph order. `model` must be in canonical form."""
    found = []
    batch = model.graph.inputs[0].shape[0] if model.graph.inputs and model.graph.inputs[0].shape else None
    for attention in find_attentions(model):
        shape = attention.softmax.outputs[0].shape
        if shape is None or len(shape) < 3:
            continue
        queries, keys = shape[-2:]
        if not isinstance(queries, int) or not isinstance(keys, int):
            continue
        # [batch, heads, queries, keys], or batch and heads in one axis; windows multiply the first axis.
        windowed = len(shape) > 4 or (len(shape) == 4 and shape[0] != batch)
        learned = next(values.ancestors(attention.query, past_sizes=False), None) is None
        found.append(Weights(attention, queries, keys, windowed, learned))
    return found


def patch_grid(weights: Weights) -> tuple[int, int] | None:
    """(rows, columns) of the patches behind the keys: the output size of the nearest convolution above them."""
    for node in values.ancestors(weights.attention.key):
        shape = node.outputs[0].shape if node.op_type == "Conv" else None
        if shape is not None and len(shape) == 4:
            rows, columns = shape[2], shape[3]
            return (rows, columns) if isinstance(rows, int) and isinstance(columns, int) else None
    return None


def tokens_read(model: ir.Model, weights: Weights, first: int) -> tuple[int, ...]:
    """The tokens among the `first` that are selected individually after an attention: class or distillation token.

    () if all tokens are used alike, as in average pooling.
    """
    nodes = list(model.graph)
    rows: set[int] = set()
    for node in nodes[nodes.index(weights.attention.mix) :]:
        read = selected_rows(node) if node.op_type in ("Gather", "Slice") else None
        if (
            read is not None
            and (read.axis, read.size) == (1, weights.queries)
            and max(read.rows, default=first) < first
        ):
            rows |= set(read.rows)
    return tuple(sorted(rows))


@dataclass(frozen=True)
class AttentionViews:
    """The attentions that maps are made from. The maps show the rows `rows` of the last one.

    grid: (rows, columns) of patches; prefix: the number of tokens before them. reader: a description of the rows.
    """

    blocks: tuple[Weights, ...]
    grid: tuple[int, int]
    prefix: int
    rows: tuple[int, ...]
    reader: str

    @property
    def last(self) -> Weights:
        return self.blocks[-1]


def token_views(model: ir.Model, name: str) -> AttentionViews:
    """The blocks of a model whose tokens are patches, after a few others (class, distillation, registers).

    Args:
        model: a graph in canonical form. name: the bundle's name, for errors.

    Raises:
        GraphError: no attention over one grid of patches: none at all, inside windows, or over changing tokens.
    """
    found = find_weights(model)
    grid = patch_grid(found[0]) if found else None
    if not found or grid is None:
        raise GraphError(
            f"{name} has no attention over patches of the image",
            found="no patch embedding by a convolution" if found else "no attention (Softmax between two MatMul)",
            expected="a Vision Transformer",
        )
    *before, last = found
    tokens, patches = last.keys, grid[0] * grid[1]
    small = [weights for weights in found if weights.windowed or found[0].keys < patches]
    if small:
        raise GraphError(
            f"{name} attends inside windows, so no token's attention covers the image",
            found=f"{small[0].name}: rows of {small[0].keys} tokens, for {grid[0]}x{grid[1]} patches",
            expected="attention of every token to all patches, as in ViT, DeiT, DINOv2, CLIP or DETR",
            fix="for Swin and similar models, use occlusion or gradients on the PyTorch model",
        )
    if any(each.keys != tokens or (each is not last and each.queries != tokens) for each in found):
        sizes = ", ".join(f"{each.queries}x{each.keys}" for each in found)
        raise GraphError(
            f"the blocks of {name} attend over different tokens, so they have no common map",
            found=f"queries x keys: {sizes}",
            expected="the same tokens in every block",
            fix="explain a bundle built without optimize.token_merging" if tokens < found[0].keys else "",
        )
    prefix = tokens - patches
    rows, reader = _rows_of_interest(model, last, prefix)
    return AttentionViews((*before, last), grid, prefix, rows, reader)


def _rows_of_interest(model: ir.Model, last: Weights, prefix: int) -> tuple[tuple[int, ...], str]:
    """The queries whose attention determines the answer; the remaining rows if `optimize` removed some."""
    if last.learned:
        return tuple(range(last.queries)), "last attention, read by the pooling query"
    rows = tuple(range(last.queries)) if last.queries < last.keys else tokens_read(model, last, prefix)
    if rows:
        return rows, "last attention, read by the class token" if len(
            rows
        ) == 1 else f"last attention, read by {len(rows)} tokens"
    return tuple(range(prefix, last.keys)), "last attention, read by all patches"


def object_views(model: ir.Model, name: str) -> AttentionViews:
    """The last attention from a decoder's object queries (arXiv 2005.12872) to the features of the image.

    Raises:
        GraphError: the object queries attend to sampled points, or do not attend to the image.
    """
    boxes = next((tensor for tensor in model.graph.outputs if tensor.name == "boxes"), None)
    queries = boxes.shape[1] if boxes is not None and boxes.shape is not None else None
    for weights in reversed(find_weights(model)):
        grid = patch_grid(weights)
        if (
            grid is not None
            and not weights.windowed
            and (weights.queries, weights.keys) == (queries, grid[0] * grid[1])
        ):
            return AttentionViews(
                (weights,), grid, 0, tuple(range(weights.queries)), "the decoder's last attention to the image"
            )
    raise GraphError(
        f"the decoder of {name} has no attention over the whole image",
        found="no Softmax over all positions for each object query (deformable attention samples points)",
        expected="cross-attention as in DETR",
    )


# --- The tokens of a Vision Transformer's graph -----------------------------------------------------------------------
# Their number, the tokens before the patches, and the tensors computed from them.
#
# Read-only. A token axis is followed forwards through operations that work on each row alone (`rows.py`), through
# attention, which reads tokens as queries, keys and values, and to selections of the tokens before the patches, where
# it ends. Every other operation depends on the number of tokens.


Mask = npt.NDArray[np.bool_]
# Axes of the residual stream [batch, tokens, channels] and of attention weights [batch, heads, queries, keys].
TOKENS, KEYS = 1, 3


@dataclass(frozen=True)
class MergePoints:
    """The points where tokens can be merged. The model has `count` tokens, of which the first `prefix` (class,
    distillation, registers) are not patches. `points`: by block, from 0, the residual stream [batch, tokens, channels]
    between attention and MLP."""

    count: int
    prefix: int
    points: dict[int, ir.Value]


@dataclass(frozen=True)
class TokenFlow:
    """The token axes of every tensor with data per token, and the attentions to these tokens."""

    axes: dict[ir.Value, set[int]]
    attentions: list[Attention]


class Stopped(Exception):
    """A token axis or the residual stream cannot be followed; the message names the node that prevents it."""


def merge_points(model: ir.Model) -> MergePoints:
    """Find the points where tokens can be merged, in a graph in canonical form.

    Raises:
        GraphError: no such point: no self-attention over all tokens, the number of tokens already changes, or an
            output or operation depends on every token.
    """
    attentions = find_attentions(model)
    streams = {block: (each, residual(each)) for block, each in enumerate(attentions)}
    found = {i: (each, *stream) for i, (each, stream) in streams.items() if stream is not None}
    counts = dict.fromkeys(values.dim(each.softmax.outputs[0], -1) for each in attentions)
    if not found or len(counts) > 1:
        over = f"attention to {' and '.join(map(str, counts))} tokens" if counts else "no attention"
        raise _refused(over, "self-attention over the same tokens in every block")
    _, before, after = next(iter(found.values()))
    count = values.dim(after, TOKENS)
    assert count is not None
    of_image = _of_image(before, TOKENS, count)
    prefix = int(of_image.argmax())
    if not of_image[prefix:].all():
        raise _refused("tokens that are not patches after or between the patches", "these before the patches only")
    points, reason = {}, ""
    for block, (attention, before, after) in found.items():
        try:
            flow = follow(model, before, prefix)
        except Stopped as stop:
            reason = reason or str(stop)
        else:
            if attention in flow.attentions and flow.axes.get(after) == {TOKENS}:
                points[block] = after
    if not points:
        raise _refused(reason, "tokens read only by attention, row-wise operations and the selection of a class token")
    return MergePoints(count, prefix, points)


def follow(model: ir.Model, stream: ir.Value, prefix: int) -> TokenFlow:
    """Return the flow of the tokens of `stream`, [batch, tokens, channels], through the graph.

    Raises:
        Stopped: the tokens cannot be followed to the end.
    """
    flow, attentions = TokenFlow({stream: {TOKENS}}, []), find_attentions(model)
    by_node = {node: each for each in attentions for node in (each.scores, each.softmax, each.mix)}
    size = values.dim(stream, TOKENS)
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
            raise Stopped(f"the output {value.name}, which has data of every token")
    return flow


def _behind(
    node: ir.Node, index: int, axis: int, size: int, prefix: int, flow: TokenFlow, attention: Attention | None
) -> int | None:
    """The token axis of the outputs if one input has the tokens along `axis`; None if the tokens end here."""
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
        rows = rows_of_inputs(node, out, size) if values.dim(node.outputs[0], out) == size else None
        if rows is not None and rows.get(index) == axis:
            for i, own in rows.items():
                other = node.inputs[i]
                if other is not None and own not in flow.axes.get(other, ()):
                    raise Stopped(f"{node.name}, whose operand {other.name} has a value for every token")
            return out
    raise Stopped(f"{node.name} ({node.op_type}), which depends on every token")


def _keys(node: ir.Node) -> int:
    if len(node.outputs[0].shape or ()) != KEYS + 1:
        raise Stopped(f"{node.name}, which has batch and heads in one axis")
    return KEYS


def reads_first(node: ir.Node, axis: int, count: int) -> bool:
    """Whether a node selects some of the first `count` rows of its first input along `axis`, by indices that do not
    depend on the number of later rows."""
    selected = selected_rows(node)
    if selected is None or selected.axis != axis or not all(row < count for row in selected.rows):
        return False
    if node.op_type == "Slice":
        return all(0 <= end <= count for _, cut in slice_bounds(node) or () for end in (cut.start, cut.stop))
    return node.op_type == "Gather" and min(values.integers_of(node.inputs[1]) or [0]) >= 0


def residual(attention: Attention) -> tuple[ir.Value, ir.Value] | None:
    """(before, after): the operands [batch, tokens, channels] of the sum that adds the result of self-attention."""
    weights = attention.softmax.outputs[0]
    count, value = values.dim(weights, -1), attention.mix.outputs[0]
    if count is None or values.dim(weights, -2) != count:
        return None
    while (node := values.only_user(value)) is not None:
        others = [other for other in node.inputs if other is not value and other is not None]
        if node.op_type == "Add" and len(others) == 1 and not values.is_constant(others[0], overridable=True):
            after = node.outputs[0]
            shapes = [list(each.shape or ()) for each in (others[0], after)]
            fits = shapes[0][1:] == shapes[1][1:] and len(shapes[1]) == TOKENS + 2 and shapes[1][TOKENS] == count
            return (others[0], after) if fits else None
        value = node.outputs[0]
    return None


def _of_image(value: ir.Value, axis: int, size: int) -> Mask:
    """Mask [size] of the rows along an axis that depend on the content of a graph input. In a residual stream before
    any attention these are the patches."""
    if not values.depends_on_input(value):
        return np.zeros(size, bool)
    node = value.producer()
    if node is None:
        return np.ones(size, bool)
    if node.op_type == "Concat" and node.attributes.get_int("axis", 0) in (axis, axis - len(value.shape or ())):
        return np.concatenate(
            [_of_image(tensor, axis, values.dim(tensor, axis) or 0) for tensor in node.inputs if tensor is not None]
        )
    pads = values.integers_of(node.inputs[1]) if node.op_type == "Pad" and len(node.inputs) < 4 else None
    if pads is not None and node.inputs[0] is not None:
        before, behind = pads[axis], pads[axis + len(pads) // 2]
        return np.pad(_of_image(node.inputs[0], axis, size - before - behind), (before, behind))
    rows = rows_of_inputs(node, axis, size)
    if rows is None:
        return np.ones(size, bool)
    found = np.zeros(size, bool)
    for i, each in enumerate(node.inputs):
        if each is not None:
            found |= _of_image(each, axis=rows[i], size=size) if i in rows else values.depends_on_input(each)
    return found


def _refused(found: str, expected: str) -> GraphError:
    return GraphError(
        "the tokens of this graph cannot be merged", found=found, expected=expected, fix="omit token merging"
    )


# --- The residual stream of a Transformer: its summands and its readers -----------------------------------------------
# Followed from one tensor of the stream through operations that act alike on any combination of its channels, to its
# writers (linears, convolutions, constants) and its readers (norms, linears).


# In addition to layout operations: linear operators that treat all channels alike.
_LINEAR = ("Add", "Concat", "Expand", "Pad", "ReduceMean", "ReduceSum", "Sub")


@dataclass
class ResidualStream:
    """A residual stream. `axes`: the channel axis of every tensor; `constants`: the constant inputs of nodes with their
    channel axis; `writers` and `readers`: the linears and convolutions, by node, that compute and read such tensors;
    `norms`: the layer normalisations over the channels."""

    width: int
    axes: dict[ir.Value, int]
    constants: dict[tuple[ir.Node, int], int] = field(default_factory=dict)
    writers: set[ir.Node] = field(default_factory=set)
    readers: set[ir.Node] = field(default_factory=set)
    norms: list[ir.Node] = field(default_factory=list)


def find_stream(linears: Sequence[Linear], model: ir.Model) -> ResidualStream | None:
    """The whole residual stream of the blocks with self-attention. None without a stream over a fixed number of
    tokens; if anything except norms and linears reads it (a graph output, a concatenation of channels); or if anything
    except linears, convolutions and constants writes it (norms after the sum, or before the first block)."""
    start = next((found[0] for attention in find_attentions(model) if (found := residual(attention)) is not None), None)
    width = values.dim(start, -1)
    if start is None or width is None:
        return None
    try:
        return _follow(linears, start, width)
    except Stopped:
        return None


def _follow(linears: Sequence[Linear], start: ir.Value, width: int) -> ResidualStream:
    """The stream that the tensor `start` [..., width] belongs to."""
    by_output = {linear.output: linear for linear in linears}
    by_node = {linear.node: linear for linear in linears}
    stream, rest = ResidualStream(width, {}), [(start, len(start.shape or ()) - 1)]
    while rest:
        value, axis = rest.pop()
        if value in stream.axes:
            if stream.axes[value] != axis:
                raise Stopped
            continue
        stream.axes[value] = axis
        if value.is_graph_output():
            raise Stopped
        linear = by_output.get(value)
        rest += _written(stream, value, axis) if linear is None else []
        if linear is not None:
            if axis != (1 if linear.kind == "conv" else last_axis(value)) or linear.groups > 1:
                raise Stopped
            stream.writers.add(linear.node)
        for node, index in value.uses():
            if node.op_type == "LayerNormalization" and index == 0 and axis == last_axis(value):
                stream.norms.append(node)
            elif reads(by_node.get(node), value, axis):
                stream.readers.add(node)
            elif node.op_type != "Shape":
                rest += behind(node, index, axis, width)
    return stream


def _written(stream: ResidualStream, value: ir.Value, axis: int) -> list[tuple[ir.Value, int]]:
    """The tensors, with their channel axes, that an operation computes `value` from; constants go into `stream`."""
    node = value.producer()
    rows = _commutes(node, axis, stream.width) if node is not None else None
    if node is None or rows is None:
        raise Stopped
    operands = [(output, axis) for output in node.outputs]
    for index, own in rows.items():
        operand = node.inputs[index]
        assert operand is not None
        if not values.is_constant(operand, overridable=True):
            operands.append((operand, own))
        elif values.floats_of(operand) is not None and values.dim(operand, own) == stream.width:
            stream.constants[node, index] = own
        else:
            raise Stopped
    return operands


def behind(node: ir.Node, index: int, axis: int, width: int) -> list[tuple[ir.Value, int]]:
    """The outputs, with their channel axes, of a node that acts alike on any combination of one input's channels.

    Raises:
        Stopped: the node does not.
    """
    for out in range(len(node.outputs[0].shape or ())):
        rows = _commutes(node, out, width) if values.dim(node.outputs[0], out) == width else None
        if rows is not None and rows.get(index) == axis:
            return [(output, out) for output in node.outputs]
    raise Stopped


def _commutes(node: ir.Node, axis: int, width: int) -> Rows | None:
    """The channel axes of the inputs if the operation acts alike on any combination of channels; else None."""
    if node.domain or not (is_layout(node) or node.op_type in _LINEAR):
        return None
    if node.op_type == "Expand":
        ranks = [len(value.shape or ()) if value is not None else 0 for value in (node.inputs[0], node.outputs[0])]
        own = axis + ranks[0] - ranks[1]
        return {0: own} if values.dim(node.inputs[0], own) == width and own >= 0 else None
    if node.op_type == "Pad":
        pads = values.integers_of(node.inputs[1]) if len(node.inputs) < 4 else None
        filled = len(node.inputs) > 2 and node.inputs[2] is not None and values.scalar_of(node.inputs[2]) != 0
        inside = pads is not None and pads[axis] == pads[axis + len(pads) // 2] == 0
        return {0: axis} if inside and not filled else None
    rows = rows_of_inputs(node, axis, width)
    broadcast = node.op_type in ("Add", "Sub") and rows is not None and len(rows) < len(node.inputs)
    return None if broadcast else rows


def reads(linear: Linear | None, value: ir.Value, axis: int) -> bool:
    """Whether a linear reads the value and sums over this axis."""
    return linear is not None and linear.kind == "matmul" and linear.input is value and axis == last_axis(value)


def last_axis(value: ir.Value) -> int:
    return len(value.shape or ()) - 1
