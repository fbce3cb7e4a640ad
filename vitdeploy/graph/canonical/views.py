"""Views that stand where the canonical form has none: between a product and its bias, and around a product.

Keras' layers write a product on rows of a matrix, [batch tokens, in], or on heads, and add the bias behind the Reshape
that follows; converters of Einsum to MatMul give the product one batch axis, of all that it had. Numbers stay the same,
bit by bit: only views and where the bias is added change.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.edit import Names, bypass, replace
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.shapes.sizes import Dims, Extent, Unknown, view_shape
from vitdeploy.graph.values import array_of, floats_of, only_user, operands, producer, stem

KEY = [0, 2, 1]


def settle_views(model: ir.Model) -> int:
    """Rewrite all three constructs, in place. Returns how many."""
    nodes = list(model.graph)
    if not any(node.op_type == "MatMul" for node in nodes):
        return 0
    known, count = Inference(model), 0
    for node in nodes:
        if node.op_type == "Add" and node.graph is not None:
            count += _bias_before_view(model, known, node)
    for node in nodes:
        if node.op_type in ("Reshape", "Squeeze") and node.graph is not None:
            count += _product_of_heads(model, known, node)
    for node in nodes:
        if node.op_type == "Reshape" and node.graph is not None:
            count += _rows_kept(known, node)
    if count:
        Inference(model)  # shapes of what is new
    return count


def _bias_before_view(model: ir.Model, known: Inference, add: ir.Node) -> bool:
    """Reshape(x W) + b becomes Reshape(x W + b), where the last axes are those of W's output and b is theirs alone."""
    pair = operands(add, "Add")
    for view, constant in (pair, pair[::-1]) if pair is not None else ():
        reshape, bias = producer(view, "Reshape"), floats_of(constant)
        product = producer(reshape.inputs[0], "MatMul") if reshape is not None else None
        if reshape is None or product is None or bias is None or only_user(view) is not add:
            continue
        weight, dims = floats_of(product.inputs[1]), known.dims_of(view)
        if weight is None or weight.ndim != 2 or dims is None or only_user(product.outputs[0]) is not reshape:
            continue
        vector = _vector(bias, dims, weight.shape[1])
        if vector is None or known.dims_of(add.outputs[0]) != dims:
            continue
        names = Names(model)
        summed = names.node(
            "Add", [product.outputs[0], names.constant(vector, f"{stem(product)}.bias")], f"{stem(product)}/Add_bias"
        )
        summed.outputs[0].type, summed.outputs[0].shape = view.type, product.outputs[0].shape
        before = known.dims_of(product.outputs[0])
        if before is not None:
            known.dims[summed.outputs[0]] = before
        model.graph.insert_after(product, summed)
        reshape.replace_input_with(0, summed.outputs[0])
        return bypass(add, view)
    return False


def _vector(bias: np.ndarray, dims: Dims, width: int) -> np.ndarray | None:
    """[width] of a bias on the last axes of a tensor of `dims`, which together are `width`; None if it is none."""
    axes, size = 0, 1
    while size < width and axes < len(dims):
        axes += 1
        last = dims[-axes]
        if not isinstance(last, int):
            return None
        size *= last
    if size != width or bias.ndim > len(dims) or any(side != 1 for side in bias.shape[: max(bias.ndim - axes, 0)]):
        return None
    own = bias.reshape(bias.shape[max(bias.ndim - axes, 0) :])
    sides = tuple(side for side in dims[len(dims) - axes :] if isinstance(side, int))
    return np.ascontiguousarray(np.broadcast_to(own, sides or (1,)).reshape(-1))


class _Operand(NamedTuple):
    """An operand [batch heads, rows, columns] of a product as Transpose(source, perm) [batch, heads, rows, columns]."""

    source: ir.Value
    perm: list[int]
    dims: Dims


def _product_of_heads(model: ir.Model, known: Inference, last: ir.Node) -> bool:
    """Reshape(MatMul(Reshape(a), Reshape(b))) with two batch axes before and behind: the product of four axes."""
    inner = last
    if last.op_type == "Squeeze":
        found = producer(last.inputs[0], "Reshape")
        if found is None or only_user(found.outputs[0]) is not last:
            return False
        inner = found
    product = producer(inner.inputs[0], "MatMul")
    if product is None or only_user(product.outputs[0]) is not inner:
        return False
    left, right = (_operand(known, value) for value in product.inputs)
    if left is None or right is None or left.dims[:2] != right.dims[:2]:
        return False
    if known.dims_of(last.outputs[0]) != (*left.dims[:3], right.dims[3]) or left.dims[3] != right.dims[2]:
        return False
    names, nodes, values = Names(model), [], []
    for operand, role in ((left, "left"), (right, "right")):
        value = operand.source
        if operand.perm != sorted(operand.perm):
            node = names.node("Transpose", [value], f"{stem(product)}/Transpose_{role}", {"perm": operand.perm})
            node.outputs[0].type = value.type
            known.dims[node.outputs[0]] = operand.dims
            nodes.append(node)
            value = node.outputs[0]
        values.append(value)
    new = names.node("MatMul", values, f"{stem(product)}/MatMul_heads")
    known.dims[new.outputs[0]] = (*left.dims[:3], right.dims[3])
    replace(model, last, [*nodes, new])
    return True


def _operand(known: Inference, value: ir.Value | None) -> _Operand | None:
    """Read back through Transpose(0, 2, 1), Reshape, Transpose and Unsqueeze, as far as each is there."""
    swapped = producer(value, "Transpose")
    if swapped is not None:
        if list(swapped.attributes.get_ints("perm", ())) != KEY:
            return None
        value = swapped.inputs[0]
    reshape = producer(value, "Reshape")
    merged = known.dims_of(value)
    if reshape is None or merged is None or len(merged) != 3:
        return None
    source, perm = _without_unit_axes(reshape.inputs[0])
    dims = known.dims_of(source)
    if source is None or dims is None or len(dims) != 4 or len(perm) != 4:
        return None
    moved = tuple(dims[axis] for axis in perm)
    if any(isinstance(size, Unknown) for size in moved) or merged[1:] != moved[2:]:
        return None
    if swapped is not None:
        perm, moved = [*perm[:2], perm[3], perm[2]], (*moved[:2], moved[3], moved[2])
    return _composed(known, source, perm, moved)


def _composed(known: Inference, source: ir.Value, perm: list[int], moved: Dims) -> _Operand:
    """With the Transpose that makes the source taken into `perm`, where there is one."""
    node = producer(source, "Transpose")
    below = node.inputs[0] if node is not None else None
    if node is not None and below is not None and known.dims_of(below) is not None:
        inner = list(node.attributes.get_ints("perm", ()))
        if len(inner) == 4:
            return _Operand(below, [inner[axis] for axis in perm], moved)
    return _Operand(source, perm, moved)


def _without_unit_axes(value: ir.Value | None) -> tuple[ir.Value | None, list[int]]:
    """(x, perm) of a value that is Transpose(x, perm) but for axes of 1 that an Unsqueeze put into it."""
    transpose = producer(value, "Transpose")
    inner = transpose.inputs[0] if transpose is not None else value
    perm = list(transpose.attributes.get_ints("perm", ())) if transpose is not None else []
    unsqueeze = producer(inner, "Unsqueeze")
    axes = array_of(unsqueeze.inputs[1]) if unsqueeze is not None else None
    if unsqueeze is None or axes is None:
        rank = len(inner.shape) if inner is not None and inner.shape is not None else 0
        return inner, perm or list(range(rank))
    source = unsqueeze.inputs[0]
    rank = (len(source.shape) if source is not None and source.shape is not None else 0) + axes.size
    put = {int(axis) % rank for axis in axes.ravel()} if rank else set()
    kept = [axis for axis in range(rank) if axis not in put]
    return source, [kept.index(axis) for axis in perm or range(rank) if axis in kept]


def _rows_kept(known: Inference, last: ir.Node) -> bool:
    """Reshape(Reshape(x) W + b) that gives x's leading axes back is x W + b."""
    summed = last.inputs[0]
    pair = operands(producer(summed, "Add"), "Add")
    product = None
    for value in pair or (summed,):
        product = product or producer(value, "MatMul")
    if product is None or summed is None or only_user(summed) is not last:
        return False
    if pair is not None and only_user(product.outputs[0]) is not summed.producer():
        return False
    rows = producer(product.inputs[0], "Reshape")
    weight = floats_of(product.inputs[1])
    x = rows.inputs[0] if rows is not None else None
    before, flat, after = known.dims_of(x), known.dims_of(product.inputs[0]), known.dims_of(last.outputs[0])
    if x is None or weight is None or weight.ndim != 2 or before is None or flat is None or after is None:
        return False
    wanted: tuple[Extent, ...] = (*before[:-1], weight.shape[1])
    if len(flat) != 2 or after != wanted or before[-1] != flat[-1] or view_shape(before, after) is None:
        return False
    if pair is not None and not any(_is_row(each, weight.shape[1]) for each in pair):
        return False
    product.replace_input_with(0, x)
    for value in (product.outputs[0], summed):
        known.dims[value] = wanted
    return bypass(last, summed)


def _is_row(value: ir.Value, width: int) -> bool:
    array = array_of(value)
    return array is not None and array.shape == (width,)
