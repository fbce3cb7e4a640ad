"""Which operators work row by row, and linears among them."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.values import array_of, depends_on_input, dim, floats_of, integers_of, rank_of, with_constant

# --- Track the elements of a tensor: layout operations (Reshape, Transpose, Slice ...) run on element numbers ---------
# Exporters write the way from a linear to the operands of attention in many forms: Reshape-Transpose-Gather, Split,
# Slice and Squeeze, one Transpose or two. None of them computes: they move elements. So instead of a pattern for each
# form, the operations are executed on an array that holds the number of each element; the result says which element of
# the source every element of the operand is, and conditions such as "this operand holds only columns of the key" are
# facts about that array.
#
# A dynamic size (the batch, the length of a sequence) is replaced by a small number, a different one for each axis: the
# constants of the operations fit any size, or the graph would not run at all sizes.


Indices = npt.NDArray[np.int64]

# Operators that give out numbers of their first input, as they are: those that `move` runs, and more, some of which
# repeat numbers.
MOVES = frozenset(
    {"Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)
# What dynamic axes are taken for, in their order.
STAND_INS = (2, 3, 5, 7)


@dataclass(frozen=True)
class Leaf:
    """A tensor that holds elements of one source and nothing else, where layout operations end.

    `source` has the tensor's shape (stand-ins for dynamic sizes) and holds each element's flat index in the source.
    `readers` are the nodes that compute with it, one entry a use; none where it is only an output of the graph.
    """

    value: ir.Value
    source: Indices
    readers: tuple[ir.Node, ...]


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape with stand-ins in the place of dynamic sizes; None if it is unknown."""
    if value is None or value.shape is None:
        return None
    stand_ins, sizes = list(STAND_INS), list(value.shape)
    if sum(not isinstance(size, int) for size in sizes) > len(stand_ins):
        return None
    return tuple(size if isinstance(size, int) else stand_ins.pop(0) for size in sizes)


def move(node: ir.Node, array: npt.NDArray[np.int64]) -> list[Indices] | None:
    """Apply `node` to its first input, an array for each output; None if it computes, or not by constants."""
    try:
        return _MOVES[node.op_type](node, array) if is_layout(node) else None
    except (ValueError, IndexError):  # sizes that do not fit the stand-in for the batch
        return None


def is_layout(node: ir.Node) -> bool:
    """Whether an operation of this kind only moves elements (its parameters may still be computed)."""
    return node.op_type in _MOVES and not node.domain


def scaled_input(node: ir.Node | None) -> tuple[ir.Value, float] | None:
    """(value, factor) of a Mul or Div of a computed tensor by a scalar constant; None for any other node."""
    if (found := with_constant(node, "Mul")) is not None:
        return found if found[1] else None
    if (found := with_constant(node, "Div")) is not None:
        return (found[0], 1 / found[1]) if found[1] else None
    return None


def leaves(
    source: ir.Value, shape: tuple[int, ...] | None = None, *, through_scales: bool = False
) -> list[Leaf] | None:
    """Follow every element of `source` to the tensors that something computes with.

    Args:
        shape: the sizes to take for the source; by default `static_shape`.
        through_scales: also walk through Mul and Div by a scalar, which keep every element in its place.

    Returns: None if the shape of the source is unknown.
    """
    shape = shape or static_shape(source)
    if shape is None:
        return None
    start = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    return list(_walk(source, start, through_scales))


def origin(value: ir.Value, *, through_scales: bool = False) -> ir.Value:
    """Up from `value` through layout operations (and scalar factors) to the first tensor that is computed."""
    while (node := value.producer()) is not None:
        scaled = scaled_input(node) if through_scales else None
        operand = scaled[0] if scaled is not None else node.inputs[0] if is_layout(node) else None
        if operand is None:
            break
        value = operand
    return value


def climb(value: ir.Value, operators: frozenset[str]) -> tuple[ir.Value, list[ir.Node]]:
    """Up from `value` through first inputs of nodes of these operators: where that ends, and the nodes on the way."""
    way: list[ir.Node] = []
    while (node := value.producer()) is not None and not node.domain and node.op_type in operators:
        first = node.inputs[0]
        if first is None:
            break
        way.append(node)
        value = first
    return value, way


def exclusive(found: list[Leaf], value: ir.Value, reader: ir.Node, width: int) -> Indices | None:
    """The columns (index on the source's last axis, of `width`) of each element of `value`, shaped like it.

    None unless `value` is a leaf that `reader` alone reads, once, and no other leaf holds any of its columns: only
    then may those columns of the source be changed for the sake of `reader`.
    """
    mine = [leaf for leaf in found if leaf.value is value and leaf.readers == (reader,)]
    if len(mine) != 1 or value.is_graph_output():
        return None
    columns = mine[0].source % width
    taken = np.zeros(width, bool)
    for leaf in found:
        if leaf is not mine[0]:
            taken[leaf.source % width] = True
    return None if taken[columns].any() else columns


def _walk(value: ir.Value, array: Indices, through_scales: bool) -> Iterator[Leaf]:
    readers = []
    for node, index in value.uses():
        if node.op_type == "Shape":
            continue
        moved = move(node, array) if index == 0 else None
        if moved is None and through_scales and scaled_input(node) is not None:
            moved = [array]
        if moved is None:
            readers.append(node)
        else:
            for output, part in zip(node.outputs, moved, strict=True):
                yield from _walk(output, part, through_scales)
    if readers or value.is_graph_output():
        yield Leaf(value, array, tuple(readers))


def reshape_sizes(node: ir.Node) -> list[int] | None:
    """The constant sizes of a Reshape: -1 infers, 0 copies (unless the attribute allowzero says otherwise)."""
    sizes = integers_of(node.inputs[1])
    if sizes is None or (0 in sizes and node.attributes.get_int("allowzero", 0) != 0):
        return None
    return sizes


def slice_bounds(node: ir.Node) -> list[tuple[int, slice]] | None:
    """(axis, slice) of each axis that a Slice by constants names. Axes may be negative."""
    bounds = [integers_of(value) for value in node.inputs[1:]]
    if len(bounds) < 2 or any(bound is None for bound in bounds):
        return None
    starts, ends = bounds[0] or [], bounds[1] or []
    axes = (bounds[2] if len(bounds) > 2 else None) or list(range(len(starts)))
    steps = (bounds[3] if len(bounds) > 3 else None) or [1] * len(starts)
    return [(axis, slice(*cut)) for axis, *cut in zip(axes, starts, ends, steps, strict=True)]


def split_sizes(node: ir.Node, size: int) -> list[int] | None:
    """The sizes of the outputs of a Split of an axis of `size`."""
    if len(node.inputs) > 1 and node.inputs[1] is not None:
        return integers_of(node.inputs[1])
    count = len(node.outputs)
    part = -(-size // count)
    return [min(part, max(size - part * i, 0)) for i in range(count)]


def _reshape(node: ir.Node, array: Indices) -> list[Indices] | None:
    sizes = reshape_sizes(node)
    if sizes is None:
        return None
    return [array.reshape([array.shape[i] if size == 0 else size for i, size in enumerate(sizes)])]


def _transpose(node: ir.Node, array: Indices) -> list[Indices]:
    return [array.transpose(node.attributes.get_ints("perm", range(array.ndim)[::-1]))]


def _squeeze(node: ir.Node, array: Indices) -> list[Indices] | None:
    axes = integers_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return None if axes is None else [np.squeeze(array, tuple(axes))]


def _unsqueeze(node: ir.Node, array: Indices) -> list[Indices] | None:
    axes = integers_of(node.inputs[1])
    return None if axes is None else [np.expand_dims(array, tuple(axes))]


def _slice(node: ir.Node, array: Indices) -> list[Indices] | None:
    bounds = slice_bounds(node)
    if bounds is None:
        return None
    cuts = [slice(None)] * array.ndim
    for axis, cut in bounds:
        cuts[axis] = cut
    return [array[tuple(cuts)]]


def _gather(node: ir.Node, array: Indices) -> list[Indices] | None:
    indices = array_of(node.inputs[1], overridable=True)
    if indices is None:
        return None
    return [array.take(indices, axis=node.attributes.get_int("axis", 0))]


def _split(node: ir.Node, array: Indices) -> list[Indices] | None:
    axis = node.attributes.get_int("axis", 0)
    sizes = split_sizes(node, array.shape[axis])
    if sizes is None or sum(sizes) != array.shape[axis]:
        return None
    return np.split(array, np.cumsum(sizes)[:-1], axis)


_MOVES = {
    "Reshape": _reshape,
    "Transpose": _transpose,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Slice": _slice,
    "Gather": _gather,
    "Split": _split,
}


# --- Find operations that work on each row of an axis alone -----------------------------------------------------------
# so that rows can be selected before instead of after them.
#
# An operation is row-wise along an axis of its output if every row of that axis depends on one row of some of its
# inputs (where the axis may have another number), and on all of the others.


# Input index -> axis of that input along which the rows lie; inputs that are not named are used whole.
Rows = dict[int, int]

_UNARY = (
    *("Abs", "Cast", "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Mish"),
    *("Neg", "Reciprocal", "Relu", "Sigmoid", "Softplus", "Sqrt", "Tanh"),
)
_BROADCAST = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Where")
_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceL2", "ReduceMax", "ReduceSumSquare")


@dataclass(frozen=True)
class Selected:
    """The rows of a tensor that are read: `rows`, in rising order, along `axis` of `size` rows."""

    axis: int
    size: int
    rows: tuple[int, ...]


def rows_of_inputs(node: ir.Node, axis: int, size: int) -> Rows | None:
    """The inputs whose rows correspond to rows of the outputs along `axis` (not negative, of static `size`).

    None if the operation is not known to be row-wise along that axis.
    """
    rule = _RULES.get(node.op_type) if not node.domain else None
    return rule(node, axis, size) if rule is not None else None


def selected_rows(node: ir.Node) -> Selected | None:
    """The rows of its first input that a Gather, a Slice of one axis or a Split reads, by constants."""
    value = node.inputs[0]
    if value is None or value.shape is None or node.op_type not in ("Gather", "Slice", "Split"):
        return None
    rank = len(value.shape)
    if node.op_type == "Slice":
        bounds = slice_bounds(node)
        if bounds is None or len(bounds) != 1:
            return None
        axis, cut = bounds[0]
    else:
        axis, cut = node.attributes.get_int("axis", 0), slice(None)
    axis %= rank
    size = value.shape[axis]
    if not isinstance(size, int):
        return None
    if node.op_type == "Gather":
        indices = integers_of(node.inputs[1])
        rows = None if indices is None else [index % size for index in indices]
    elif node.op_type == "Slice":
        rows = list(range(size))[cut]
    else:
        rows = [row for output, part in split_rows(node, size) if list(output.uses()) for row in part]
    return None if rows is None else Selected(axis, size, tuple(sorted(set(rows))))


def split_rows(node: ir.Node, size: int) -> list[tuple[ir.Value, list[int]]]:
    sizes = split_sizes(node, size)
    if sizes is None:
        return [(output, list(range(size))) for output in node.outputs]
    ends = np.cumsum(sizes)
    return [(node.outputs[i], list(range(int(end - sizes[i]), int(end)))) for i, end in enumerate(ends)]


def _axis(node: ir.Node, default: int) -> int | None:
    """The attribute `axis`, counted from the front."""
    axis, rank = node.attributes.get_int("axis", default), rank_of(node.inputs[0])
    return axis if axis >= 0 else None if rank is None else axis + rank


def _unary(node: ir.Node, axis: int, size: int) -> Rows | None:
    return {0: axis}


def _broadcast(node: ir.Node, axis: int, size: int) -> Rows | None:
    rank, rows = rank_of(node.outputs[0]), {}
    for i, value in enumerate(node.inputs):
        own = rank_of(value)
        if rank is None or own is None:
            return None
        if (own_axis := axis - (rank - own)) < 0:
            continue
        own_size = dim(value, own_axis)
        if own_size not in (1, size):
            return None
        if own_size == size:
            rows[i] = own_axis
    return rows or None


def _quantized(node: ir.Node, axis: int, size: int) -> Rows | None:
    """One scale for the whole tensor, or one for each place of another axis."""
    scale = node.inputs[1]
    single = scale is not None and scale.const_value is not None and scale.const_value.size == 1
    return {0: axis} if single else _along_another_axis(node, axis, size)


def _normalised_after(node: ir.Node, axis: int, size: int) -> Rows | None:
    first = _axis(node, -1)
    return {0: axis} if first is not None and axis < first else None


def _along_another_axis(node: ir.Node, axis: int, size: int) -> Rows | None:
    defaults = {"Softmax": -1, "LogSoftmax": -1, "QuantizeLinear": 1, "DequantizeLinear": 1}
    own = _axis(node, defaults.get(node.op_type, 0))
    return {0: axis} if own is not None and own != axis else None


def _concat(node: ir.Node, axis: int, size: int) -> Rows | None:
    rows = _along_another_axis(node, axis, size)
    return dict.fromkeys(range(len(node.inputs)), axis) if rows is not None else None


def _matmul(node: ir.Node, axis: int, size: int) -> Rows | None:
    left, right = rank_of(node.inputs[0]), rank_of(node.inputs[1])
    if left is None or right is None or left < 2 or right < 2 or left < right or axis == left - 1:
        return None
    # Rows of the left operand; or its leading axes, which a matrix on the right does not have.
    return {0: axis} if axis == left - 2 or right == 2 else None


def _rowwise_transpose(node: ir.Node, axis: int, size: int) -> Rows | None:
    rank = rank_of(node.inputs[0])
    if rank is None:
        return None
    return {0: int(node.attributes.get_ints("perm", range(rank)[::-1])[axis])}


def _rowwise_reshape(node: ir.Node, axis: int, size: int) -> Rows | None:
    """The same axis of the input: of the same size, with as many elements behind it."""
    rank, out_rank = rank_of(node.inputs[0]), rank_of(node.outputs[0])
    if rank is None or out_rank is None or reshape_sizes(node) is None:
        return None
    behind = _product([dim(node.outputs[0], i) for i in range(axis + 1, out_rank)])
    before = [dim(node.inputs[0], i) for i in range(rank)]
    fits = (own for own in range(rank) if before[own] == size and _product(before[own + 1 :]) == behind)
    own = next(fits, None)
    return {0: own} if behind is not None and own is not None else None


def _rowwise_squeeze(node: ir.Node, axis: int, size: int) -> Rows | None:
    rank, axes = rank_of(node.inputs[0]), integers_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if rank is None or axes is None:
        return None
    return {0: _kept(axes, rank)[axis]}


def _rowwise_unsqueeze(node: ir.Node, axis: int, size: int) -> Rows | None:
    rank, axes = rank_of(node.outputs[0]), integers_of(node.inputs[1])
    if rank is None or axes is None or axis not in (kept := _kept(axes, rank)):
        return None
    return {0: kept.index(axis)}


def _rowwise_slice(node: ir.Node, axis: int, size: int) -> Rows | None:
    bounds, rank = slice_bounds(node), rank_of(node.inputs[0])
    if bounds is None or rank is None or axis in {cut % rank for cut, _ in bounds}:
        return None
    return {0: axis}


def _rowwise_gather(node: ir.Node, axis: int, size: int) -> Rows | None:
    own, added = _axis(node, 0), rank_of(node.inputs[1])
    if own is None or added is None or own <= axis < own + added:
        return None
    return {0: axis if axis < own else axis - added + 1}


def _reduce(node: ir.Node, axis: int, size: int) -> Rows | None:
    rank, axes = rank_of(node.inputs[0]), integers_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if rank is None or not axes:
        return None
    if not node.attributes.get_int("keepdims", 1):
        return {0: _kept(axes, rank)[axis]}
    return {0: axis} if axis not in {own % rank for own in axes} else None


def _kept(axes: Sequence[int], rank: int) -> list[int]:
    return [axis for axis in range(rank) if axis not in {one % rank for one in axes}]


def _product(sizes: Sequence[int | None]) -> int | None:
    product = 1
    for size in sizes:
        if size is None:
            return None
        product *= size
    return product


_RULES: dict[str, Callable[[ir.Node, int, int], Rows | None]] = {
    **dict.fromkeys(_UNARY, _unary),
    **dict.fromkeys(_BROADCAST, _broadcast),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    "LayerNormalization": _normalised_after,
    "Softmax": _along_another_axis,
    "LogSoftmax": _along_another_axis,
    "QuantizeLinear": _quantized,
    "DequantizeLinear": _quantized,
    "Split": _along_another_axis,
    "Concat": _concat,
    "MatMul": _matmul,
    "Transpose": _rowwise_transpose,
    "Reshape": _rowwise_reshape,
    "Squeeze": _rowwise_squeeze,
    "Unsqueeze": _rowwise_unsqueeze,
    "Slice": _rowwise_slice,
    "Gather": _rowwise_gather,
}


# --- Find the layers that quantization is about -----------------------------------------------------------------------
# linears and convolutions with constant weights, and what they are for.


# Operators whose constant inputs of two axes or more are weights.
WEIGHTED = ("Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN")
# What lies between a score and its rank: arithmetic on each score, or other layouts.
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Sigmoid", "Softmax", "LogSoftmax", "ReduceMax", "Max", "Clip", "Cast")
_LAYOUT = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split", "Gather", "Concat", "Identity")
# What lies between an offset or a box and the place that is sampled: also the choice of queries, and a logit.
_PLACING = (*_ARITHMETIC, *_LAYOUT, "Exp", "Expand", "GatherElements", "GatherND", "Log", "Neg", "Tanh", "Where")
# Which input of an operator says where it reads.
PLACES = {"GridSample": 1, "RoiAlign": 1}


@dataclass(frozen=True)
class Linear:
    """One linear (MatMul, with its bias Add where there is one) or one convolution.

    `weight` is [in, out] for "matmul" and [out, in, height, width] for "conv"; `out_axis` is its output-channel axis.
    `bias` is [out], from the Add or from the convolution; None without one.
    """

    name: str
    kind: Literal["matmul", "conv"]
    node: ir.Node
    input: ir.Value
    weight: npt.NDArray[np.float32]
    out_axis: int
    bias: npt.NDArray[np.float32] | None
    bias_add: ir.Node | None

    @property
    def output(self) -> ir.Value:
        return (self.bias_add or self.node).outputs[0]

    @property
    def groups(self) -> int:
        """The number of groups of a convolution; 1 for a linear."""
        return (self.node.attributes.get_int("group", 1) or 1) if self.kind == "conv" else 1

    @property
    def padded(self) -> bool:
        """Whether it is a convolution that reads zeros around its input."""
        attributes = self.node.attributes
        automatic = attributes.get_string("auto_pad", "NOTSET")
        padded = any(attributes.get_ints("pads", ()) or ()) if automatic == "NOTSET" else automatic != "VALID"
        return self.kind == "conv" and padded


def find_linears(model: ir.Model) -> list[Linear]:
    """All linears and convolutions of the main graph, in graph order."""
    found = []
    for node in model.graph:
        if node.op_type == "MatMul":
            weight = floats_of(node.inputs[1])
            if weight is not None and weight.ndim == 2 and node.inputs[0] is not None:
                product, width = node.outputs[0], weight.shape[1]
                bias_add = _bias_add(product, width)
                bias = _bias_of(bias_add, product, width) if bias_add is not None else None
                found.append(Linear(layer_name(node), "matmul", node, node.inputs[0], weight, 1, bias, bias_add))
        elif node.op_type == "Conv":
            weight = floats_of(node.inputs[1])
            if weight is not None and node.inputs[0] is not None and not _computed_bias(node):
                bias = floats_of(node.inputs[2]) if len(node.inputs) > 2 else None
                found.append(Linear(layer_name(node), "conv", node, node.inputs[0], weight, 0, bias, None))
    return found


def unplaced_weights(model: ir.Model) -> dict[str, str]:
    """Nodes that multiply by constant weights but are none of `find_linears`, by name, with the reason: what INT8 does
    not reach. Weights are floats with two axes or more."""
    known = {linear.node for linear in find_linears(model)}
    found = {}
    for node in model.graph.all_nodes():
        if node in known or node.domain != "" or node.op_type not in WEIGHTED:
            continue
        weights = [value for value in node.inputs if value is not None and _is_weight(value)]
        if weights:
            inside = node.graph is not model.graph
            found[layer_name(node)] = "it is in a branch or loop" if inside else _why(node, weights[0])
    return found


def _is_weight(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape) >= 2


def _why(node: ir.Node, weight: ir.Value) -> str:
    tensor = weight.const_value
    assert tensor is not None
    if node.op_type not in ("MatMul", "Conv"):
        return f"{node.op_type} is not quantized"
    if tensor.dtype != ir.DataType.FLOAT:
        return f"its weights are {tensor.dtype.name.lower()}, not float32"
    if node.inputs[1] is not weight:
        return "its weights are multiplied from the left"
    if node.op_type == "Conv" and _computed_bias(node):
        return "its bias is computed"
    return f"its weights have {len(tensor.shape)} axes"


def layer_name(node: ir.Node) -> str:
    """The module path that the exporter gave the node ("blocks.0.attn.qkv/MatMul"), or the node's own, unique name."""
    return str(node.name).removesuffix(f"/{node.op_type}")  # ".../MatMul_1" keeps its number: it tells two apart


def name_apart(model: ir.Model) -> None:
    """Rename nodes, whose names differ already, until their `layer_name` do too: a module may hold a product and a
    convolution, "m/MatMul" and "m/Conv"."""
    nodes = [node for node in model.graph if node.op_type in WEIGHTED]
    names, taken = {str(node.name) for node in model.graph}, set[str]()
    for node in nodes:
        name, count = str(node.name), 1
        while layer_name(node) in taken:
            count += 1
            if f"{name}_{count}" not in names:
                node.name = f"{name}_{count}"
        taken.add(layer_name(node))


def _computed_bias(conv: ir.Node) -> bool:
    return len(conv.inputs) > 2 and conv.inputs[2] is not None and floats_of(conv.inputs[2]) is None


def _bias_add(value: ir.Value, width: int) -> ir.Node | None:
    uses = list(value.uses())
    if value.is_graph_output() or len(uses) != 1 or uses[0].node.op_type != "Add":
        return None
    return uses[0].node if _bias_of(uses[0].node, value, width) is not None else None


def _bias_of(add: ir.Node, product: ir.Value, width: int) -> npt.NDArray[np.float32] | None:
    """Anything but [width] is no bias: more numbers than output channels would make more channels of one."""
    other = add.inputs[1] if add.inputs[0] is product else add.inputs[0]
    bias = floats_of(other)
    return bias if bias is not None and bias.shape == (width,) else None


def count_int8(model: ir.Model) -> int:
    """The number of linears and convolutions that a placement computes in INT8, in any form of placement; the input of
    a linear may be left to the runtime to quantize."""
    fused = sum(node.op_type == "MatMulIntegerToFloat" for node in model.graph)
    explicit = sum(
        (node.op_type == "MatMul" or (node.op_type == "Conv" and is_dequantized(node.inputs[0])))
        and is_dequantized(node.inputs[1])
        and not _is_int4(node.inputs[1])
        for node in model.graph
    )
    return fused + explicit


def count_int4(model: ir.Model) -> int:
    """The number of linears whose weights a placement has in INT4, in either form of placement."""
    explicit = sum(node.op_type == "MatMul" and _is_int4(node.inputs[1]) for node in model.graph)
    return explicit + sum(node.op_type == "MatMulNBits" for node in model.graph)


def _is_int4(value: ir.Value | None) -> bool:
    """Whether a DequantizeLinear makes `value` of constants of int4."""
    producer = value.producer() if value is not None else None
    codes = producer.inputs[0] if producer is not None and producer.op_type == "DequantizeLinear" else None
    return codes is not None and codes.const_value is not None and codes.const_value.dtype == ir.DataType.INT4


def is_dequantized(value: ir.Value | None) -> bool:
    """Whether a DequantizeLinear of any domain computes `value`."""
    producer = value.producer() if value is not None else None
    return producer is not None and producer.op_type == "DequantizeLinear"


def is_ranked(linear: Linear) -> bool:
    """Whether a TopK ranks a layer's output, with only elementwise arithmetic and layout operations in between."""
    return _reaches(linear.output, {"TopK": 0}, _ARITHMETIC + _LAYOUT)


def is_place(linear: Linear) -> bool:
    """Whether a layer's output says where features are sampled: offsets, and the boxes that become reference points."""
    return _reaches(linear.output, PLACES, _PLACING)


def _reaches(value: ir.Value, inputs: Mapping[str, int], through: Collection[str]) -> bool:
    """Whether `value` is that input of one of these operators, with only operators of `through` in between."""
    seen, waiting = set[ir.Node](), [value]
    while waiting:
        for node, index in waiting.pop().uses():
            if inputs.get(node.op_type) == index:
                return True
            if node.op_type in through and node not in seen:
                seen.add(node)
                waiting += node.outputs
    return False


def reads_image(linear: Linear) -> bool:
    """Whether a layer's input depends on the image: learned queries do not until they attend to it."""
    return depends_on_input(linear.input)
