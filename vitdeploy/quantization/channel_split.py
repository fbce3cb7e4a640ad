"""Folds before quantization: smoothing, split channels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.attention import Attention, find_attentions
from vitdeploy.graph.analysis.rows import Indices, Linear, exclusive, leaves, origin
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.edit import Numbers as ChannelSplitNumbers
from vitdeploy.graph.passes.folds import projection_of
from vitdeploy.graph.values import floats_of, only_user
from vitdeploy.quantization.fold import Fold, FoldRequest, GainThreshold, Hidden
from vitdeploy.quantization.products import expected_error
from vitdeploy.quantization.ranges import range_of, step_of
from vitdeploy.quantization.statistics import Numbers, Statistics
from vitdeploy.spec import WeightBits

# --- Exact folds that make the input of a linear easier to quantize: one shift and one scale a channel ----------------
# y = x W + b = ((x - c) / s) (diag(s) W) + (b + c W)
#
# What makes x takes the left factor: gamma and beta of a LayerNormalization; or the columns of the value linear in
# front of an attention's projection, as rows of softmax sum to one. Sources: SmoothQuant (arXiv 2211.10438, equation 4)
# for s with c = 0, RepQ-ViT (arXiv 2212.08254, equations 9 to 12) for both.


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
        path = value_path(editor, attention)
        if path is None or len(np.unique(path[3])) < len(path[3]):
            continue
        linear, _, projection, channels = path
        width, inputs = linear.weight.shape[1], _inputs([projection], known, request)
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


def value_path(editor: Editor, attention: Attention) -> tuple[Linear, Indices, Linear, Indices] | None:
    """The linear that makes an attention's values, and its columns that they are; the projection behind, and which of
    the linear's columns each of its inputs is. None where any other values, or readers, are between."""
    linear = editor.linear_behind(origin(attention.value))
    parts = leaves(linear.output) if linear is not None else None
    if linear is None or parts is None:
        return None
    columns = exclusive(parts, attention.value, attention.mix, linear.weight.shape[1])
    if columns is None or (columns != columns[..., :1, :]).any():
        return None
    behind = projection_of(editor, attention, columns[..., :1, :])
    return None if behind is None else (linear, columns, *behind)


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
    reach = found.reach
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


# --- Channels that reach far beyond all others, between two linears with an activation in between ---------------------
# split into copies.
#
# A channel x_j that reaches m times as far as the range that the others need is quantized m times, as x_j / m with m
# offsets that lie evenly within one step. The sum of the codes is then that of x_j itself, unclipped, on the common
# step:
#
#     sum over i < m of floor(y + i / m) = floor(m y)                                    (Hermite's identity)
#
# The copies are made in front of the activation, by repeating columns of the first linear m times, and share the row of
# the second; a Mul and an Add behind the activation divide and offset them. So one massive activation costs a few
# columns, and neither the precision of all other channels nor a layer in float. Without offsets this is the channel
# splitting of arXiv 1901.09504 (section 3.2), whose copies round alike.


ACTIVATIONS = ("Elu", "Gelu", "HardSwish", "Mish", "Relu", "Sigmoid", "Softplus", "Tanh")
# No further: an activation leaves single channels near zero on most images and lets them reach far on a few.
SPLIT_ALPHAS = tuple(i / 10 for i in range(9))
# At most this share of channels is added, to a multiple of what integer kernels take at a time.
ADDED_SHARE, CHANNEL_MULTIPLE = 1 / 16, 16
# Any gain justifies the operators.
ANY_GAIN = GainThreshold(1.0, 1.0)


@dataclass(frozen=True)
class ChannelSplit:
    """The replacement of a linear's input x by x[source] / (scale * shares) + offsets, with its weight W as
    (scale W)[source].

    `scale` float64 [channels of x]; `source` int64, `shares` and `offsets` float64 [channels of the replacement], whose
    statistics are `found`. `alpha`, `gain`: as in `Hidden`.
    """

    alpha: float | None
    scale: npt.NDArray[np.float64]
    source: npt.NDArray[np.int64]
    shares: npt.NDArray[np.float64]
    offsets: npt.NDArray[np.float64]
    found: Statistics
    gain: float

    @property
    def factor(self) -> npt.NDArray[np.float64]:
        return np.asarray(1 / (self.scale[self.source] * self.shares))

    @property
    def copies(self) -> dict[int, int]:
        """The number of copies of each channel that has more than one."""
        channels, counts = np.unique(self.source, return_counts=True)
        return {int(j): int(m) for j, m in zip(channels, counts, strict=True) if m > 1}

    def weight(self, weight: ChannelSplitNumbers) -> npt.NDArray[np.float64]:
        return np.asarray((self.scale[:, None] * weight)[self.source])


def smooth_hidden(
    model: ir.Model, statistics: Mapping[str, Statistics], request: FoldRequest
) -> tuple[dict[str, Statistics], list[Hidden]]:
    """Scale the channels between two linears, and split outliers into copies, if the gain justifies the operators."""
    editor, known, done = Editor(model), dict(statistics), []
    for second in editor.linears:
        found = known.get(str(second.input.name))
        first = hidden_first(editor, second) if second.name in request.layers else None
        if found is None or first is None:
            continue
        threshold = ANY_GAIN if second.name in request.any_gain else request.threshold
        split = best_split(found, second, threshold, request.bits)
        if split is None:
            continue
        known.pop(str(second.input.name))
        known[str(_write(editor, first, second, split).name)] = split.found
        done.append(Hidden(second.name, split.alpha, split.copies, split.gain))
    return known, done


def best_split(
    found: Statistics, second: Linear, threshold: GainThreshold, bits: WeightBits = 8
) -> ChannelSplit | None:
    """The split with the least expected error at the outputs of `second`; None if none justifies its operators.

    Args:
        found: statistics of the current input of `second`.
        bits: bits of its weights.
    """
    light = found.without_covariance()
    before = expected_error(light, [second.weight], bits=bits)
    zeros, ones = np.zeros(len(found.low)), np.ones(len(found.low))
    alpha, scale, error = None, ones, before
    for each in SPLIT_ALPHAS:
        tried = balanced(found, [second.weight], each)
        now = expected_error(light.moved(zeros, tried), [tried[:, None] * second.weight], bits=bits)
        if now < error:
            alpha, scale, error = each, tried, now
    plain = _with_copies(light, second, ones, bits)
    both = _with_copies(light, second, scale, bits)
    candidates = [
        (before, None, ones, None),
        (error * threshold.scale, alpha, scale, None),
        (plain[0] * threshold.copies, None, ones, plain[1]),
        (both[0] * threshold.copies, alpha, scale, both[1]),
    ]
    _, alpha, scale, copies = min(candidates, key=lambda each: each[0])
    if copies is None and alpha is None:
        return None
    copies = np.ones(len(scale), np.int64) if copies is None else copies
    scaled = found.moved(zeros, scale)
    source, shares, moved = _split_channels(scaled, copies)
    step = step_of(range_of(moved))
    offsets = (_places(copies) - 0.5 + 0.5 / shares) * step
    after = expected_error(scaled, [scale[:, None] * second.weight], step, bits)
    moved = moved.moved(-offsets, np.ones(len(source)))
    return ChannelSplit(alpha, scale, source, shares, offsets, moved, before / after)


def _with_copies(
    found: Statistics, second: Linear, scale: npt.NDArray[np.float64], bits: WeightBits
) -> tuple[float, npt.NDArray[np.int64]]:
    """(the expected error, the copies of each channel) of x / scale."""
    scaled = found.moved(np.zeros(len(scale)), scale)
    copies = _copies(scaled.reach)
    step = step_of(range_of(_split_channels(scaled, copies)[2]))
    return expected_error(scaled, [scale[:, None] * second.weight], step, bits), copies


def _split_channels(
    scaled: Statistics, copies: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64], Statistics]:
    """For each copy: its channel, the number of that channel's copies, and the statistics of its share."""
    source = np.repeat(np.arange(len(copies)), copies)
    shares = copies[source].astype(np.float64)
    return source, shares, scaled.taken(source).moved(np.zeros(len(source)), shares)


def hidden_first(editor: Editor, second: Linear) -> Linear | None:
    """The linear whose activated output is all that `second` reads, and that nothing else reads."""
    activation = second.input.producer()
    if second.kind != "matmul" or activation is None or activation.op_type not in ACTIVATIONS:
        return None
    source = activation.inputs[0]
    first = editor.linear_behind(source) if source is not None else None
    alone = first is not None and only_user(first.output) is activation and only_user(second.input) is second.node
    return first if alone else None


def _copies(reach: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The number of copies of each channel, [channels]: for the smallest common range within the limit of copies."""
    most = len(reach) + max(int(ADDED_SHARE * len(reach)), 1)
    if len(reach) % CHANNEL_MULTIPLE == 0:
        most -= most % CHANNEL_MULTIPLE
    best, ceiling = np.ones(len(reach), np.int64), float(reach.max())
    while ceiling > 0:
        ceiling /= 1.1
        copies = np.maximum(np.ceil(reach / ceiling), 1).astype(np.int64)
        if copies.sum() > most:
            break
        best = copies
    if best.max() > 1 and len(reach) % CHANNEL_MULTIPLE == 0:
        best[int(best.argmax())] += -best.sum() % CHANNEL_MULTIPLE
    return best


def _places(copies: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """i / m for the i-th of m copies, for all channels one after the other."""
    return np.concatenate([np.arange(m) / m for m in copies])


def _write(editor: Editor, first: Linear, second: Linear, split: ChannelSplit) -> ir.Value:
    """Copy the columns and rows of the two layers, and scale them; returns what the second one reads now."""
    if len(split.source) > len(split.scale):
        copy_columns(editor, first, second, split.source)
    value = insert_scale(editor, second, split.factor, split.offsets)
    editor.set_linear(second, split.weight(second.weight))
    return value


def copy_columns(editor: Editor, first: Linear, second: Linear, source: npt.NDArray[np.int64]) -> None:
    """Give the output channels of `first` copies; `second`, whose input they become, still has its old weight."""
    editor.set_linear(first, first.weight[:, source], None if first.bias is None else first.bias[source])
    for value in (first.node.outputs[0], first.output, second.input):
        if value.shape is not None:
            value.shape = ir.Shape([*list(value.shape)[:-1], len(source)])


def insert_scale(
    editor: Editor, second: Linear, factor: npt.NDArray[np.floating], offsets: npt.NDArray[np.floating]
) -> ir.Value:
    """Put a Mul, and an Add unless all its numbers are zero, in front of `second`; returns what it reads now."""
    value, shape, name = second.input, second.input.shape, f"{second.name}.hidden"
    for operator, constant in (("Mul", factor), ("Add", offsets)):
        if operator == "Mul" or constant.any():
            vector = editor.constant(constant.astype(np.float32), f"{name}.{operator.lower()}")
            [value] = editor.node(second.node, operator, [value, vector], name, shape)
    second.node.replace_input_with(0, value)
    return value
