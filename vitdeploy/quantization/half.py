"""Prepare a graph for half precision: the operations that stay in float32, and why.

float16 holds magnitudes up to 65,504 and, at full precision, down to 2^-14. A pass over images finds the range of each
tensor. A residual stream that is too large is scaled as a whole by a power of two (exact). If another tensor is too
large, its operation stays in float32, except the product of a linear or convolution: it is computed in half with its
weights divided by a power of two, and multiplied back in float32. bfloat16 has the range of float32 and needs none of
this.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from vitdeploy.graph import edit, values
from vitdeploy.graph.analysis.rows import Linear, is_layout, origin
from vitdeploy.graph.half.half import Half, half_roles, is_float, scale_residual, stream_tensors, touches_floats

LARGEST, NORMAL = 65504.0, 2.0**-14
# Margin for images with larger values than the calibration images.
HEADROOM = 4
LIMIT = LARGEST / HEADROOM
# The number that masks add to ignored scores: its exp is zero, and a score added to it stays in range.
MASKED = -32768.0
# Operations that sum many numbers outside a product: runtimes do not document how they do it in half. And operations on
# positions, for which 11 bits are too few. All of them are cheap.
SUMS = (
    *("BatchNormalization", "CumSum", "GlobalAveragePool", "GroupNormalization", "InstanceNormalization"),
    *("LpNormalization", "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMean", "ReduceProd"),
    *("ReduceSum", "ReduceSumSquare"),
)
POSITIONS = ("GridSample", "RoiAlign")


@dataclass(frozen=True)
class HalfPlan:
    """`float_fallback`: nodes that stay in float32, by name, with the reason. `exponent`: the residual stream was
    multiplied by 2^-exponent."""

    float_fallback: dict[str, str]
    exponent: int = 0


def lift_masks(model: ir.Model) -> int:
    """Raise constants below -32768 that are added to the scores of a Softmax to -32768, which float16 can hold, in
    place; the probabilities stay the same except in fully masked rows. Returns the number of these constants."""
    editor, count = edit.Editor(model), 0
    for node in list(model.graph):
        for index, value in enumerate(node.inputs):
            array = values.array_of(value)
            if array is None or array.dtype != np.float32 or not (array < MASKED).any() or not _to_softmax(node):
                continue
            editor.set_input(node, index, np.maximum(array, np.float32(MASKED)))
            count += 1
    return count


def _to_softmax(node: ir.Node) -> bool:
    """Whether only a Softmax reads an Add's sum, through layout operations and further Adds."""
    if node.op_type not in ("Add", "Where") or node.domain or node.outputs[0].is_graph_output():
        return False
    readers = [use.node for use in node.outputs[0].uses()]
    return bool(readers) and all(
        reader.op_type == "Softmax" or _to_softmax(reader) or (is_layout(reader) and _moved_to_softmax(reader))
        for reader in readers
    )


def _moved_to_softmax(node: ir.Node) -> bool:
    return all(use.node.op_type == "Softmax" or _to_softmax(use.node) for value in node.outputs for use in value.uses())


def plan_half(model: ir.Model, extremes: Mapping[str, float], half: Half) -> HalfPlan:
    """Prepare a float32 graph for half precision, in place; it computes the same function.

    Args:
        model: a graph in canonical form, after `lift_masks`.
        extremes: the largest magnitude of each computed tensor, by name.

    Returns: the nodes that stay in float32, and the scale of the residual stream.
    """
    found, exponent = dict(extremes), 0
    if half == "fp16":
        found, exponent = _scaled_stream(model, found)
        _scale_products(model, found)
    opset = model.graph.opset_imports[""]
    float_fallback = {}
    for node in model.graph:
        if touches_floats(node) and (reason := _reason(node, found, half, opset)):
            float_fallback[str(node.name)] = reason
    return HalfPlan(float_fallback, exponent)


def _scaled_stream(model: ir.Model, extremes: dict[str, float]) -> tuple[dict[str, float], int]:
    stream = stream_tensors(model)
    largest = max((extremes[name] for name in stream if name in extremes), default=0.0)
    if largest <= LIMIT:
        return extremes, 0
    exponent = math.ceil(math.log2(largest / LIMIT))
    if not scale_residual(model, exponent):
        return extremes, 0
    return {name: size * 2.0**-exponent if name in stream else size for name, size in extremes.items()}, exponent


def _scale_products(model: ir.Model, extremes: dict[str, float]) -> None:
    """Divide the weights of linears whose products are too large, and multiply after them; adds the new tensors to
    `extremes`."""
    editor = edit.Editor(model)
    for linear in editor.linears:
        size = extremes.get(str(linear.node.outputs[0].name), 0.0)
        if size > LIMIT >= _size(linear.input, extremes):
            _scale_product(model, editor, linear, math.ceil(math.log2(size / LIMIT)), extremes)


def _scale_product(
    model: ir.Model, editor: edit.Editor, linear: Linear, exponent: int, extremes: dict[str, float]
) -> None:
    product = linear.node.outputs[0]
    readers = list(product.uses())
    factor = np.float32(2.0**-exponent)
    inner_bias = linear.bias * factor if linear.kind == "conv" and linear.bias is not None else None
    editor.set_input(linear.node, 1, linear.weight * factor)
    if inner_bias is not None:
        editor.set_input(linear.node, 2, inner_bias)
    name = str(product.name)
    large = extremes[name]
    back = editor.constant(np.array(1 / factor, np.float32), f"{linear.name}.unscale")
    names = edit.Names(model)
    node = names.node("Mul", [product, back], f"{linear.name}/unscaled")
    linear.node.append(node)
    node.outputs[0].type, node.outputs[0].shape = product.type, product.shape
    if product.is_graph_output():
        outputs = editor.graph.outputs
        outputs[[value is product for value in outputs].index(True)] = node.outputs[0]
        product.name = names.free(f"{name}/scaled")
        node.outputs[0].name = name
    for reader, index in readers:
        reader.replace_input_with(index, node.outputs[0])
    extremes[str(node.outputs[0].name)] = large
    extremes[str(product.name)] = large * float(factor)


def _reason(node: ir.Node, extremes: Mapping[str, float], half: Half, opset: int) -> str | None:
    """The reason why an operation stays in float32; None if it does not."""
    if half_roles(node, opset, half) is None:
        return f"ONNX has no {node.op_type} in {half} at opset {opset}"
    if node.op_type in SUMS:
        return "it sums many numbers"
    if node.op_type in POSITIONS:
        return "it reads positions"
    if half == "bf16":  # TensorRT converts uint8 only to float32 and float16
        pixels = node.op_type == "Cast" and node.inputs[0] is not None and node.inputs[0].dtype == ir.DataType.UINT8
        return "it reads pixels" if pixels else None
    for value in node.inputs:
        constant = values.array_of(value) if is_float(value) else None
        if constant is not None and np.isfinite(constant).any():
            largest = float(np.abs(constant[np.isfinite(constant)]).max())
            if largest > LARGEST or 0 < largest < NORMAL:
                return f"one of its constants has a largest magnitude of {largest:.3g}"
        elif value is not None and _size(value, extremes) > LIMIT:
            return f"it reads numbers up to {_size(value, extremes):.3g}"
    for value in node.outputs:
        size = _size(value, extremes)
        if size > LIMIT:
            return f"its results reach {size:.3g}"
        if 0 < size < NORMAL:
            return f"its results are at most {size:.3g}"
    return None


def _size(value: ir.Value, extremes: Mapping[str, float]) -> float:
    """The largest magnitude of a computed tensor; 0 if unknown."""
    for name in (str(value.name), str(origin(value).name)):
        if name in extremes:
            return extremes[name]
    return 0.0
