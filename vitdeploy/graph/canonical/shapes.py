"""Shapes as constants: no node computes what is known, and a free size is read from the graph's input, once.

A Reshape takes its shape from a constant, -1 for the size that is free; whatever else needs a free size (the Expand of
a class token) takes it from one chain Shape(input, start, end) -> [Mul] -> Concat, shared by all.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.canonical.free_sizes import SizeChain
from vitdeploy.graph.canonical.gather import viewed
from vitdeploy.graph.edit import Names, replace
from vitdeploy.graph.shapes.infer import ARITHMETIC, Inference
from vitdeploy.graph.shapes.sizes import Dims, view_shape
from vitdeploy.graph.values import array_of

INT64 = ir.DataType.INT64


def resolve_shapes(model: ir.Model, known: Inference, chain: SizeChain) -> int:
    """Write every shape that is `known` as a constant. Returns how many inputs of nodes were rewritten."""
    # Constants where all numbers are known, then views, then what still needs a free size.
    rewritten = _known_numbers(model, known)
    for node in list(model.graph):
        if node.domain == "" and node.op_type in _RULES:
            rewritten += _RULES[node.op_type](model, known, node)
    return rewritten + _free_sizes(model, known, chain)


def _known_numbers(model: ir.Model, known: Inference) -> int:
    """A computed tensor whose entries are all numbers is a constant."""
    count, names = 0, Names(model)
    for value, contents in list(known.contents.items()):
        node = value.producer()
        if node is None or value.is_graph_output() or value.dtype not in (INT64, ir.DataType.INT32):
            continue
        if not value.uses() or not all(isinstance(entry, int) for entry in contents.ravel()):
            continue
        constant = names.constant(contents.astype(value.dtype.numpy()), f"{value.name}.constant")
        known.contents[constant] = contents
        count += len(value.uses())
        ir.convenience.replace_all_uses_with(value, constant)
    return count


def _reshape(model: ir.Model, known: Inference, node: ir.Node) -> int:
    return _view(model, known, node, node.inputs[0], known.dims_of(node.outputs[0]))


def _gather(model: ir.Model, known: Inference, node: ir.Node) -> int:
    """A Gather of every element from where it is already is a view."""
    found = viewed(known, node) if node.outputs[0] not in known.contents else None
    return _view(model, known, node, *found) if found is not None else 0


def _view(model: ir.Model, known: Inference, node: ir.Node, data: ir.Value | None, wanted: Dims | None) -> int:
    target = view_shape(known.dims_of(data), wanted)
    if wanted is None or target is None:
        return 0
    current = array_of(node.inputs[1]) if node.op_type == "Reshape" else None
    if current is not None and current.tolist() == target:
        return 0
    shape = Names(model).constant(np.array(target, np.int64), f"{node.name}.shape")
    new = ir.node("Reshape", [data, shape], name=node.name)
    known.dims[new.outputs[0]] = wanted
    replace(model, node, [new])
    return 1


def _tile(model: ir.Model, known: Inference, node: ir.Node) -> int:
    """Repeating axes of size 1 is what Expand does."""
    data, repeats = known.dims_of(node.inputs[0]), known.contents_of(node.inputs[1])
    if data is None or repeats is None or len(data) != repeats.size:
        return 0
    if any(count != 1 and size != 1 for size, count in zip(data, repeats, strict=True)):
        return 0
    replace(model, node, [ir.node("Expand", list(node.inputs), name=node.name)])
    return 1


def _constant_of_shape(model: ir.Model, known: Inference, node: ir.Node) -> int:
    """A constant of a free shape is the Expand of a number."""
    attribute, contents = node.attributes.get("value"), known.contents_of(node.inputs[0])
    if contents is None or contents.ndim != 1:
        return 0
    fill = np.zeros(1, np.float32) if attribute is None else attribute.as_tensor().numpy().reshape(1)
    constant = Names(model).constant(np.ascontiguousarray(fill), f"{node.name}.value")
    replace(model, node, [ir.node("Expand", [constant, node.inputs[0]], name=node.name)])
    return 1


_RULES = {
    "Reshape": _reshape,
    "Flatten": _reshape,
    "Gather": _gather,
    "Tile": _tile,
    "ConstantOfShape": _constant_of_shape,
}


def _free_sizes(model: ir.Model, known: Inference, chain: SizeChain) -> int:
    """Inputs of nodes that are shapes with a free size: all from one short chain, and those equal share it."""
    count = 0
    for node in list(model.graph):
        if node.op_type in ARITHMETIC and node.outputs[0] in known.contents:
            continue
        for index, value in enumerate(node.inputs):
            contents = known.contents.get(value) if value is not None else None
            if value is None or contents is None or value.producer() is None or value.dtype != INT64:
                continue
            if contents.ndim == 1 and not chain.is_canonical(value):
                short = chain.vector(tuple(contents))
                if short is not None:
                    node.replace_input_with(index, short)
                    count += 1
    return count
