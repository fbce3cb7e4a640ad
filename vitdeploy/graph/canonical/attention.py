"""Attention in one form: Softmax(scale q @ Transpose(k) [+ mask]) @ v, which OpenVINO, ONNX Runtime and TensorRT fuse.

Source: arXiv 1706.03762, equation 1. Exporters put the scale behind the product, or its root on both factors (PyTorch
does, for range); they transpose the key through Reshape nodes, and clear rows that are masked out entirely.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.analysis.attention import over_last_axis
from vitdeploy.graph.analysis.layout import scaled_input
from vitdeploy.graph.edit import Names, bypass, replace
from vitdeploy.graph.values import array_of, is_constant, operands, producer, stem, with_constant

# A mask that leaves every row a score above this cannot make a row of minus infinity out of any finite scores.
UNMASKED = -1e30


def canonical_attention(model: ir.Model) -> int:
    """Bring every attention into the form above. Returns how many nodes were rewritten."""
    count = 0
    for node in list(model.graph):
        if node.op_type == "Softmax" and node.domain == "" and over_last_axis(node):
            count += _without_nan_check(model, node)
            product = _scores(node)
            if product is not None:
                count += _scale_on_query(model, *product)
        elif node.op_type == "Reshape" and node.graph is not None:
            count += _plain_transpose(model, node)
    return count


def _scores(softmax: ir.Node) -> tuple[ir.Node, ir.Node | None] | None:
    """The product of query and key under a Softmax, and the Mul or Div that scales it, if one does."""
    value = softmax.inputs[0]
    masked = operands(producer(value, "Add"), "Add")
    for candidate in masked or (value,):
        for operator in ("Mul", "Div"):
            scaled = with_constant(producer(candidate, operator), operator)
            product = producer(scaled[0], "MatMul") if scaled is not None else None
            if product is not None and candidate is not None:
                return product, candidate.producer()
        product = producer(candidate, "MatMul")
        if product is not None and not is_constant(product.inputs[1]):
            return product, None
    return None


def _scale_on_query(model: ir.Model, product: ir.Node, scaling: ir.Node | None) -> bool:
    """One Mul on the query, by the product of all factors found behind the MatMul, on the query and on the key."""
    query, key = product.inputs
    if query is None or key is None:
        return False
    behind = scaled_input(scaling)
    on_query, on_key = scaled_input(query.producer()), scaled_input(_below_transpose(key))
    if behind is None and on_key is None:
        return False
    factor = float(np.prod([found[1] for found in (behind, on_query, on_key) if found is not None]))
    if on_key is not None:
        new_key = _without_factor(model, key, on_key[0])
        product.replace_input_with(1, new_key)
    dtype = (query.dtype or ir.DataType.FLOAT).numpy()
    names = Names(model)
    constant = names.constant(np.array(factor, dtype), f"{stem(product)}.scale")
    source = on_query[0] if on_query is not None else query
    scaled = names.node("Mul", [source, constant], f"{stem(product)}/Mul_scale")
    scaled.outputs[0].type, scaled.outputs[0].shape = query.type, query.shape
    model.graph.insert_before(product, scaled)
    product.replace_input_with(0, scaled.outputs[0])
    if scaling is not None and behind is not None:
        bypass(scaling, product.outputs[0])
    return True


def _below_transpose(key: ir.Value) -> ir.Node | None:
    """The node that may scale the key: the one before MatMul, or the one before the Transpose before it."""
    node = key.producer()
    if node is not None and node.op_type == "Transpose" and node.inputs[0] is not None:
        return node.inputs[0].producer()
    return node


def _without_factor(model: ir.Model, key: ir.Value, source: ir.Value) -> ir.Value:
    """The key with the Mul taken out, its Transpose kept."""
    node = key.producer()
    assert node is not None
    if node.op_type != "Transpose":
        return source
    if len(key.uses()) == 1:
        node.replace_input_with(0, source)
        return key
    copy = Names(model).node("Transpose", [source], f"{node.name}_key", dict(node.attributes))
    copy.outputs[0].type, copy.outputs[0].shape = key.type, key.shape
    model.graph.insert_after(node, copy)
    return copy.outputs[0]


def _without_nan_check(model: ir.Model, softmax: ir.Node) -> bool:
    """Replace Where(IsNaN(p), 0, p) by p, for a Softmax p with a finite score in every row.

    PyTorch's export writes it for rows that are masked out entirely. A NaN from the input is no longer hidden.
    """
    probability, value = softmax.outputs[0], softmax.inputs[0]
    users = {use.node.op_type: use.node for use in probability.uses()}
    if set(users) != {"IsNaN", "Where"} or len(probability.uses()) != 2:
        return False
    where = users["Where"]
    if where.inputs[0] is not users["IsNaN"].outputs[0] or where.inputs[2] is not probability:
        return False
    masked = operands(producer(value, "Add"), "Add")
    if masked is not None:
        masks = [array for array in map(array_of, masked) if array is not None]
        if not masks or not all(np.all(mask.max(axis=-1) > UNMASKED) if mask.ndim else False for mask in masks):
            return False
    return bypass(where, probability)


def _plain_transpose(model: ir.Model, node: ir.Node) -> bool:
    """Reshape to rank 3, Transpose of the last two axes, Reshape back: one Transpose."""
    transpose = producer(node.inputs[0], "Transpose")
    first = producer(transpose.inputs[0], "Reshape") if transpose is not None else None
    if transpose is None or first is None or list(transpose.attributes.get_ints("perm", ())) != [0, 2, 1]:
        return False
    source = first.inputs[0]
    data, merged, result = (_shape(value) for value in (source, first.outputs[0], node.outputs[0]))
    if source is None or data is None or merged is None or result is None or len(merged) != 3 or len(data) < 3:
        return False
    if result[:-2] != data[:-2] or merged[1:] != data[-2:] or result[-2:] != data[-2:][::-1]:
        return False
    rank = len(data)
    perm = [*range(rank - 2), rank - 1, rank - 2]
    replace(
        model, node, [ir.node("Transpose", [source], attributes={"perm": perm}, name=f"{stem(node)}/Transpose_key")]
    )
    return True


def _shape(value: ir.Value | None) -> list[int | str] | None:
    """The sizes of a value, free ones by their names; None if one is not known."""
    if value is None or value.shape is None:
        return None
    sizes = [size if isinstance(size, int) else size.value for size in value.shape]
    return None if None in sizes else [size for size in sizes if size is not None]
