"""Rules on QuantizeLinear and DequantizeLinear: their types, zero points, scales and axes (TRT30x), and their places
around products, at outputs and at the residual stream (TRT31x)."""

import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.analysis.rows import MOVES, climb
from vitdeploy.graph.values import array_of, dim, is_constant, rank_of
from vitdeploy.lint.attention import find_fusible
from vitdeploy.lint.support import QUANTIZED, Support
from vitdeploy.lint.view import (
    PRODUCTS,
    QDQ,
    GraphView,
    Hit,
    is_weight,
    label,
    quantized_type,
    rule,
    type_name,
    zero_point,
)

_BLOCKED = QUANTIZED - {ir.DataType.INT8}


def quantizers(view: GraphView) -> Iterator[ir.Node]:
    return view.of("QuantizeLinear", "DequantizeLinear")


def _scales(node: ir.Node) -> int | None:
    """Return the number of scales; None if unknown."""
    scale = node.inputs[1]
    if scale is None or scale.shape is None:
        return None
    sizes = [size for size in scale.shape if isinstance(size, int)]
    return math.prod(sizes) if len(sizes) == len(scale.shape) else None


def _axis(node: ir.Node) -> int | None:
    """The axis of a quantizer with several scales, counted from the front."""
    axis, axes = int(node.attributes.get_int("axis", 1)), rank_of(node.inputs[0])
    return axis if axis >= 0 else None if axes is None else axis + axes


@rule(
    "TRT301",
    "error",
    "symmetric quantization: zero points that are constant and 0",
    "quantize symmetrically: `vitdeploy quantize --target tensorrt`",
)
def _zero_points(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in quantizers(view):
        zero = zero_point(node)
        if zero is None:
            continue
        array = array_of(zero)
        if array is None:
            yield Hit(label(node), "a computed zero point")
        elif (array != 0).any():
            yield Hit(label(node), f"zero points other than 0, such as {array[array != 0].flat[0]}")
        elif _scales(node) not in (None, array.size):
            yield Hit(label(node), f"{array.size} zero points for {_scales(node)} scales", "one zero point per scale")


@rule(
    "TRT302",
    "error",
    "int8 or float8e4m3fn (int4 and float4e2m1 for weights)",
    "quantize to int8 with an int8 zero point of 0",
)
def _quantized_types(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in quantizers(view):
        dtype = quantized_type(node)
        if dtype is None or dtype in QUANTIZED:
            continue
        silent = node.op_type == "QuantizeLinear" and zero_point(node) is None and "output_dtype" not in node.attributes
        found = "no zero point: uint8 in ONNX, int8 in TensorRT" if silent else f"{node.op_type} of {type_name(dtype)}"
        yield Hit(label(node), found)


@rule(
    "TRT303",
    "error",
    "one scale for a computed tensor; several only for weights",
    "use the largest of the scales, and fold the channels' ratios into the weights",
)
def _channels_of_activations(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in quantizers(view):
        count = _scales(node)
        if count is not None and count > 1 and not is_weight(node.inputs[0]):
            yield Hit(label(node), f"{count} scales of a computed tensor")


@rule(
    "TRT304",
    "error",
    "one scale per output channel: along the last axis of MatMul's weights [K, N], along axis 0 of Conv's",
    "quantize the weights along that axis",
    by_release=True,
)
def _axes(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in quantizers(view):
        count, axes, scale_axes = _scales(node), rank_of(node.inputs[0]), rank_of(node.inputs[1])
        if count is None or count == 1 or axes is None:
            continue
        if scale_axes is not None and scale_axes > 1:
            if quantized_type(node) not in _BLOCKED:
                yield Hit(
                    label(node),
                    f"scales of {scale_axes} axes (blocks) for {type_name(quantized_type(node))}",
                    "one axis",
                )
            continue
        axis = _axis(node)
        size = dim(node.inputs[0], axis) if axis is not None else None
        if size is not None and size != count:
            yield Hit(label(node), f"{count} scales along axis {axis}, which has {size} entries", f"{size} scales")
        if "axis" not in node.attributes and support.release < (10, 16):
            yield Hit(
                label(node),
                "no attribute axis: the default is 1 in ONNX, 0 in the parser",
                "an explicit axis",
                "write axis=1",
            )
        for use in node.outputs[0].uses() if node.op_type == "DequantizeLinear" else ():
            expected = _channel_axis(use.node, use.idx, axes)
            if expected is not None and expected != axis:
                found = f"scales along axis {axis} of the weights of {label(use.node)} ({use.node.op_type})"
                yield Hit(label(node), found, f"axis {expected}")


def _channel_axis(product: ir.Node, index: int, axes: int) -> int | None:
    """Return the axis of the output channels of operand `index` with `axes` axes; None if it is not an operand.

    Both operands of a matrix product have one: the columns of the right operand, the rows of the left one.
    """
    if product.op_type not in PRODUCTS or product.domain or index > 1:
        return None
    if product.op_type in ("Conv", "ConvTranspose"):
        return None if index == 0 else 0 if product.op_type == "Conv" else 1
    transposed = product.op_type == "Gemm" and product.attributes.get_int("transB" if index else "transA", False)
    return axes - 1 if (index == 1) != bool(transposed) else axes - 2


@rule(
    "TRT305",
    "error",
    "finite scales above 0",
    "a scale of 0 in half precision has underflowed: raise it to the smallest value of the type, or leave the layer in "
    "float",
)
def _scale_values(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in quantizers(view):
        array = array_of(node.inputs[1])
        if array is None:
            continue
        numbers = array.astype(np.float64)
        bad = numbers[~((numbers > 0) & np.isfinite(numbers))]
        if bad.size:
            yield Hit(label(node), f"{bad.size} scales such as {bad.flat[0]:g}")


@rule("TRT306", "error", "scales in the type of the tensor to quantize", "store the scale in the compute type")
def _scale_types(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.of("QuantizeLinear"):
        types = [value.dtype if value is not None else None for value in node.inputs[:2]]
        if None not in types and types[0] != types[1]:
            yield Hit(
                label(node),
                f"a {type_name(types[1])} scale for {type_name(types[0])}",
                f"a {type_name(types[0])} scale",
            )


# --- Where quantizers stand -------------------------------------------------------------------------------------------


INT8, FP8 = ir.DataType.INT8, ir.DataType.FLOAT8E4M3FN
# Types of weights that are used with half precision activations.
WEIGHT_ONLY = frozenset({ir.DataType.INT4, ir.DataType.FLOAT4E2M1})
# Operators that can be between a quantizer and a product, but should not.
_BETWEEN = MOVES | {"Cast", "Div", "Mul"}


def _behind(value: ir.Value | None) -> tuple[ir.Node | None, list[ir.Node]]:
    """Return the DequantizeLinear of an operand, and the nodes between, starting at the operand."""
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
    "no operators between DequantizeLinear and the product",
    "store constants transposed and scales in the compute type; put layout and factors before QuantizeLinear",
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
    "both operands of a product quantized, or neither",
    "quantize the other operand too, or leave the layer in float: it runs in float either way",
)
def _half_quantized(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.of(*sorted(PRODUCTS)):
        types = [quantized_type(source) if (source := _behind(value)[0]) else None for value in node.inputs[:2]]
        if (types[0] is None) != (types[1] is None) and not WEIGHT_ONLY & set(types):
            yield Hit(label(node), f"only the {'second' if types[0] is None else 'first'} operand is quantized")


@rule(
    "TRT314",
    "warning",
    "no quantizer at a linear's output, which is dequantized in the kernel",
    "remove the pair: the input of the next product has its own",
)
def _output_quantizers(view: GraphView, support: Support) -> Iterator[Hit]:
    """Find quantizers at a linear's output that do not quantize a product's input."""
    for quantizer in view.of("QuantizeLinear"):
        linear = _linear_behind(quantizer.inputs[0])
        if linear is not None and not any(node.op_type in PRODUCTS for node in _readers(quantizer.outputs[0])):
            yield Hit(label(quantizer), f"the output of {label(linear)} is quantized")


def _linear_behind(value: ir.Value | None) -> ir.Node | None:
    """Return the linear or convolution with weights whose output, bias included, is `value`."""
    node = value.producer() if value is not None else None
    if node is not None and node.op_type == "Add" and any(map(is_constant, node.inputs)):
        [computed, *_] = [*(tensor for tensor in node.inputs if not is_constant(tensor)), None]
        node = computed.producer() if computed is not None else None
    return node if node is not None and node.op_type in PRODUCTS and is_weight(node.inputs[1]) else None


def _readers(value: ir.Value) -> Iterator[ir.Node]:
    """Return the nodes that compute with `value`, past quantizers and layout operations."""
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
    "remove them: they reduce the accuracy of the residual stream and speed up no product",
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
