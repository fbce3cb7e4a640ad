"""Batch normalisation, and any scale and shift of whole channels, folded into the convolution before it.

With running mean m and variance v: gamma (W x + b - m) / sqrt(v + eps) + beta = (s W) x + s (b - m) + beta,
s = gamma / sqrt(v + eps). Source: arXiv 1502.03167, section 3.1. Computed in float64 and rounded once.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.edit import Names, bypass
from vitdeploy.graph.values import array_of, operands, producer

Floats = npt.NDArray[np.float64]


def fold_into_convolutions(model: ir.Model) -> int:
    """Fold BatchNormalization, Mul, Div, Add and Sub by constants per channel. Returns how many nodes went."""
    count = 0
    for node in list(model.graph):
        if node.op_type in ("BatchNormalization", "Mul", "Div", "Add", "Sub") and node.domain == "":
            count += _fold(model, node)
    return count


def _fold(model: ir.Model, node: ir.Node) -> bool:
    # The convolution is the first input; the constant of an Add or Mul may come first too.
    for value in node.inputs[: 2 if node.op_type in ("Add", "Mul") else 1]:
        convolution = producer(value, "Conv")
        if convolution is None or value is None or len(value.uses()) != 1 or value.is_graph_output():
            continue
        weight, bias = array_of(convolution.inputs[1]), None
        if weight is None or weight.dtype != np.float32:
            continue
        if len(convolution.inputs) > 2 and convolution.inputs[2] is not None:
            bias = array_of(convolution.inputs[2])
            if bias is None:
                continue
        affine = _affine(node, value, weight.shape[0], weight.ndim)
        if affine is None or not all(np.all(np.isfinite(part)) for part in affine):
            continue
        _rewrite(model, convolution, weight, bias, *affine)
        return bypass(node, value)
    return False


def _affine(node: ir.Node, value: ir.Value, channels: int, rank: int) -> tuple[Floats, Floats] | None:
    """(scale, shift), each [channels], of a node that computes scale * value + shift for each channel."""
    ones, zeros = np.ones(channels), np.zeros(channels)
    if node.op_type == "BatchNormalization":
        arrays = [array_of(constant) for constant in node.inputs[1:]]
        if len(node.outputs) != 1 or node.attributes.get_int("training_mode", False) or len(arrays) != 4:
            return None
        if any(array is None or array.shape != (channels,) for array in arrays):
            return None
        gamma, beta, mean, variance = (array.astype(np.float64) for array in arrays if array is not None)
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = gamma / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
            return scale, beta - scale * mean
    pair = operands(node, node.op_type)
    if pair is None:
        return None
    constant = _channels(array_of(pair[1] if pair[0] is value else pair[0]), channels, rank)
    if constant is None:
        return None
    if node.op_type in ("Mul", "Div"):
        with np.errstate(divide="ignore"):
            return (constant if node.op_type == "Mul" else 1 / constant), zeros
    return ones, (constant if node.op_type == "Add" else -constant)


def _channels(array: npt.NDArray[Any] | None, channels: int, rank: int) -> Floats | None:
    """[channels] of a constant that differs by channel only, as ONNX broadcasts it onto [N, channels, ...]."""
    if array is None or array.dtype != np.float32 or array.ndim > rank:
        return None
    shape = [1] * (rank - array.ndim) + list(array.shape)
    if array.size != shape[1] or array.size not in (1, channels):
        return None
    return np.broadcast_to(array.ravel().astype(np.float64), (channels,))


def _rewrite(
    model: ir.Model,
    convolution: ir.Node,
    weight: npt.NDArray[Any],
    bias: npt.NDArray[Any] | None,
    scale: Floats,
    shift: Floats,
) -> None:
    old = convolution.inputs[1]
    assert old is not None
    if not np.all(scale == 1):
        column = scale.reshape(-1, *(1,) * (weight.ndim - 1))
        folded = Names(model).constant((weight * column).astype(np.float32), f"{old.name}.folded")
        convolution.replace_input_with(1, folded)
    moved = shift + (scale * bias if bias is not None else 0.0)
    new_bias = Names(model).constant(moved.astype(np.float32), f"{old.name}.bias")
    convolution.resize_inputs(3)
    convolution.replace_input_with(2, new_bias)
