"""Rules on QuantizeLinear and DequantizeLinear, each by itself: types, zero points, scales, axes (TRT30x)."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.values import array_of, dim, rank_of
from vitdeploy.lint.support import QUANTIZED, Support
from vitdeploy.lint.view import PRODUCTS, GraphView, Hit, is_weight, label, rule, type_name

_BLOCKED = QUANTIZED - {ir.DataType.INT8}


def quantizers(view: GraphView) -> Iterator[ir.Node]:
    return view.of("QuantizeLinear", "DequantizeLinear")


def quantized_type(node: ir.Node) -> ir.DataType | None:
    """The type that a QuantizeLinear makes by ONNX's rules, or that a DequantizeLinear reads."""
    if node.op_type == "DequantizeLinear":
        return node.inputs[0].dtype if node.inputs[0] is not None else None
    zero, named = _zero_point(node), node.attributes.get_int("output_dtype", 0)
    if zero is not None:
        return zero.dtype
    return ir.DataType(named) if named else ir.DataType.UINT8


def _zero_point(node: ir.Node) -> ir.Value | None:
    return node.inputs[2] if len(node.inputs) > 2 else None


def _scales(node: ir.Node) -> int | None:
    """The number of scales; None if unknown."""
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
        zero = _zero_point(node)
        if zero is None:
            continue
        array = array_of(zero)
        if array is None:
            yield Hit(label(node), "a computed zero point")
        elif (array != 0).any():
            yield Hit(label(node), f"zero points other than 0, such as {array[array != 0].flat[0]}")
        elif _scales(node) not in (None, array.size):
            yield Hit(
                label(node), f"{array.size} zero points for {_scales(node)} scales", "a zero point for each scale"
            )


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
        silent = (
            node.op_type == "QuantizeLinear" and _zero_point(node) is None and "output_dtype" not in node.attributes
        )
        found = "no zero point: uint8 to ONNX, int8 to TensorRT" if silent else f"{node.op_type} of {type_name(dtype)}"
        yield Hit(label(node), found)


@rule(
    "TRT303",
    "error",
    "one scale for a computed tensor; several for weights alone",
    "take the largest of the scales, and fold the channels' ratios into the weights",
)
def _channels_of_activations(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in quantizers(view):
        count = _scales(node)
        if count is not None and count > 1 and not is_weight(node.inputs[0]):
            yield Hit(label(node), f"{count} scales of a computed tensor")


@rule(
    "TRT304",
    "error",
    "a scale for each output channel: the last axis of MatMul's weights [K, N], axis 0 of Conv's",
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
                "no attribute axis: 1 to ONNX, 0 to the parser",
                "the axis in the attribute",
                "write axis=1",
            )
        for use in node.outputs[0].uses() if node.op_type == "DequantizeLinear" else ():
            wanted = _channel_axis(use.node, use.idx, axes)
            if wanted is not None and wanted != axis:
                found = f"scales along axis {axis} of the weights of {label(use.node)} ({use.node.op_type})"
                yield Hit(label(node), found, f"axis {wanted}")


def _channel_axis(product: ir.Node, index: int, axes: int) -> int | None:
    """The axis of output channels of operand `index`, which has `axes` axes; None for anything but a product's operand.

    Both operands of a matrix product have one: columns of the right one, rows of the left one.
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
    "scales that are 0 in half precision have underflowed: raise them to the "
    "smallest that the type holds, or leave the layer in float",
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


@rule("TRT306", "error", "scales in the type of what is quantized", "write the scale in the compute type")
def _scale_types(view: GraphView, support: Support) -> Iterator[Hit]:
    for node in view.of("QuantizeLinear"):
        types = [value.dtype if value is not None else None for value in node.inputs[:2]]
        if None not in types and types[0] != types[1]:
            yield Hit(
                label(node),
                f"a {type_name(types[1])} scale for {type_name(types[0])}",
                f"a {type_name(types[0])} scale",
            )


RULES = (_zero_points, _quantized_types, _channels_of_activations, _axes, _scale_values, _scale_types)
