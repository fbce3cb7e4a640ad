"""Follow elements and rows through a graph, and find its linears."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.values import array_of, depends_on_input, dim, floats_of, integers_of, rank_of, with_constant

# --- Track the elements of a tensor: layout operations (Reshape, Transpose, Slice ...) run on element numbers ---------
# Exporters write the path from a linear to the operands of attention in many forms: Reshape-Transpose-Gather, Split,
# Slice and Squeeze, one Transpose or two. None of them computes; they only move elements. So instead of matching a
# pattern for each form, we run the operations on an array of element numbers. The result gives the source element of
# every element of the operand, and conditions such as "this operand holds only columns of the key" become facts about
# that array.
#
# A dynamic size (the batch, the length of a sequence) is replaced by a small number, a different one for each axis: the
# constants of the operations fit any size, since the graph runs at all sizes.


Indices = npt.NDArray[np.int64]

# Operators that return elements of their first input unchanged: those that `move` runs, and others, some of which
# repeat elements.
MOVES = frozenset(
    {"Expand", "Flatten", "Gather", "Identity", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"}
)
# Stand-in sizes for dynamic axes, in order.
STAND_INS = (2, 3, 5, 7)


@dataclass(frozen=True)
class Leaf:
    """A tensor at the end of layout operations that holds only elements of one source.

    `source` has the tensor's shape (stand-ins for dynamic sizes) and holds each element's flat index in the source.
    `readers` are the nodes that compute with it, one entry per use; empty if it is only an output of the graph.
    """

    value: ir.Value
    source: Indices
    readers: tuple[ir.Node, ...]


def static_shape(value: ir.Value | None) -> tuple[int, ...] | None:
    """The shape with stand-ins for dynamic sizes; None if it is unknown."""
    if value is None or value.shape is None:
        return None
    stand_ins, sizes = list(STAND_INS), list(value.shape)
    if sum(not isinstance(size, int) for size in sizes) > len(stand_ins):
        return None
    return tuple(size if isinstance(size, int) else stand_ins.pop(0) for size in sizes)


def move(node: ir.Node, array: npt.NDArray[np.int64]) -> list[Indices] | None:
    """Apply `node` to its first input; return an array per output. None if the node computes, or its parameters are not
    constant."""
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
    """Follow every element of `source` through layout operations to the tensors that other nodes read.

    Args:
        shape: the sizes to assume for the source; by default `static_shape`.
        through_scales: also follow Mul and Div by a scalar, which keep every element in its place.

    Returns: the leaves; None if the shape of the source is unknown.
    """
    shape = shape or static_shape(source)
    if shape is None:
        return None
    start = np.arange(int(np.prod(shape)), dtype=np.int64).reshape(shape)
    return list(_walk(source, start, through_scales))


def origin(value: ir.Value, *, through_scales: bool = False) -> ir.Value:
    """Follow `value` upwards through layout operations (and scalar factors) to the first computed tensor."""
    while (node := value.producer()) is not None:
        scaled = scaled_input(node) if through_scales else None
        operand = scaled[0] if scaled is not None else node.inputs[0] if is_layout(node) else None
        if operand is None:
            break
        value = operand
    return value


def climb(value: ir.Value, operators: frozenset[str]) -> tuple[ir.Value, list[ir.Node]]:
    """Follow `value` upwards through the first inputs of these operators; return the tensor reached and the nodes
    passed."""
    way: list[ir.Node] = []
    while (node := value.producer()) is not None and not node.domain and node.op_type in operators:
        first = node.inputs[0]
        if first is None:
            break
        way.append(node)
        value = first
    return value, way


def exclusive(found: list[Leaf], value: ir.Value, reader: ir.Node, width: int) -> Indices | None:
    """The column (index on the source's last axis, of `width`) of each element of `value`, in its shape.

    None unless `value` is a leaf that only `reader` reads, once, and no other leaf holds any of its columns: only then
    may those columns of the source be changed for `reader`.
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
    """The constant sizes of a Reshape: -1 infers, 0 copies; None if they are computed, or allowzero changes a 0."""
    sizes = integers_of(node.inputs[1])
    if sizes is None or (0 in sizes and node.attributes.get_int("allowzero", 0) != 0):
        return None
    return sizes


def slice_bounds(node: ir.Node) -> list[tuple[int, slice]] | None:
    """(axis, slice) for each axis of a Slice with constant bounds; else None. Axes may be negative."""
    bounds = [integers_of(value) for value in node.inputs[1:]]
    if len(bounds) < 2 or any(bound is None for bound in bounds):
        return None
    starts, ends = bounds[0] or [], bounds[1] or []
    axes = (bounds[2] if len(bounds) > 2 else None) or list(range(len(starts)))
    steps = (bounds[3] if len(bounds) > 3 else None) or [1] * len(starts)
    return [(axis, slice(*cut)) for axis, *cut in zip(axes, starts, ends, steps, strict=True)]


def split_sizes(node: ir.Node, size: int) -> list[int] | None:
    """The sizes of the outputs of a Split along an axis of `size`."""
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
# Rows can then be selected before such operations instead of after them.
#
# An operation is row-wise along an axis of its output if every row of that axis depends on one row of some of its
# inputs (where the axis may have another index), and on all rows of the others.


# Input index -> axis of that input with the rows; inputs that are not listed are used whole.
Rows = dict[int, int]

_UNARY = (
    *("Abs", "Cast", "Clip", "Elu", "Erf", "Exp", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Log", "Mish"),
    *("Neg", "Reciprocal", "Relu", "Sigmoid", "Softplus", "Sqrt", "Tanh"),
)
_BROADCAST = ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "Where")
_REDUCTIONS = ("ReduceMean", "ReduceSum", "ReduceL2", "ReduceMax", "ReduceSumSquare")


@dataclass(frozen=True)
class Selected:
    """The rows of a tensor that are read: `rows`, in ascending order, along `axis` of `size` rows."""

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
    """The rows of its first input that a Gather, a Slice along one axis or a Split reads; None if they are not
    constant."""
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
    """Quantization with one scale for the whole tensor, or one for each position of another axis."""
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
    # Rows of the left operand, or its leading axes if the right operand is a matrix without them.
    return {0: axis} if axis == left - 2 or right == 2 else None


def _rowwise_transpose(node: ir.Node, axis: int, size: int) -> Rows | None:
    rank = rank_of(node.inputs[0])
    if rank is None:
        return None
    return {0: int(node.attributes.get_ints("perm", range(rank)[::-1])[axis])}


def _rowwise_reshape(node: ir.Node, axis: int, size: int) -> Rows | None:
    """The corresponding axis of the input: the same size, with the same number of elements after it."""
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
    **dict.fromkeys(_UNARY, lambda node, axis, size: {0: axis}),
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


# --- Find the layers to quantize --------------------------------------------------------------------------------------
# Linears and convolutions with constant weights, and the use of their outputs.


# Operators whose constant inputs with two or more axes are weights.
WEIGHTED = ("Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN")
# Operators between a score and its rank: arithmetic on each score, and layout operations.
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Sigmoid", "Softmax", "LogSoftmax", "ReduceMax", "Max", "Clip", "Cast")
_LAYOUT = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split", "Gather", "Concat", "Identity")
# Operators between an offset or a box and the sampled position: also the selection of queries, and a logit.
_PLACING = (*_ARITHMETIC, *_LAYOUT, "Exp", "Expand", "GatherElements", "GatherND", "Log", "Neg", "Tanh", "Where")
# The input of an operator that holds the positions it samples.
PLACES = {"GridSample": 1, "RoiAlign": 1}


@dataclass(frozen=True)
class Linear:
    """One linear (a MatMul, with the Add of its bias if it has one) or one convolution.

    `weight` is [in, out] for "matmul" and [out, in, height, width] for "conv"; `out_axis` is its output-channel axis.
    `bias` is [out], from the Add or from the convolution; None without a bias.
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
        """Whether it is a convolution with zero padding."""
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
    """The nodes with constant weights that cannot be quantized to INT8 (not in `find_linears`), by name, with the
    reason. Weights are floats with two or more axes."""
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
        return "its weights are the left operand"
    if node.op_type == "Conv" and _computed_bias(node):
        return "its bias is not constant"
    return f"its weights have {len(tensor.shape)} axes"


def layer_name(node: ir.Node) -> str:
    """The module path of the node from the exporter ("blocks.0.attn.qkv/MatMul"), or the node's unique name."""
    return str(node.name).removesuffix(f"/{node.op_type}")  # ".../MatMul_1" keeps its number, which makes it unique


def name_apart(model: ir.Model) -> None:
    """Rename nodes so that their `layer_name`s are unique too, in place: a module may hold a product and a convolution,
    "m/MatMul" and "m/Conv"."""
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
    """The bias [width] that an Add adds; None for any other shape, which would broadcast to more channels."""
    other = add.inputs[1] if add.inputs[0] is product else add.inputs[0]
    bias = floats_of(other)
    return bias if bias is not None and bias.shape == (width,) else None


def count_int8(model: ir.Model) -> int:
    """The number of linears and convolutions that a placement computes in INT8, in any form of placement; the runtime
    may quantize the input of a linear."""
    fused = sum(node.op_type == "MatMulIntegerToFloat" for node in model.graph)
    explicit = sum(
        (node.op_type == "MatMul" or (node.op_type == "Conv" and is_dequantized(node.inputs[0])))
        and is_dequantized(node.inputs[1])
        and not _is_int4(node.inputs[1])
        for node in model.graph
    )
    return fused + explicit


def count_int4(model: ir.Model) -> int:
    """The number of linears with INT4 weights in a placement, in either form of placement."""
    explicit = sum(node.op_type == "MatMul" and _is_int4(node.inputs[1]) for node in model.graph)
    return explicit + sum(node.op_type == "MatMulNBits" for node in model.graph)


def _is_int4(value: ir.Value | None) -> bool:
    """Whether a DequantizeLinear computes `value` from int4 constants."""
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
    """Whether a layer's output gives sampling positions: offsets, or boxes that become reference points."""
    return _reaches(linear.output, PLACES, _PLACING)


def _reaches(value: ir.Value, inputs: Mapping[str, int], through: Collection[str]) -> bool:
    """Whether `value` reaches the given input of one of these operators through operators of `through` only."""
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
    """Whether a layer's input depends on the image: learned queries do so only after they attend to it."""
    return depends_on_input(linear.input)
