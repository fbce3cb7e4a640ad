"""Write Q/DQ for placements: one QuantizeLinear per tensor, and weights of 8 or 4 bits behind a DequantizeLinear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.linears import Linear
from vitdeploy.graph.edit import Names
from vitdeploy.quantization.groups import GroupedWeight
from vitdeploy.quantization.ranges import ActivationScale, Range, activation_scale


class Quantizers:
    """QuantizeLinear nodes, one for each quantized tensor, shared by all its readers."""

    def __init__(self, model: ir.Model, ranges: Mapping[str, Range]) -> None:
        self.model = model
        self.ranges = ranges
        self._made: dict[str, tuple[ir.Value, ir.Value, ir.Value]] = {}

    def quantize(self, tensor: ir.Value, before: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
        """(quantized uint8 tensor, scale, zero point); inserted before the first reader that asks."""
        name = str(tensor.name)
        if name not in self._made:
            parameters: ActivationScale = activation_scale(self.ranges[name])
            names = Names(self.model)
            scale = names.constant(np.asarray(parameters.scale), f"{name}.scale")
            zero_point = names.constant(np.asarray(parameters.zero_point), f"{name}.zero_point")
            inputs = [tensor, scale, zero_point]
            node = names.node("QuantizeLinear", inputs, f"{name}/QuantizeLinear", output=f"{name}/quantized")
            self.model.graph.insert_before(before, node)
            self._made[name] = (node.outputs[0], scale, zero_point)
        return self._made[name]


def dequantized_weight(
    model: ir.Model, linear: Linear, codes: npt.NDArray[Any], scales: npt.NDArray[np.float32]
) -> ir.Value:
    """The weight of a layer as constants in front of it: codes of 8 bits in its shape, scales [output channels]."""
    stem, names = f"{linear.name}.weight", Names(model)
    node = names.node(
        "DequantizeLinear",
        [names.constant(codes, f"{stem}.{codes.dtype.name}"), names.constant(scales, f"{stem}.scale")],
        f"{stem}/DequantizeLinear",
        {"axis": linear.out_axis},
        output=f"{stem}/dequantized",
    )
    model.graph.insert_before(linear.node, node)
    return node.outputs[0]


def dequantized_groups(model: ir.Model, linear: Linear, weight: GroupedWeight) -> ir.Value:
    """The weight of a linear as constants of int4 in front of it, with a scale for each group of inputs (opset 21)."""
    stem, names = f"{linear.name}.weight", Names(model)
    codes = names.constant(weight.codes.astype(ml_dtypes.int4), f"{stem}.int4")
    node = names.node(
        "DequantizeLinear",
        [codes, names.constant(weight.scales, f"{stem}.scale")],
        f"{stem}/DequantizeLinear",
        {"axis": 0, "block_size": weight.group},
        output=f"{stem}/dequantized",
    )
    model.graph.insert_before(linear.node, node)
    return node.outputs[0]
