"""Find operations that work on each row of an axis alone, so that rows can be selected before instead of after them.

An operation is row-wise along an axis of its output if every row of that axis depends on one row of some of its inputs
(where the axis may have another number), and on all of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.analysis.layout import reshape_sizes, slice_bounds, split_sizes
from vitdeploy.graph.values import dim, integers_of, rank_of

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


def _transpose(node: ir.Node, axis: int, size: int) -> Rows | None:
    rank = rank_of(node.inputs[0])
    if rank is None:
        return None
    return {0: int(node.attributes.get_ints("perm", range(rank)[::-1])[axis])}


def _reshape(node: ir.Node, axis: int, size: int) -> Rows | None:
    """The same axis of the input: of the same size, with as many elements behind it."""
    rank, out_rank = rank_of(node.inputs[0]), rank_of(node.outputs[0])
    if rank is None or out_rank is None or reshape_sizes(node) is None:
        return None
    behind = _product([dim(node.outputs[0], i) for i in range(axis + 1, out_rank)])
    before = [dim(node.inputs[0], i) for i in range(rank)]
    fits = (own for own in range(rank) if before[own] == size and _product(before[own + 1 :]) == behind)
    own = next(fits, None)
    return {0: own} if behind is not None and own is not None else None


def _squeeze(node: ir.Node, axis: int, size: int) -> Rows | None:
    rank, axes = rank_of(node.inputs[0]), integers_of(node.inputs[1]) if len(node.inputs) > 1 else None
    if rank is None or axes is None:
        return None
    return {0: _kept(axes, rank)[axis]}


def _unsqueeze(node: ir.Node, axis: int, size: int) -> Rows | None:
    rank, axes = rank_of(node.outputs[0]), integers_of(node.inputs[1])
    if rank is None or axes is None or axis not in (kept := _kept(axes, rank)):
        return None
    return {0: kept.index(axis)}


def _slice(node: ir.Node, axis: int, size: int) -> Rows | None:
    bounds, rank = slice_bounds(node), rank_of(node.inputs[0])
    if bounds is None or rank is None or axis in {cut % rank for cut, _ in bounds}:
        return None
    return {0: axis}


def _gather(node: ir.Node, axis: int, size: int) -> Rows | None:
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
    "Transpose": _transpose,
    "Reshape": _reshape,
    "Squeeze": _squeeze,
    "Unsqueeze": _unsqueeze,
    "Slice": _slice,
    "Gather": _gather,
}
