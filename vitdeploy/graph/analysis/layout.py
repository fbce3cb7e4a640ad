"""Track the elements of a tensor: layout operations (Reshape, Transpose, Slice ...) run on element numbers.

Exporters write the way from a linear to the operands of attention in many forms: Reshape-Transpose-Gather, Split, Slice
and Squeeze, one Transpose or two. None of them computes: they move elements. So instead of a pattern for each form,
the operations are executed on an array that holds the number of each element; the result says which element of the
source every element of the operand is, and conditions such as "this operand holds only columns of the key" are facts
about that array.

A dynamic size (the batch, the length of a sequence) is replaced by a small number, a different one for each axis: the
constants of the operations fit any size, or the graph would not run at all sizes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.values import array_of, integers_of, with_constant

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
