"""Rules on where quantizers stand: around products, at their outputs, at the residual stream (TRT31x)."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from vitdeploy.graph.analysis.rows import MOVES, climb
from vitdeploy.graph.values import is_constant
from vitdeploy.lint.fusible import find_fusible
from vitdeploy.lint.quantizers import quantized_type
from vitdeploy.lint.support import Support
from vitdeploy.lint.view import PRODUCTS, QDQ, GraphView, Hit, is_weight, label, rule, type_name

INT8, FP8 = ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN
# Types of weights with activations in half precision.
WEIGHT_ONLY = frozenset({ir.DataType.INT4, ir.DataType.FLOAT4E2M1})
# What may lie between a quantizer and a product, and should not.
_BETWEEN = MOVES | {"Cast", "Div", "Mul"}


def _behind(value: ir.Value | None) -> tuple[ir.Node | None, list[ir.Node]]:
    """The DequantizeLinear that an operand comes from, and the nodes on the way, the nearest to the operand first."""
    if value is None:
        return None, []
    end, way = climb(value, _BETWEEN)
    node = end.producer()
    return (node, way) if node is not None and node.op_type == "DequantizeLinear" and not node.domain else (None, [])


@rule("TRT311", "error", "int8 or float8e4m3fn in one region, not both", "quantize the region to one of the two")
def _mixed(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.of(*sorted(PRODUCTS)):
        sources = [_behind(value)[0] for value in node.inputs[:2]]
        types = [quantized_type(source) for source in sources if source is not None]
        if INT8 in types and FP8 in types:
            yield Hit(label(node), "operands of " + " and ".join(map(type_name, types)))
    for value in view.values:
        types = [quantized_type(use.node) for use in value.uses() if use.node.op_type == "QuantizeLinear"]
        if INT8 in types and FP8 in types:
            yield Hit(str(value.name), "one tensor in int8 and in float8e4m3fn")
    for attention in find_fusible(view):
        types = [dtype for dtype in (*attention.operands.values(), attention.output) if dtype is not None]
        if INT8 in types and FP8 in types:
            yield Hit(label(attention.softmax), "int8 and float8e4m3fn in one attention")


@rule(
    "TRT312",
    "warning",
    "nothing between DequantizeLinear and the product",
    "write constants transposed and scales in the compute type; put layout and factors in front of QuantizeLinear",
)
def _between(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.of(*sorted(PRODUCTS)):
        for value in node.inputs[:2]:
            source, way = _behind(value)
            if source is not None and way:
                kinds = ", ".join(step.op_type for step in reversed(way))
                yield Hit(label(node), f"{kinds} between {label(source)} and the {node.op_type}")


@rule(
    "TRT313",
    "warning",
    "both operands of a product quantized, or none",
    "quantize the other operand too, or leave the layer in float: it is computed in float as it is",
)
def _half_quantized(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.of(*sorted(PRODUCTS)):
        types = [quantized_type(source) if (source := _behind(value)[0]) else None for value in node.inputs[:2]]
        if (types[0] is None) != (types[1] is None) and not WEIGHT_ONLY & set(types):
            yield Hit(label(node), f"the {'second' if types[0] is None else 'first'} operand alone is quantized")


@rule(
    "TRT314",
    "warning",
    "no quantizer at a linear's output, which is dequantized in the kernel",
    "remove the pair: the next product's input has its own",
)
def _output_quantizers(view: GraphView, support: Support) -> Iterator[Hit]:
    """A quantizer at a linear's output that is not the quantizer of a product's input."""
    for quantizer in view.of("QuantizeLinear"):
        linear = _linear_behind(quantizer.inputs[0])
        if linear is not None and not any(node.op_type in PRODUCTS for node in _readers(quantizer.outputs[0])):
            yield Hit(label(quantizer), f"the output of {label(linear)} is quantized")


def _linear_behind(value: ir.Value | None) -> ir.Node | None:
    """The linear or convolution, with weights, whose output (with its bias) is `value`."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "Add" and any(map(is_constant, node.inputs)):
        [computed, *_] = [*(each for each in node.inputs if not is_constant(each)), None]
        node = computed.producer() if computed is not None else None
    return node if node is not None and node.op_type in PRODUCTS and is_weight(node.inputs[1]) else None


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    """The nodes that compute with `value`, past quantizers and layout operations."""
    stack, seen = [value], set[ir.Value]()
    while stack:
        current = stack.pop()
        if current in seen:
            continue
        seen.add(current)
        for use in current.uses():
            if use.node.op_type in _BETWEEN | QDQ | {"Concat"}:
                stack += use.node.outputs
            else:
                yield use.node


@rule(
    "TRT315",
    "warning",
    "no quantizers at the operands of residual additions",
    "remove them: they cost the stream's accuracy and save no product",
)
def _residuals(view: GraphView, support: Support) -> Iterator[Hit]:
    masks = {node for attention in find_fusible(view) for node in attention.between}
    for node in view.of("Add", "Sum"):
        if node in masks or any(is_weight(value) for value in node.inputs):
            continue
        for value in node.inputs:
            source, _ = _behind(value)
            if source is not None:
                yield Hit(label(node), f"an addend comes from {label(source)}")


RULES = (_mixed, _between, _half_quantized, _output_quantizers, _residuals)
