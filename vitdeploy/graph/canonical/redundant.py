"""Nodes that compute what is there already: views of the same shape, neutral constants, Expands before broadcasting."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.canonical.free_sizes import SizeChain
from vitdeploy.graph.canonical.uniform import is_made_of_constants, sink_expand_of_constant
from vitdeploy.graph.edit import bypass, replace
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.shapes.sizes import Dims, Unknown, broadcast
from vitdeploy.graph.values import array_of, is_constant, operands, producer

# x op c = x for this constant; for the first two also c op x.
NEUTRAL = {"Add": 0.0, "Mul": 1.0, "Sub": 0.0, "Div": 1.0}
# Elementwise operators that broadcast all their inputs.
BROADCASTING = frozenset(
    {"Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "And", "Or", "Equal", "Where", "Greater", "Less"}
)


def remove_redundant(model: ir.Model, known: Inference, chain: SizeChain, *, masks: bool = False) -> int:
    """Bypass every node that, according to `known`, returns an input unchanged. Returns how many were removed.

    `masks`: the graph counts the pixels of a mask, so that all is moved in front of an Expand that may be. In others
    only what masks of scores need is: what is learned, as queries, stays where its exporter expands it.
    """
    count = 0
    for node in list(model.graph):
        if node.domain != "" or not node.outputs or any(output.uses() for output in node.outputs[1:]):
            continue
        source = _unchanged(known, node)
        same = source is not None and source.dtype == node.outputs[0].dtype
        bypassed = same and source is not None and bypass(node, source)
        count += (
            bypassed
            or _sink_expand(model, known, chain, node, masks)
            or sink_expand_of_constant(model, known, chain, node, masks)
        )
    return count


def _unchanged(known: Inference, node: ir.Node) -> ir.Value | None:
    """The input that the node returns as it is, if it does."""
    operator, data = node.op_type, node.inputs[0] if node.inputs else None
    if operator in NEUTRAL:
        for x, c in _orders(node):
            array = array_of(c)
            neutral = array is not None and array.size > 0 and array.dtype.kind == "f"
            if neutral and np.all(array == NEUTRAL[operator]) and _same(known, x, node.outputs[0]):
                return x
        return None
    if operator == "Where":  # a mask that hides nothing, or everything
        condition = array_of(data)
        if condition is None or condition.size == 0 or condition.any() != condition.all():
            return None
        kept = node.inputs[1 if condition.all() else 2]
        return kept if _same(known, kept, node.outputs[0]) else None
    rule = _RULES.get(operator)
    return data if rule is not None and data is not None and rule(known, node) else None


def _orders(node: ir.Node) -> tuple[tuple[ir.Value, ir.Value], ...]:
    pair = operands(node, node.op_type)
    if pair is None:
        return ()
    return (pair, pair[::-1]) if node.op_type in ("Add", "Mul") else (pair,)


def _same(known: Inference, a: ir.Value | None, b: ir.Value | None) -> bool:
    dims = known.dims_of(a)
    return dims is not None and dims == known.dims_of(b) and not any(isinstance(size, Unknown) for size in dims)


def _same_shape(known: Inference, node: ir.Node) -> bool:
    return _same(known, node.inputs[0], node.outputs[0])


def _whole_slice(known: Inference, node: ir.Node) -> bool:
    """All of every axis: nothing is cut off, and no axis runs backwards."""
    steps = known.contents_of(node.inputs[4]) if len(node.inputs) > 4 else None
    forwards = len(node.inputs) < 5 or (steps is not None and all(step == 1 for step in steps))
    return forwards and _same_shape(known, node)


def _same_type(known: Inference, node: ir.Node) -> bool:
    source = node.inputs[0]
    return source is not None and source.dtype is not None and int(source.dtype) == node.attributes.get_int("to", 0)


def _inference_dropout(known: Inference, node: ir.Node) -> bool:
    training = array_of(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else np.False_
    return training is not None and not np.any(training)


def _no_padding(known: Inference, node: ir.Node) -> bool:
    pads = known.contents_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return pads is not None and all(size == 0 for size in pads)


def _identity_transpose(known: Inference, node: ir.Node) -> bool:
    perm = node.attributes.get_ints("perm", ())
    return len(perm) > 0 and list(perm) == sorted(perm)


_RULES: dict[str, Callable[[Inference, ir.Node], bool]] = {
    "Identity": lambda known, node: True,
    "Dropout": _inference_dropout,
    "Cast": _same_type,
    "Concat": lambda known, node: len(node.inputs) == 1,
    "Pad": _no_padding,
    "Transpose": _identity_transpose,
    "Slice": _whole_slice,
    "Reshape": _same_shape,
    "Flatten": _same_shape,
    "Expand": _same_shape,
    "Squeeze": _same_shape,
    "Unsqueeze": _same_shape,
}


def _sink_expand(model: ir.Model, known: Inference, chain: SizeChain, node: ir.Node, masks: bool) -> bool:
    """Bypass an Expand if an elementwise operator broadcasts its data to the same result anyway.

    If all other inputs are constants, the Expand moves behind the operator, so that a mask or a size that is the same
    for the whole batch becomes a constant.
    """
    if node.op_type not in BROADCASTING or len(node.outputs) != 1:
        return False
    found = next(((i, e) for i, v in enumerate(node.inputs) if (e := producer(v, "Expand")) is not None), None)
    if found is None:
        return False
    index, expand = found
    data = expand.inputs[0]
    inputs = [data if i == index else value for i, value in enumerate(node.inputs)]
    shapes = [known.dims_of(value) for value in inputs]
    wanted = known.dims_of(node.outputs[0])
    if data is None or wanted is None or any(shape is None for shape in shapes):
        return False
    combined = broadcast(*(shape for shape in shapes if shape is not None))
    if _equal(combined, wanted):
        node.replace_input_with(index, data)
        return True
    others = [value for i, value in enumerate(node.inputs) if i != index]
    constant = is_made_of_constants if masks else is_constant
    if not constant(data) or not all(map(constant, others)):
        return False
    same = known.dims_of(expand.outputs[0]) == wanted
    target = expand.inputs[1] if same else chain.vector(wanted) if masks else None
    if target is None:
        return False
    inner = ir.node(node.op_type, inputs, attributes=dict(node.attributes))
    inner.outputs[0].type = node.outputs[0].type
    whole = ir.node("Expand", [inner.outputs[0], target])
    if masks:  # for what follows in the same round
        known.dims[inner.outputs[0]], known.dims[whole.outputs[0]] = combined, wanted
    replace(model, node, [inner, whole])
    return True


def _equal(a: Dims, b: Dims) -> bool:
    return a == b and not any(isinstance(size, Unknown) for size in a)
