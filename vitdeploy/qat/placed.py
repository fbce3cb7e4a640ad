"""A placement read back as numbers: which layers are in INT8, with which integers, steps and biases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.linears import find_linears, is_dequantized, layer_name
from vitdeploy.graph.values import array_of, only_user, stem

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
# How the operators that stand in front of a quantizer are named.
INSERTED = (".hidden", ".channels")


@dataclass(frozen=True)
class PlacedInput:
    """The uint8 tensor that layers read: x is quantized as round((x * factor + offset) / step) + zero.

    `name` is the tensor's; `factor` and `offset` [channels] are of the operators in front of it, None without any.
    """

    name: str
    step: np.float32
    zero: int
    factor: Floats | None = None
    offset: Floats | None = None


@dataclass(frozen=True)
class PlacedLayer:
    """One linear or convolution: `weight` as its integers stand for it, [out, in, ...] as PyTorch has it.

    `codes` are the integers in the same shape and `steps` [out] theirs; both None in float. `read` is None in float
    and where the runtime quantizes what the layer reads. `output` is the step of the layer's own output, of queries
    and keys in INT8.
    """

    name: str
    weight: Floats
    bias: Floats
    codes: npt.NDArray[np.int8] | None = None
    steps: npt.NDArray[np.float32] | None = None
    read: PlacedInput | None = None
    output: np.float32 | None = None
    source: Indices | None = None


def read_placed(model: ir.Model) -> dict[str, PlacedLayer]:
    """All linears and convolutions of a placement, of OpenVINO's or ONNX Runtime's form, by name."""
    found: dict[str, PlacedLayer] = {}
    for node in model.graph:
        if node.op_type == "MatMulIntegerToFloat":
            found[layer_name(node)] = _fused(node)
        elif node.op_type in ("MatMul", "Conv") and is_dequantized(node.inputs[1]):
            found[layer_name(node)] = _explicit(node)
    for linear in find_linears(model):
        weight = linear.weight.T if linear.kind == "matmul" else linear.weight
        bias = np.zeros(len(weight)) if linear.bias is None else linear.bias
        found[linear.name] = PlacedLayer(linear.name, weight.astype(np.float64), bias.astype(np.float64))
    return found


def read_norms(model: ir.Model) -> dict[str, tuple[Floats, Floats]]:
    """Scale and shift of every LayerNormalization that has both, by the name of its node."""
    found = {}
    for node in model.graph:
        if node.op_type == "LayerNormalization" and len(node.inputs) > 2:
            gamma, beta = (array_of(value, overridable=True) for value in node.inputs[1:3])
            if gamma is not None and beta is not None and gamma.ndim == 1:
                found[str(node.name)] = (gamma.astype(np.float64), beta.astype(np.float64))
    return found


def without_copies(layers: Mapping[str, PlacedLayer], second: str, first: str) -> dict[str, PlacedLayer]:
    """The layers with the copies of hidden channels between two of them taken for one channel each, as in the float
    graph; the second layer's `source` says which was which."""
    read = layers[second].read
    source = copies_of(read) if read is not None else None
    if source is None:
        return dict(layers)
    one, two = layers[first], layers[second]
    places = np.searchsorted(source, np.arange(source[-1] + 1))  # the first copy of each
    counts = np.bincount(source)
    merged = _merged(two.weight, source) / counts[:, None].T
    one = replace(
        one,
        weight=one.weight[places],
        bias=one.bias[places],
        codes=None if one.codes is None else one.codes[places],
        steps=None if one.steps is None else one.steps[places],
    )
    assert two.codes is not None
    codes = np.rint(_merged(two.codes.astype(np.float64), source) / counts).astype(np.int8)
    return {**layers, first: one, second: replace(two, weight=merged, codes=codes, source=source)}


def copies_of(read: PlacedInput) -> Indices | None:
    """The channel that each input channel is a copy of; None without copies.

    m copies stand next to each other, with offsets from -h to h around zero; an only one has none (`channel_split`).
    """
    if read.offset is None or not read.offset.any():
        return None
    offsets, source, channel, place = read.offset, [], 0, 0
    tiny = 1e-5 * float(np.abs(offsets).max())
    while place < len(offsets):
        end = place
        if abs(offsets[place]) > tiny:
            end = next((i for i in range(place, len(offsets)) if abs(offsets[i] + offsets[place]) <= tiny), place)
        source += [channel] * (end - place + 1)
        channel, place = channel + 1, end + 1
    return np.array(source, np.int64) if channel < len(offsets) else None


def _merged(weight: Floats, source: Indices) -> Floats:
    """The sum of the columns of each channel's copies."""
    merged = np.zeros((weight.shape[0], int(source[-1]) + 1))
    np.add.at(merged.T, source, weight.T)
    return merged


def _fused(node: ir.Node) -> PlacedLayer:
    quantized, codes, _, steps, _, _, *bias = node.inputs
    name, integers = layer_name(node), _array(codes)
    return _layer(name, integers.T, _array(steps), _array(bias[0]) if bias else None, _input(quantized))


def _explicit(node: ir.Node) -> PlacedLayer:
    name, weight = layer_name(node), _producer(node.inputs[1])
    integers, steps = _array(weight.inputs[0]), _array(weight.inputs[1])
    output, bias = node.outputs[0], None
    if node.op_type == "Conv":
        bias = _array(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
    else:
        integers = integers.T
        add = only_user(output)
        if add is not None and add.op_type == "Add":
            other = array_of(add.inputs[1] if add.inputs[0] is output else add.inputs[0], overridable=True)
            if other is not None and other.shape == steps.shape:
                bias, output = other, add.outputs[0]
    read = _input(_producer(node.inputs[0]).inputs[0]) if is_dequantized(node.inputs[0]) else None
    layer = _layer(name, integers, steps, bias, read)
    behind = [use.node for use in output.uses() if use.node.op_type == "QuantizeLinear"]
    zero = _array(behind[0].inputs[2]) if behind else None
    if zero is not None and zero.dtype == np.int8:
        return replace(layer, output=np.float32(_array(behind[0].inputs[1])))
    return layer


def _layer(
    name: str,
    codes: npt.NDArray[Any],
    steps: npt.NDArray[Any],
    bias: npt.NDArray[Any] | None,
    read: PlacedInput | None,
) -> PlacedLayer:
    wide = steps.astype(np.float64).reshape(-1, *(1,) * (codes.ndim - 1))
    vector = np.zeros(len(codes)) if bias is None else bias.astype(np.float64)
    return PlacedLayer(name, codes * wide, vector, np.ascontiguousarray(codes), steps, read)


def _input(quantized: ir.Value | None) -> PlacedInput:
    node = _producer(quantized)
    value, step, zero = node.inputs
    assert value is not None
    return PlacedInput(str(value.name), np.float32(_array(step)), int(_array(zero)), *_operators(value))


def _operators(value: ir.Value) -> tuple[Floats | None, Floats | None]:
    """Factor and offset of the Mul and the Add that `channel_split` and `channels` put in front of a quantizer."""
    found: dict[str, Floats] = {}
    above: ir.Value | None = value
    for operator in ("Add", "Mul"):
        node = above.producer() if above is not None else None
        if node is not None and node.op_type == operator and stem(node).endswith(INSERTED):
            found[operator] = _array(node.inputs[1]).astype(np.float64).ravel()
            above = node.inputs[0]
    if "Mul" not in found:
        return None, None
    return found["Mul"], found.get("Add", np.zeros(len(found["Mul"])))


def _array(value: ir.Value | None) -> npt.NDArray[Any]:
    array = array_of(value, overridable=True)
    assert array is not None
    return array


def _producer(value: ir.Value | None) -> ir.Node:
    node = value.producer() if value is not None else None
    assert node is not None
    return node
