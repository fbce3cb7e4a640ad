"""ONNX Runtime CPU: QuantizeLinear and com.microsoft.MatMulIntegerToFloat, written into the graph.

Plain Q/DQ around MatMul + bias Add is slower than float here: MatMulAddFusion turns the pair into a Gemm, which the
Q/DQ fusion does not take. The fused operator has an INT8 product, a float output and the bias inside, with no session
option needed. Only uint8 x int8 has VNNI kernels. Attention becomes one operator too, in float. Convolutions stay
float: there is no INT8 convolution with a float output.

INT4 weights are com.microsoft.MatMulNBits. DequantizeLinear in front of a MatMul becomes the same operator, but not
before a session is made, which takes more memory then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.analysis.linears import Linear, find_linears, is_place, is_ranked
from vitdeploy.graph.edit import Names
from vitdeploy.quantization.attention_onnxruntime import DOMAIN, fuse_attention
from vitdeploy.quantization.backend import FourBitForm, PlacementBackend
from vitdeploy.quantization.fold import GainThreshold
from vitdeploy.quantization.groups import LOWEST, GroupedWeight
from vitdeploy.quantization.insert import Quantizers
from vitdeploy.quantization.ranges import QuantizedWeight, Range
from vitdeploy.quantization.scores import separate_scores

# A Mul and an Add behind an activation are passes over memory of their own.
GAIN_THRESHOLD = GainThreshold(scale=2.0, copies=3.0)
# `accuracy_level` of MatMulNBits: rows are quantized to INT8, with a scale for each group.
INT8_ROWS = 4


def shape(model: ir.Model, ignored: Callable[[str], bool]) -> None:
    """Bring the float graph into the form that is fast in INT8, in place; exact. Layers that are `ignored` stay."""
    separate_scores(model, ignored)


def reasons_for_float(model: ir.Model, linears: Sequence[Linear]) -> dict[str, str]:
    """Why layers are better left in float here, by their names."""
    reasons = {}
    for linear in linears:
        if linear.kind != "matmul":
            reasons[linear.name] = f"a {linear.kind} is faster in float on this target"
        elif is_ranked(linear):
            reasons[linear.name] = "its outputs are ranked"
        elif is_place(linear):
            reasons[linear.name] = "its outputs say where features are sampled"
    return reasons


def write(
    model: ir.Model, linears: Sequence[Linear], ranges: Mapping[str, Range], weights: Mapping[str, QuantizedWeight]
) -> tuple[str, ...]:
    """Quantize the given layers in place. Returns the products of queries and keys that are also in INT8: none."""
    names = {linear.name for linear in linears}
    fuse_attention(model)
    quantizers = Quantizers(model, ranges)
    if linears:
        model.opset_imports[DOMAIN] = 1
    for linear in [each for each in find_linears(model) if each.name in names]:
        activation, scale, zero_point = quantizers.quantize(linear.input, linear.node)
        quantized, weight_scales = weights[linear.name]
        stem, fresh = f"{linear.name}.weight", Names(model)
        inputs = [
            activation,
            fresh.constant(quantized, f"{stem}.int8"),
            scale,
            fresh.constant(weight_scales, f"{stem}.scale"),
            zero_point,
            fresh.constant(np.zeros_like(weight_scales, dtype=np.int8), f"{stem}.zero_point"),
        ]
        bias = (
            None
            if linear.bias_add is None
            else next(v for v in linear.bias_add.inputs if v is not linear.node.outputs[0])
        )
        node = fresh.node(
            "MatMulIntegerToFloat",
            [*inputs, bias] if bias is not None else inputs,
            f"{linear.name}/MatMulIntegerToFloat",
            domain=DOMAIN,
        )
        _replace(model, linear, node)
    return ()


def write_int4(model: ir.Model, linears: Sequence[Linear], weights: Mapping[str, GroupedWeight]) -> None:
    """Let MatMulNBits multiply by the weights of the given layers, in place: rows of INT8 by codes of 4 bits, two in a
    byte, the first in its lower half; 8 stands for zero."""
    fuse_attention(model)
    if linears:
        model.opset_imports[DOMAIN] = 1
    for linear in [each for each in find_linears(model) if each.name in weights]:
        weight, fresh, stem = weights[linear.name], Names(model), f"{linear.name}.weight"
        inputs, outputs = weight.codes.shape
        codes = (weight.codes.T - LOWEST).astype(np.uint8).reshape(outputs, -1, weight.group)
        node = fresh.node(
            "MatMulNBits",
            [
                linear.input,
                fresh.constant(codes[..., ::2] | codes[..., 1::2] << 4, f"{stem}.int4"),
                fresh.constant(weight.scales.T.ravel(), f"{stem}.scale"),
            ],
            f"{linear.name}/MatMulNBits",
            {"K": inputs, "N": outputs, "bits": 4, "block_size": weight.group, "accuracy_level": INT8_ROWS},
            domain=DOMAIN,
        )
        old, new = linear.node.outputs[0], node.outputs[0]
        new.type, new.shape = old.type, old.shape
        ir.convenience.replace_nodes_and_values(model.graph, linear.node, [linear.node], [node], [old], [new])


def _replace(model: ir.Model, linear: Linear, node: ir.Node) -> None:
    last = linear.bias_add or linear.node
    old, new = last.outputs[0], node.outputs[0]
    new.type, new.shape = old.type, old.shape
    removed = [linear.node] if linear.bias_add is None else [linear.bias_add, linear.node]
    ir.convenience.replace_nodes_and_values(model.graph, last, removed, [node], [old], [new])


BACKEND = PlacementBackend(
    GAIN_THRESHOLD, reasons_for_float, write, shape=shape, int4=FourBitForm(write_int4, shape=shape)
)
