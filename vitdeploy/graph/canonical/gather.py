"""Gathers that views say as well: by a grid of indices, and one that puts every element where it was.

The latter is what PyTorch's `as_strided` becomes, in adaptive pooling for one: `as_strided(x, size, stride)` is
exported as x.reshape(-1)[index] with index[i, j, ...] = offset + i s_0 + j s_1 + ..., summed up from Range nodes and
constants. Where the strides are those of a tensor of that size, it is x.reshape(size).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.edit import Names, replace
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.shapes.sizes import Dims, Extent, Unknown, broadcast, product, view_shape
from vitdeploy.graph.values import array_of, is_constant, producer, stem, with_constant

# Nodes between an index and the Range of its outermost axis: one Mul, one Unsqueeze, and an Add for each other axis.
DEPTH = 12


def flatten_gathers(model: ir.Model) -> int:
    """A Gather by a grid of indices, which makes two axes of one, becomes a Gather by a list and a Reshape, in place.

    `unfold` is exported so. OpenVINO 2026.4 moves what scales channels behind a Gather as if it left the number of
    axes, and then refuses its own graph. Returns how many; left alone: constants, indices that are computed, a result
    of unknown sizes.
    """
    grids = [
        node for node in model.graph if node.op_type == "Gather" and node.domain == "" and _indices(node) is not None
    ]
    known = Inference(model) if grids else None
    count = 0
    for node in grids:
        data, indices = node.inputs[0], _indices(node)
        assert known is not None and data is not None and indices is not None
        dims, wanted = known.dims_of(data), known.dims_of(node.outputs[0])
        if is_constant(data) or dims is None or wanted is None:
            continue
        axis = node.attributes.get_int("axis", 0) % len(dims)
        flat = (*dims[:axis], int(indices.size), *dims[axis + 1 :])
        target = view_shape(flat, wanted)
        if target is None:
            continue
        names = Names(model)
        listed = names.constant(indices.reshape(-1), f"{stem(node)}.indices")
        shape = names.constant(np.array(target, np.int64), f"{stem(node)}.shape")
        gather = names.node("Gather", [data, listed], f"{stem(node)}/Gather", {"axis": axis})
        gather.outputs[0].type = node.outputs[0].type
        reshape = names.node("Reshape", [gather.outputs[0], shape], f"{stem(node)}/Reshape")
        known.dims[gather.outputs[0]], known.dims[reshape.outputs[0]] = flat, wanted
        replace(model, node, [gather, reshape])
        count += 1
    if count:
        Inference(model)  # shapes of what is new
    return count


class Grid(NamedTuple):
    """An integer tensor whose entry at [i, j, ...] is offset + i strides[0] + j strides[1] + ...

    The stride of an axis of size 1 is 0.
    """

    dims: Dims
    offset: int
    strides: tuple[int, ...]


def viewed(known: Inference, node: ir.Node) -> tuple[ir.Value, Dims] | None:
    """(x, size) of a Gather that is x.reshape(size); None for any other."""
    data, index = node.inputs
    shape = known.dims_of(data)
    if data is None or shape is None or len(shape) != 1 or isinstance(shape[0], Unknown):
        return None
    grid = _grid(known, index, DEPTH)
    if grid is None or grid.offset or product(grid.dims) != shape[0]:
        return None
    behind: Extent = 1
    for size, stride in zip(reversed(grid.dims), reversed(grid.strides), strict=True):
        if size != 1 and stride != behind:
            return None
        behind = product((size, behind))
    flat = producer(data, "Reshape")
    source = flat.inputs[0] if flat is not None else None
    return (source or data), grid.dims


def _grid(known: Inference, value: ir.Value | None, depth: int) -> Grid | None:
    array = array_of(value)
    if array is not None:
        return _of_constant(array)
    node = value.producer() if value is not None else None
    if node is None or node.domain != "" or depth == 0:
        return None
    if node.op_type == "Range":
        return _of_range(known, node)
    if (found := with_constant(node, "Mul")) is not None and float(found[1]).is_integer():
        grid, factor = _grid(known, found[0], depth - 1), int(found[1])
        return grid and Grid(grid.dims, grid.offset * factor, tuple(stride * factor for stride in grid.strides))
    if node.op_type == "Unsqueeze":
        return _unsqueezed(_grid(known, node.inputs[0], depth - 1), array_of(node.inputs[1]))
    if node.op_type == "Add":
        left, right = (_grid(known, operand, depth - 1) for operand in node.inputs)
        return _sum(left, right) if left is not None and right is not None else None
    return None


def _of_constant(array: np.ndarray) -> Grid | None:
    if array.dtype.kind != "i" or not array.size:
        return None
    offset = int(array.flat[0])
    strides = [int(array.take(1, axis).flat[0]) - offset if size > 1 else 0 for axis, size in enumerate(array.shape)]
    wanted = np.full(array.shape, offset)
    for axis, (stride, size) in enumerate(zip(strides, array.shape, strict=True)):
        wanted += stride * np.arange(size).reshape(-1, *[1] * (array.ndim - 1 - axis))
    return Grid(array.shape, offset, tuple(strides)) if np.array_equal(array, wanted) else None


def _of_range(known: Inference, node: ir.Node) -> Grid | None:
    """0, 1, 2 ... up to a size, which may be a free one."""
    start, limit, step = (known.contents_of(value) for value in node.inputs)
    if any(part is None or part.size != 1 for part in (start, limit, step)):
        return None
    assert start is not None and limit is not None and step is not None
    size = limit.item()
    if start.item() != 0 or step.item() != 1 or isinstance(size, Unknown):
        return None
    return Grid((size,), 0, (0 if size == 1 else 1,))


def _unsqueezed(grid: Grid | None, axes: np.ndarray | None) -> Grid | None:
    if grid is None or axes is None:
        return None
    dims, strides = list(grid.dims), list(grid.strides)
    rank = len(dims) + axes.size
    for axis in sorted(int(axis) % rank for axis in axes.ravel()):
        dims.insert(axis, 1)
        strides.insert(axis, 0)
    return Grid(tuple(dims), grid.offset, tuple(strides))


def _sum(left: Grid, right: Grid) -> Grid | None:
    rank = max(len(left.dims), len(right.dims))
    dims = broadcast(left.dims, right.dims)
    # An axis that is broadcast has stride 0; one that both have must have one size.
    both = [(0,) * (rank - len(grid.dims)) + grid.strides for grid in (left, right)]
    for grid in (left, right):
        own = (1,) * (rank - len(grid.dims)) + tuple(grid.dims)
        if any(size not in (1, whole) for size, whole in zip(own, dims, strict=True)):
            return None
    return Grid(dims, left.offset + right.offset, tuple(a + b for a, b in zip(*both, strict=True)))


def _indices(node: ir.Node) -> np.ndarray | None:
    """The constant indices of several axes."""
    array = array_of(node.inputs[1])
    return array if array is not None and array.ndim > 1 else None
