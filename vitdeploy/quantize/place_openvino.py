"""OpenVINO CPU: explicit Q/DQ around every linear and convolution.

uint8 activations and int8 weights on a pair of DequantizeLinear nodes; the plugin's low-precision transformations move
both behind the product. No Q on any output: the next LayerNormalization, GELU and residual Add stay float.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.canonical.edit import add_constant
from vitdeploy.graph.linears import Linear
from vitdeploy.quantize.insert import Quantizers
from vitdeploy.quantize.ranges import QuantizedWeight, Range, quantize_weight

KINDS = ("matmul", "conv")


def write(
    model: ir.Model, linears: Sequence[Linear], ranges: Mapping[str, Range], weights: Mapping[str, QuantizedWeight]
) -> None:
    """Quantize the given layers in place."""
    known = dict(ranges)
    quantizers = Quantizers(model, known)
    dequantized: dict[str, ir.Value] = {}
    for each in linears:
        linear = _in_unit_range(model, each, known) if _takes_pixels(each) else each
        activation, scale, zero_point = quantizers.quantize(linear.input, linear.node)
        name = str(linear.input.name)
        if name not in dequantized:
            node = ir.node("DequantizeLinear", [activation, scale, zero_point], name=f"{name}/DequantizeLinear")
            node.outputs[0].name = f"{name}/dequantized"
            model.graph.insert_before(linear.node, node)
            dequantized[name] = node.outputs[0]
        linear.node.replace_input_with(0, dequantized[name])
        linear.node.replace_input_with(1, _weight(model, linear, weights.get(linear.name)))


def _takes_pixels(linear: Linear) -> bool:
    """The layer reads uint8 pixels, cast to float and nothing else."""
    cast = linear.input.producer()
    source = cast.inputs[0] if cast is not None and cast.op_type == "Cast" else None
    while source is not None and (move := source.producer()) is not None and move.op_type == "Transpose":
        source = move.inputs[0]
    return source is not None and source.dtype == ir.DataType.UINT8


def _in_unit_range(model: ir.Model, linear: Linear, ranges: dict[str, Range]) -> Linear:
    """The layer on pixels / 255 with its weights times 255: the same function, and every pixel still exact.

    On plain pixels the step of the quantizer is 1 and its zero point 0; OpenVINO takes such a pair for an identity,
    removes it, and runs the layer in float.
    """
    name = f"{linear.input.name}/unit"
    step = add_constant(model, np.array(1 / 255, np.float32), f"{name}.step")
    node = ir.node("Mul", [linear.input, step], name=name)
    node.outputs[0].name = name
    model.graph.insert_before(linear.node, node)
    ranges[name] = Range(0.0, 1.0)
    return replace(linear, input=node.outputs[0], weight=linear.weight * np.float32(255))


def _weight(model: ir.Model, linear: Linear, rounded: QuantizedWeight | None) -> ir.Value:
    quantized, scales = rounded or quantize_weight(linear.weight, linear.out_axis)
    stem = f"{linear.name}.weight"
    node = ir.node(
        "DequantizeLinear",
        [add_constant(model, quantized, f"{stem}.int8"), add_constant(model, scales, f"{stem}.scale")],
        {"axis": linear.out_axis},
        name=f"{stem}/DequantizeLinear",
    )
    node.outputs[0].name = f"{stem}/dequantized"
    model.graph.insert_before(linear.node, node)
    return node.outputs[0]
