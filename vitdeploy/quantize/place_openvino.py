"""OpenVINO CPU: explicit Q/DQ around every linear and convolution.

uint8 activations and int8 weights on a pair of DequantizeLinear nodes; the plugin's low-precision transformations move
both behind the product. No Q on any output: the next LayerNormalization, GELU and residual Add stay float.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from vitdeploy.graph.linears import Linear
from vitdeploy.quantize.insert import Quantizers, add_constant
from vitdeploy.quantize.observers import Range
from vitdeploy.quantize.ranges import quantize_weight

KINDS = ("matmul", "conv")


def write(model: ir.Model, linears: Sequence[Linear], ranges: Mapping[str, Range]) -> None:
    """Quantize the given layers in place."""
    quantizers = Quantizers(model, ranges)
    dequantized: dict[str, ir.Value] = {}
    for linear in linears:
        activation, scale, zero_point = quantizers.quantize(linear.input, linear.node)
        name = str(linear.input.name)
        if name not in dequantized:
            node = ir.node("DequantizeLinear", [activation, scale, zero_point], name=f"{name}/DequantizeLinear")
            node.outputs[0].name = f"{name}/dequantized"
            model.graph.insert_before(linear.node, node)
            dequantized[name] = node.outputs[0]
        linear.node.replace_input_with(0, dequantized[name])
        linear.node.replace_input_with(1, _weight(model, linear))


def _weight(model: ir.Model, linear: Linear) -> ir.Value:
    quantized, scales = quantize_weight(linear.weight, linear.out_axis)
    stem = f"{linear.name}.weight"
    node = ir.node(
        "DequantizeLinear",
        [add_constant(model, f"{stem}.int8", quantized), add_constant(model, f"{stem}.scale", scales)],
        {"axis": linear.out_axis},
        name=f"{stem}/DequantizeLinear",
    )
    node.outputs[0].name = f"{stem}/dequantized"
    model.graph.insert_before(linear.node, node)
    return node.outputs[0]
