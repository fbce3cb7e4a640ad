"""Exact folds that make the input of a linear easier to quantize: one shift and one scale a channel.

    y = x W + b = ((x - c) / s) (diag(s) W) + (b + c W)

What makes x takes the left factor: gamma and beta of a LayerNormalization; or the columns of the value linear in front
of an attention's projection, as rows of softmax sum to one. Sources: SmoothQuant (arXiv 2211.10438, equation 4) for s
with c = 0, RepQ-ViT (arXiv 2212.08254, equations 9 to 12) for both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.attention import find_attentions
from vitdeploy.graph.analysis.layout import exclusive, leaves, origin
from vitdeploy.graph.analysis.linears import Linear
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.passes.biases import projection_of
from vitdeploy.graph.values import floats_of
from vitdeploy.quantization.fold import Fold, FoldRequest
from vitdeploy.quantization.products import expected_error
from vitdeploy.quantization.statistics import Numbers, Statistics
from vitdeploy.spec import WeightBits

ALPHAS = tuple(i / 10 for i in range(11))
# Share of the error before: the error after a fold never counts as less, as when a layer reads the same of all images.
LEAST_ERROR = 1e-6


@dataclass(frozen=True)
class _Input:
    """One quantized tensor with the layers that read it, and the bits of their weights."""

    name: str
    found: Statistics
    linears: tuple[Linear, ...]
    bits: WeightBits

    def error(self, shift: Numbers, scale: Numbers) -> float:
        """The expected error with this shift and scale."""
        factors = scale.astype(np.float32)[:, None]
        moved = self.found.without_covariance().moved(shift, scale)
        return expected_error(moved, [factors * each.weight for each in self.linears], bits=self.bits)


def smooth_norms(
    model: ir.Model, statistics: Mapping[str, Statistics], request: FoldRequest
) -> tuple[dict[str, Statistics], list[Fold]]:
    """Fold a shift and a scale into every LayerNormalization that only linears read."""
    editor, known, folds = Editor(model), dict(statistics), []
    for node in list(model.graph):
        if node.op_type != "LayerNormalization":
            continue
        gamma, beta = floats_of(node.inputs[1]), floats_of(node.inputs[2]) if len(node.inputs) > 2 else None
        linears = _readers(editor, node.outputs[0], len(gamma)) if gamma is not None and gamma.ndim == 1 else []
        inputs = _inputs(linears, known, request)
        if gamma is None or beta is None or not inputs:
            continue
        shift, scale, fold = _best(inputs)
        if fold.gain <= 1:
            continue
        editor.set_input(node, 1, (gamma / scale).astype(np.float32))
        editor.set_input(node, 2, ((beta - shift) / scale).astype(np.float32))
        _take_back(editor, inputs, shift, scale, known)
        folds.append(fold)
    return known, folds


def smooth_values(
    model: ir.Model, statistics: Mapping[str, Statistics], request: FoldRequest
) -> tuple[dict[str, Statistics], list[Fold]]:
    """The same for the projection behind every attention, through the values."""
    editor, known, folds = Editor(model), dict(statistics), []
    for attention in find_attentions(model):
        linear = editor.linear_behind(origin(attention.value))
        found = leaves(linear.output) if linear is not None else None
        if linear is None or found is None:
            continue
        width = linear.weight.shape[1]
        columns = exclusive(found, attention.value, attention.mix, width)
        if columns is None or (columns != columns[..., :1, :]).any():
            continue
        behind = projection_of(editor, attention, columns[..., :1, :])
        if behind is None or len(np.unique(behind[1])) < len(behind[1]):
            continue
        projection, channels = behind
        inputs = _inputs([projection], known, request)
        if not inputs:
            continue
        shift, scale, fold = _best(inputs)
        if fold.gain <= 1:
            continue
        of_columns, at_columns = np.ones(width), np.zeros(width)
        of_columns[channels], at_columns[channels] = scale, shift
        bias = np.zeros(width) if linear.bias is None else linear.bias
        editor.set_linear(linear, linear.weight / of_columns, (bias - at_columns) / of_columns)
        _take_back(editor, inputs, shift, scale, known)
        folds.append(fold)
    return known, folds


def _readers(editor: Editor, value: ir.Value, width: int) -> list[Linear]:
    """The linears that read rows of `value`, whole and in order; [] if anything else reads it."""
    by_node = {linear.node: linear for linear in editor.linears if linear.kind == "matmul"}
    readers = []
    for leaf in leaves(value) or ():
        in_order = leaf.source.shape[-1:] == (width,) and (leaf.source % width == np.arange(width)).all()
        linears = [by_node.get(node) for node in leaf.readers]
        if not in_order or leaf.value.is_graph_output():
            return []
        for linear in linears:
            if linear is None or linear.input is not leaf.value:
                return []
            readers.append(linear)
    return readers


def _inputs(linears: Sequence[Linear], known: Mapping[str, Statistics], request: FoldRequest) -> list[_Input]:
    """The linears by the tensor that they read; [] if one of these was not observed, or none is quantized."""
    names = dict.fromkeys(str(linear.input.name) for linear in linears)
    if any(name not in known for name in names) or not any(linear.name in request.layers for linear in linears):
        return []
    return [_Input(n, known[n], tuple(each for each in linears if each.input.name == n), request.bits) for n in names]


def balanced(found: Statistics, weights: Sequence[npt.NDArray[np.floating]], alpha: float) -> Numbers:
    """SmoothQuant's scale [channels], s_j = max|x_j|^alpha / max|W_j|^(1 - alpha), with a geometric mean of 1."""
    reach = np.maximum(np.abs(found.low), np.abs(found.high))
    strongest = np.maximum.reduce([np.abs(weight).max(axis=1) for weight in weights])
    usable = (reach > 0) & (strongest > 0)
    scale = np.ones(len(reach))
    if usable.any():
        scale[usable] = reach[usable] ** alpha / strongest[usable] ** (1 - alpha)
        scale[usable] /= np.exp(np.log(scale[usable]).mean())
    return scale


def _best(inputs: Sequence[_Input]) -> tuple[Numbers, Numbers, Fold]:
    """(shift, scale, what was chosen) with the least expected error; nothing at all is a candidate too."""
    low = np.minimum.reduce([each.found.low for each in inputs])
    high = np.maximum.reduce([each.found.high for each in inputs])
    whole = replace(inputs[0].found, low=low, high=high)
    weights = [linear.weight for each in inputs for linear in each.linears]
    ones, zeros = np.ones(len(low)), np.zeros(len(low))
    layers = tuple(linear.name for each in inputs for linear in each.linears)
    before = sum(each.error(zeros, ones) for each in inputs)
    least, best = before, (zeros, ones, Fold(layers, None, False, 1.0))
    # A shift needs a bias behind it, and an output of the graph keeps its name: no Add can come in front of it.
    fixed = any(one.bias is None and one.output.is_graph_output() for each in inputs for one in each.linears)
    for shifted in (False,) if fixed else (False, True):
        shift = (low + high) / 2 if shifted else zeros
        for alpha in (None, *ALPHAS):
            scale = ones if alpha is None else balanced(whole.moved(shift, ones), weights, alpha)
            error = sum(each.error(shift, scale) for each in inputs)
            if error < least:
                gain = before / max(error, before * LEAST_ERROR)
                least, best = error, (shift, scale, Fold(layers, alpha, shifted, gain))
    return best


def _take_back(
    editor: Editor, inputs: Sequence[_Input], shift: Numbers, scale: Numbers, known: dict[str, Statistics]
) -> None:
    """Undo the shift and the scale in the weights and biases of the layers that read them."""
    for each in inputs:
        for linear in each.linears:
            bias = np.zeros(linear.weight.shape[1]) if linear.bias is None else linear.bias
            editor.set_linear(linear, scale[:, None] * linear.weight, bias + shift @ linear.weight)
        known[each.name] = each.found.moved(shift, scale)
