"""TensorRT: explicit Q/DQ, symmetric, zero point 0, on the inputs and weights of linears and convolutions.

TensorRT has no zero points. If the range of a tensor is not centred at zero, it is shifted there: by the shift of the
LayerNormalization that computes it, at no cost, or else by an Add, which is fused with the operation before it and the
quantizer; the layer's bias reverts the shift. So no code is wasted. Only the padding zeros of a convolution cannot be
shifted.

Weights are INT8 (or FP8) constants in the layer's own layout, with a scale per output channel. The outputs of layers,
additions and norms have no Q. Attention stays in half precision. Scales are float16 numbers, because that is their type
once the graph's types are written; they are rounded before the weights are.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from vitdeploy.graph import edit, values
from vitdeploy.graph.analysis.rows import Linear
from vitdeploy.graph.passes.folds import image_bounds
from vitdeploy.lint import linter, support
from vitdeploy.quantization import folds, placement
from vitdeploy.quantization.ranges import QuantizedWeight, Range
from vitdeploy.runtime import tensorrt as tensorrt_api
from vitdeploy.runtime.profiles import Profile

FP8: np.dtype[Any] = np.dtype(ml_dtypes.float8_e4m3fn)
LARGEST_FP8 = 448.0
# A Mul and an Add after an activation are fused with it.
GAIN_THRESHOLD = folds.GainThreshold(scale=1.05, copies=1.2)
# INT8 has no MatMul kernels for fewer channels (ModelOpt skips them too).
FEWEST = 16
# The smallest positive number of float16.
SMALLEST = 2.0**-24
# A shift of less than this share of the range does not justify an Add.
LEAST_SHIFT = 0.02


def reasons_for_float(model: ir.Model, linears: Sequence[Linear]) -> dict[str, str]:
    """The layers to keep in half precision, by name, with the reason."""
    reasons = {}
    for linear in linears:
        if linear.groups > 1:
            reasons[linear.name] = "a grouped convolution has no fast INT8 kernel"
        elif reason := placement.needs_float(linear):
            reasons[linear.name] = reason
        elif linear.kind == "matmul" and min(linear.weight.shape) < FEWEST:
            reasons[linear.name] = f"INT8 has no kernel for fewer than {FEWEST} channels"
    return reasons


def write(
    model: ir.Model, linears: Sequence[Linear], ranges: Mapping[str, Range], weights: Mapping[str, QuantizedWeight]
) -> tuple[str, ...]:
    """Quantize the given layers in place, in float32; `graph.half.half.type_graph` writes the types."""
    editor, by_tensor = edit.Editor(model), dict[ir.Value, list[Linear]]()
    for linear in linears:
        by_tensor.setdefault(linear.input, []).append(linear)
    for tensor, readers in by_tensor.items():
        _quantize(editor, model, tensor, readers, ranges[str(tensor.name)], weights)
    return ()


def _quantize(
    editor: edit.Editor,
    model: ir.Model,
    tensor: ir.Value,
    readers: Sequence[Linear],
    bounds: Range,
    weights: Mapping[str, QuantizedWeight],
) -> None:
    pixels = image_bounds(readers[0]) is not None
    shift, step = _grid(bounds, pixels, movable=not any(map(_fixed, readers)))
    rounded = {linear.name: _float16_scales(weights[linear.name]) for linear in readers}
    name = str(tensor.name)
    if shift:
        for linear in readers:
            integers, scales = rounded[linear.name]
            axes = tuple(axis for axis in range(integers.ndim) if axis != linear.out_axis)
            moved = shift * scales.astype(np.float64) * integers.sum(axis=axes, dtype=np.int64)
            editor.set_linear(linear, bias=moved if linear.bias is None else linear.bias + moved)
        tensor = _moved(editor, tensor, readers, shift)
    read = _activation(model, tensor, name, step, np.dtype(np.int8), readers[0].node)
    for linear in readers:
        linear.node.replace_input_with(0, read)
        linear.node.replace_input_with(1, placement.dequantized_weight(model, linear, *rounded[linear.name]))


def write_fp8(model: ir.Model, linears: Sequence[Linear], ranges: Mapping[str, Range]) -> None:
    """Quantize the given layers in place to FP8 E4M3, whose spacing grows with magnitude: zero is not shifted, and the
    largest magnitude of a tensor, or of an output channel of a weight, becomes 448 (OCP 8-bit Floating Point
    Specification)."""
    read: dict[ir.Value, ir.Value] = {}
    for linear in linears:
        tensor, name = linear.input, str(linear.input.name)
        if tensor not in read:
            bounds = ranges[name]
            step = _up_to_float16(max(-bounds.low, bounds.high, SMALLEST) / LARGEST_FP8)
            read[tensor] = _activation(model, tensor, name, step, FP8, linear.node)
        axes = tuple(axis for axis in range(linear.weight.ndim) if axis != linear.out_axis)
        scales = np.abs(linear.weight).max(axis=axes) / LARGEST_FP8
        scales = np.array([_up_to_float16(max(float(scale), SMALLEST)) for scale in scales], np.float32)
        wide = [-1 if axis == linear.out_axis else 1 for axis in range(linear.weight.ndim)]
        linear.node.replace_input_with(0, read[tensor])
        codes = (linear.weight / scales.reshape(wide)).astype(FP8)
        linear.node.replace_input_with(1, placement.dequantized_weight(model, linear, codes, scales))


def _activation(
    model: ir.Model, tensor: ir.Value, name: str, step: float, kind: np.dtype[Any], before: ir.Node
) -> ir.Value:
    """The tensor quantized to an 8-bit type and back."""
    pair = placement.quantize_pair(model, tensor, name, np.array(step, np.float32), np.array(0, kind))
    model.graph.insert_before(before, pair)
    return pair[1].outputs[0]


def _grid(bounds: Range, pixels: bool, movable: bool) -> tuple[float, float]:
    """(shift, step): x is quantized as round((x - shift) / step), -127 to 127; pixels exactly, as x - 128."""
    if pixels and movable and (bounds.low, bounds.high) == (0, 255):
        return 128.0, 1.0
    low, high = min(bounds.low, 0.0), max(bounds.high, 0.0)
    shift = (low + high) / 2 if movable else 0.0
    if abs(shift) < LEAST_SHIFT * (high - low):
        shift = 0.0
    # The Add is in float16 too: the shift is a float16 number, so that biases revert exactly what is added.
    shift = float(np.float16(shift))
    reach = max(high - shift, shift - low)
    return shift, _up_to_float16(max(reach / 127, SMALLEST))


def _fixed(linear: Linear) -> bool:
    """Whether the layer's bias cannot compensate a shift of its input."""
    nameless = linear.kind == "matmul" and linear.bias is None and linear.output.is_graph_output()
    return linear.padded or nameless


def _up_to_float16(number: float) -> float:
    """The smallest float16 number that is not below `number`."""
    half = np.float16(number)
    return float(half if float(half) >= number else np.nextafter(half, np.float16(np.inf)))


def _float16_scales(weight: QuantizedWeight) -> QuantizedWeight:
    integers, scales = weight
    return integers, np.maximum(scales.astype(np.float16), SMALLEST).astype(np.float32)


def _moved(editor: edit.Editor, tensor: ir.Value, readers: Sequence[Linear], shift: float) -> ir.Value:
    """`tensor` minus the shift, for these readers."""
    norm = tensor.producer()
    alone = {use.node for use in tensor.uses()} == {linear.node for linear in readers} and not tensor.is_graph_output()
    if norm is not None and norm.op_type == "LayerNormalization" and len(norm.inputs) > 2 and alone:
        beta = values.floats_of(norm.inputs[2])
        if beta is not None:
            editor.set_input(norm, 2, (beta - shift).astype(np.float32))
            return tensor
    minus = editor.constant(np.array(-shift, np.float32), f"{tensor.name}.shift")
    return editor.node(readers[0].node, "Add", [tensor, minus], f"{tensor.name}/shifted", tensor.shape)[0]


def refuse(model: ir.Model, profiles: Sequence[Profile], name: str) -> None:
    """Raise an error if TensorRT's documentation excludes the graph `name`, before a build that takes minutes."""
    linter.refuse(linter.lint(model, (support.nearest_version(tensorrt_api.require()),), profiles), name)


BACKEND = placement.PlacementBackend(GAIN_THRESHOLD, reasons_for_float, write, write_fp8=write_fp8, refuse=refuse)
