"""Channels of very different ranges in front of one quantizer: a Mul, and an Add, bring them to one range.

    conv(x, W) + b = conv((x - c) / s, s W) + (b + sum of c W)        c, s: one number for each input channel

Exact up to rounding for any s > 0; with a shift c only where the layer pads nothing, as zeros around the shifted input
are not zeros around x. The scale is SmoothQuant's (arXiv 2211.10438, equation 4), here not folded into what makes x:
OpenVINO takes both operators into the quantizer, which then has a step for each channel. In front of a depthwise
convolution the weights do not get any harder to round, however much the scales differ. Linears are left alone: what
makes their inputs takes a scale for nothing (`smoothing`), or they have their own, more careful one (`hidden`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.analysis.rows import Linear
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.passes.folds import image_bounds
from vitdeploy.quantization.channel_split import ALPHAS, balanced
from vitdeploy.quantization.fold import Fold, FoldRequest
from vitdeploy.quantization.products import Products, products_error, products_of, weight_of
from vitdeploy.quantization.ranges import range_of, step_of
from vitdeploy.quantization.statistics import Numbers, Statistics
from vitdeploy.spec import WeightBits

# The operators are free only where the quantizer takes them in: what they must at least divide the expected error by.
GAIN = 1.2


@dataclass(frozen=True)
class _Tensor:
    """The tensor that one quantizer takes, with the layers that read it."""

    value: ir.Value
    found: Statistics
    linears: tuple[Linear, ...]

    @property
    def layers(self) -> list[Products]:
        return [products_of(linear) for linear in self.linears]


def scale_channels(
    model: ir.Model, statistics: Mapping[str, Statistics], request: FoldRequest
) -> tuple[dict[str, Statistics], list[Fold]]:
    """Put a Mul, or a Mul and an Add, in front of convolutions wherever that lessens the expected error enough.

    Pixels stay as they are: they are integers already. Layers that will not be quantized read a tensor as it was.
    """
    editor, known, folds = Editor(model), dict(statistics), []
    readers: dict[ir.Value, list[Linear]] = {}
    for linear in editor.linears:
        if linear.name in request.layers and str(linear.input.name) in known:
            readers.setdefault(linear.input, []).append(linear)
    for value, linears in readers.items():
        if any(linear.kind != "conv" for linear in linears) or image_bounds(linears[0]) is not None:
            continue
        tensor = _Tensor(value, known[str(value.name)], tuple(linears))
        shift, scale, fold = _best(tensor, request.bits)
        if fold.gain < GAIN:
            continue
        known[str(_write(editor, tensor, shift, scale).name)] = tensor.found.moved(shift, scale)
        folds.append(fold)
    return known, folds


def _best(tensor: _Tensor, bits: WeightBits) -> tuple[Numbers, Numbers, Fold]:
    """(shift, scale, what was chosen) with the least expected error."""
    found, layers = tensor.found.without_covariance(), tensor.layers
    names = tuple(linear.name for linear in tensor.linears)
    ones, zeros = np.ones(len(found.low)), np.zeros(len(found.low))
    strongest = [layer.strongest(len(ones))[:, None] for layer in layers]
    before = _error(found, layers, zeros, ones, bits)
    least, best = before, (zeros, ones, Fold(names, None, False, 1.0))
    padded = any(linear.padded for linear in tensor.linears)
    for shifted in (False,) if padded else (False, True):
        shift = (found.low + found.high) / 2 if shifted else zeros
        for alpha in (None, *ALPHAS):
            scale = ones if alpha is None else balanced(found.moved(shift, ones), strongest, alpha)
            error = _error(found, layers, shift, scale, bits)
            if error < least:
                least, best = error, (shift, scale, Fold(names, alpha, shifted, before / error))
    return best


def _error(found: Statistics, layers: Sequence[Products], shift: Numbers, scale: Numbers, bits: WeightBits) -> float:
    moved = found.moved(shift, scale)
    step = step_of(range_of(moved))
    return sum(products_error(moved, layer.scaled(scale), step, bits) for layer in layers)


def _write(editor: Editor, tensor: _Tensor, shift: Numbers, scale: Numbers) -> ir.Value:
    """Returns what the layers read now: (x - shift) / scale."""
    value = insert_channels(editor, tensor.linears, 1 / scale, -shift / scale)
    for linear, layer in zip(tensor.linears, tensor.layers, strict=True):
        moved = layer.of_constant(shift)
        weight = weight_of(linear, layer.scaled(scale).weights)
        editor.set_linear(linear, weight, moved if linear.bias is None else linear.bias + moved)
    return value


def insert_channels(editor: Editor, linears: Sequence[Linear], factor: Numbers, offset: Numbers) -> ir.Value:
    """Put x * factor + offset, both [channels], in front of the layers that read x; returns what they read now."""
    first = linears[0]
    value, name, wide = first.input, f"{first.name}.channels", (-1, *(1,) * (first.weight.ndim - 2))
    for operator, numbers in (("Mul", factor), ("Add", offset)):
        if operator == "Mul" or numbers.any():
            vector = editor.constant(numbers.astype(np.float32).reshape(wide), f"{name}.{operator.lower()}")
            [value] = editor.node(first.node, operator, [value, vector], name, first.input.shape)
    for linear in linears:
        linear.node.replace_input_with(0, value)
    return value
