"""Folds before INT8: rewrites of a float graph, in place, that keep its function.

    fold(model, statistics, request) -> (the statistics of the changed model, the changes)

Each is exact up to the rounding of new float32 weights, and folds only if that reduces the expected error. All folds
are listed in `prepare.FOLDS`.
"""

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.attention import Attention, find_attentions
from vitdeploy.graph.analysis.rows import Indices, Linear, exclusive, leaves, origin
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.passes.folds import image_bounds, projection_of
from vitdeploy.graph.values import floats_of, only_user
from vitdeploy.quantization.ranges import Numbers, Statistics, find_scores, output_of, range_of, step_of
from vitdeploy.quantization.rounding import Products, expected_error, products_error, products_of, weight_of
from vitdeploy.spec import WeightBits


@dataclass(frozen=True)
class GainThreshold:
    """The minimum gains (factors of the expected error) that justify a Mul after the activation, and copies with an Add
    and extra columns. Operators cost time, which differs by target."""

    scale: float
    copies: float


@dataclass(frozen=True)
class FoldRequest:
    """The settings of folds.

    layers: names of the layers that will be quantized; tensors that none of these reads stay unchanged.
    threshold: the gain that justifies an operator on the target.
    any_gain: the layers for which any gain justifies one.
    bits: bits of the weights.
    """

    layers: Collection[str]
    threshold: GainThreshold
    any_gain: Collection[str] = ()
    bits: WeightBits = 8


@dataclass(frozen=True)
class Fold:
    """A fold before `layers`: SmoothQuant's exponent (None: no scale), and whether channels were shifted to the middle
    of their ranges. `gain`: the expected squared error before, divided by that after."""

    layers: tuple[str, ...]
    alpha: float | None
    shifted: bool
    gain: float

    @property
    def what(self) -> str:
        words = ["channels shifted"] if self.shifted else []
        return ", ".join(words + ([f"channels scaled, exponent {self.alpha:g}"] if self.alpha is not None else []))


@dataclass(frozen=True)
class Hidden:
    """Changes of the input channels of `layer`: SmoothQuant's exponent (None: no scale), and the number of copies of
    each split channel. `gain`: the expected squared error before, divided by that after."""

    layer: str
    alpha: float | None
    copies: dict[int, int]
    gain: float

    @property
    def what(self) -> str:
        words = [f"hidden channels scaled, exponent {self.alpha:g}"] if self.alpha is not None else []
        channels = f"{len(self.copies)} hidden channel{'' if len(self.copies) == 1 else 's'}"
        splits = f"{channels} split into {sum(self.copies.values())} copies"
        return ", ".join(words + ([splits] if self.copies else []))


Folding: TypeAlias = Callable[
    [ir.Model, Mapping[str, Statistics], FoldRequest],
    tuple[dict[str, Statistics], Sequence[Fold | Hidden]],
]


# --- One shift and one scale per channel ------------------------------------------------------------------------------
# y = x W + b = ((x - c) / s) (diag(s) W) + (b + c W)
#
# The producer of x absorbs the left factor: gamma and beta of a LayerNormalization; or the columns of the value linear
# before an attention's projection, since rows of softmax sum to one. Sources: SmoothQuant (arXiv 2211.10438, equation
# 4) for s with c = 0, RepQ-ViT (arXiv 2212.08254, equations 9 to 12) for both.


ALPHAS = tuple(i / 10 for i in range(11))
# Lower bound of the error after a fold, as a share of the error before: for layers with the same input for all images.
LEAST_ERROR = 1e-6


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


def best_scale(
    linears: Sequence[Linear],
    whole: Statistics,
    weights: Sequence[npt.NDArray[np.floating]],
    error: Callable[[Numbers, Numbers], float],
    *,
    shifts: bool,
) -> tuple[Numbers, Numbers, Fold]:
    """(shift, scale, fold) with the smallest expected `error`; no change is a candidate too.

    Args:
        whole: statistics of all inputs of the linears together; `weights`: the weights of each, [channels, any].
        shifts: whether channels may be shifted to the middle of their ranges.
    """
    layers, zeros, ones = tuple(linear.name for linear in linears), np.zeros(len(whole.low)), np.ones(len(whole.low))
    before = error(zeros, ones)
    least, best = before, (zeros, ones, Fold(layers, None, False, 1.0))
    for shifted in (False, True) if shifts else (False,):
        shift = (whole.low + whole.high) / 2 if shifted else zeros
        for alpha in (None, *ALPHAS):
            scale = ones if alpha is None else balanced(whole.moved(shift, ones), weights, alpha)
            after = error(shift, scale)
            if after < least:
                gain = before / max(after, before * LEAST_ERROR)
                least, best = after, (shift, scale, Fold(layers, alpha, shifted, gain))
    return best


def smooth_norms(
    model: ir.Model, statistics: Mapping[str, Statistics], request: FoldRequest
) -> tuple[dict[str, Statistics], list[Fold]]:
    """Fold a shift and a scale into every LayerNormalization that only linears read, where it reduces the error."""
    editor, known, folds = Editor(model), dict(statistics), []
    for node in list(model.graph):
        if node.op_type != "LayerNormalization":
            continue
        gamma, beta = floats_of(node.inputs[1]), floats_of(node.inputs[2]) if len(node.inputs) > 2 else None
        if gamma is None or gamma.ndim != 1 or beta is None:
            continue
        linears = _readers(editor, node.outputs[0], len(gamma))
        chosen = _chosen(linears, known, request)
        if chosen is None:
            continue
        shift, scale, fold = chosen
        editor.set_input(node, 1, (gamma / scale).astype(np.float32))
        editor.set_input(node, 2, ((beta - shift) / scale).astype(np.float32))
        _take_back(editor, linears, shift, scale, known)
        folds.append(fold)
    return known, folds


def smooth_values(
    model: ir.Model, statistics: Mapping[str, Statistics], request: FoldRequest
) -> tuple[dict[str, Statistics], list[Fold]]:
    """Fold a shift and a scale into the values of every attention, for the projection after it."""
    editor, known, folds = Editor(model), dict(statistics), []
    for attention in find_attentions(model):
        path = value_path(editor, attention)
        if path is None or len(np.unique(path[3])) < len(path[3]):
            continue
        linear, _, projection, channels = path
        chosen = _chosen([projection], known, request)
        if chosen is None:
            continue
        shift, scale, fold = chosen
        of_columns, at_columns = np.ones(linear.weight.shape[1]), np.zeros(linear.weight.shape[1])
        of_columns[channels], at_columns[channels] = scale, shift
        editor.set_linear(linear, linear.weight / of_columns, (_bias(linear) - at_columns) / of_columns)
        _take_back(editor, [projection], shift, scale, known)
        folds.append(fold)
    return known, folds


def value_path(editor: Editor, attention: Attention) -> tuple[Linear, Indices, Linear, Indices] | None:
    """The linear that computes an attention's values, with the columns of the values; the projection after the
    attention, with the linear's column for each of its inputs. None if other values or readers are in between."""
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
    """The linears that read rows of `value`, whole and in order; [] if it has other readers."""
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


def _chosen(
    linears: Sequence[Linear], known: Mapping[str, Statistics], request: FoldRequest
) -> tuple[Numbers, Numbers, Fold] | None:
    """Shift and scale of the input of these linears; None without a gain, if a tensor was not observed, or if none of
    the linears is quantized."""
    names = dict.fromkeys(str(linear.input.name) for linear in linears)
    if any(name not in known for name in names) or not any(linear.name in request.layers for linear in linears):
        return None
    inputs = {name: known[name].without_covariance() for name in names}

    def error(shift: Numbers, scale: Numbers) -> float:
        factors = scale.astype(np.float32)[:, None]
        return sum(
            expected_error(
                found.moved(shift, scale),
                [factors * linear.weight for linear in linears if linear.input.name == name],
                bits=request.bits,
            )
            for name, found in inputs.items()
        )

    low = np.minimum.reduce([tensor.low for tensor in inputs.values()])
    high = np.maximum.reduce([each.high for each in inputs.values()])
    whole = replace(next(iter(inputs.values())), low=low, high=high)
    # A shift needs a bias after it, and a graph output keeps its name: no Add can be inserted before it.
    fixed = any(each.bias is None and each.output.is_graph_output() for each in linears)
    best = best_scale(linears, whole, [each.weight for each in linears], error, shifts=not fixed)
    return best if best[2].gain > 1 else None


def _take_back(
    editor: Editor, linears: Sequence[Linear], shift: Numbers, scale: Numbers, known: dict[str, Statistics]
) -> None:
    """Undo the shift and the scale in the weights and biases of the layers that read them."""
    for name in dict.fromkeys(str(linear.input.name) for linear in linears):
        known[name] = known[name].moved(shift, scale)
    for linear in linears:
        editor.set_linear(linear, scale[:, None] * linear.weight, _bias(linear) + shift @ linear.weight)


def _bias(linear: Linear) -> npt.NDArray[np.floating]:
    return np.zeros(linear.weight.shape[1]) if linear.bias is None else linear.bias


# --- Outlier channels between two linears with an activation in between -----------------------------------------------
# They are split into copies.
#
# A channel x_j whose range is m times that of the others is quantized m times, as x_j / m with m offsets spread evenly
# over one step. The sum of the codes is then the code of x_j itself, unclipped, on the common step:
#
#     sum over i < m of floor(y + i / m) = floor(m y)                                    (Hermite's identity)
#
# The copies are made before the activation, by repeating columns of the first linear m times, and share the row of the
# second; a Mul and an Add after the activation divide and offset them. So one massive activation costs a few columns,
# instead of the precision of all other channels or a layer in float. Without offsets this is the channel splitting of
# arXiv 1901.09504 (section 3.2), whose copies round alike.


ACTIVATIONS = ("Elu", "Gelu", "HardSwish", "Mish", "Relu", "Sigmoid", "Softplus", "Tanh")
# Upper bound: an activation keeps some channels near zero on most images, with large values on a few.
SPLIT_ALPHAS = tuple(i / 10 for i in range(9))
# At most this share of channels is added, rounded to a multiple of the channels that integer kernels process at once.
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

    def weight(self, weight: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
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
    """The split with the smallest expected error at the outputs of `second`; None if no split justifies its operators.

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
    """The linear whose activated output is the input of `second` and has no other readers."""
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
    """i / m for the i-th of m copies, for all channels in order."""
    return np.concatenate([np.arange(m) / m for m in copies])


def _write(editor: Editor, first: Linear, second: Linear, split: ChannelSplit) -> ir.Value:
    """Copy the columns and rows of the two layers, and scale them; return the new input of the second."""
    if len(split.source) > len(split.scale):
        copy_columns(editor, first, second, split.source)
    value = insert_scale(editor, [second], split.factor, split.offsets)
    editor.set_linear(second, split.weight(second.weight))
    return value


def copy_columns(editor: Editor, first: Linear, second: Linear, source: npt.NDArray[np.int64]) -> None:
    """Copy output channels of `first`, the input of `second`, which still has its old weight."""
    editor.set_linear(first, first.weight[:, source], None if first.bias is None else first.bias[source])
    for value in (first.node.outputs[0], first.output, second.input):
        if value.shape is not None:
            value.shape = ir.Shape([*list(value.shape)[:-1], len(source)])


def insert_scale(
    editor: Editor, linears: Sequence[Linear], factor: npt.NDArray[np.floating], offset: npt.NDArray[np.floating]
) -> ir.Value:
    """Insert x * factor + offset, both [channels], before the layers that read x, without the Add if all its numbers
    are zero; return their new input."""
    first = linears[0]
    value, shape, wide = first.input, first.input.shape, (-1, *(1,) * (first.weight.ndim - 2))
    name = f"{first.name}.{'hidden' if first.kind == 'matmul' else 'channels'}"
    for operator, numbers in (("Mul", factor), ("Add", offset)):
        if operator == "Mul" or numbers.any():
            vector = editor.constant(numbers.astype(np.float32).reshape(wide), f"{name}.{operator.lower()}")
            [value] = editor.node(first.node, operator, [value, vector], name, shape)
    for linear in linears:
        linear.node.replace_input_with(0, value)
    return value


# --- Channels of very different ranges before one quantizer: a Mul, and an Add, bring them to one range ---------------
#     conv(x, W) + b = conv((x - c) / s, s W) + (b + sum of c W)        c, s: one number for each input channel
#
# Exact up to rounding for any s > 0; a shift c only without padding, since zeros around the shifted input are not zeros
# around x. The scale is SmoothQuant's, but not folded into the producer of x: OpenVINO fuses both operators into the
# quantizer, which then has a step per channel. Before a depthwise convolution the weights do not get harder to round,
# however much the scales differ. Linears stay unchanged: the producers of their inputs absorb a scale at no cost, or
# they have their own, more careful one.


# The operators are free only if the quantizer absorbs them: the minimum factor by which they must reduce the error.
GAIN = 1.2


def scale_channels(
    model: ir.Model, statistics: Mapping[str, Statistics], request: FoldRequest
) -> tuple[dict[str, Statistics], list[Fold]]:
    """Insert a Mul, or a Mul and an Add, before convolutions if that reduces the expected error enough.

    Pixels stay unchanged: they are integers already. Layers that will not be quantized read the original tensor.
    """
    editor, known, folds = Editor(model), dict(statistics), []
    readers: dict[ir.Value, list[Linear]] = {}
    for linear in editor.linears:
        if linear.name in request.layers and str(linear.input.name) in known:
            readers.setdefault(linear.input, []).append(linear)
    for value, linears in readers.items():
        if any(linear.kind != "conv" for linear in linears) or image_bounds(linears[0]) is not None:
            continue
        found, layers = known[str(value.name)], [products_of(linear) for linear in linears]
        strongest = [layer.strongest(len(found.low))[:, None] for layer in layers]
        error = functools.partial(_error_of_products, found.without_covariance(), layers, request.bits)
        padded = any(linear.padded for linear in linears)
        shift, scale, fold = best_scale(linears, found.without_covariance(), strongest, error, shifts=not padded)
        if fold.gain < GAIN:
            continue
        read = insert_scale(editor, linears, 1 / scale, -shift / scale)
        for linear, layer in zip(linears, layers, strict=True):
            moved = layer.of_constant(shift)
            weight = weight_of(linear, layer.scaled(scale).weights)
            editor.set_linear(linear, weight, moved if linear.bias is None else linear.bias + moved)
        known[str(read.name)] = found.moved(shift, scale)
        folds.append(fold)
    return known, folds


def _error_of_products(
    found: Statistics, layers: Sequence[Products], bits: WeightBits, shift: Numbers, scale: Numbers
) -> float:
    moved = found.moved(shift, scale)
    step = step_of(range_of(moved))
    return sum(products_error(moved, layer.scaled(scale), step, bits) for layer in layers)


# --- Queries and keys whose product is in INT8 ------------------------------------------------------------------------
#     softmax(Q K^T) = softmax((Q T) ((K - 1 c^T) / T)^T)        T: a factor per channel, c: a shift per channel
#
# The shift adds one number, q . c, to a whole row of the scores, and the factors cancel: both are exact, and free in
# the linears that compute queries and keys. Queries and keys then have ranges of equal width, and keys are centred at
# zero, as a symmetric range needs. Sources: SageAttention (arXiv 2410.02367, section 4.2) for the shift, which uses the
# mean of each image, while this uses the middle of the calibrated range; SmoothQuant (arXiv 2211.10438, equation 4) for
# the factors.


def smooth_scores(
    model: ir.Model, statistics: Mapping[str, Statistics], request: FoldRequest
) -> tuple[dict[str, Statistics], list[Fold]]:
    """Centre the keys and balance them with the queries if that reduces the expected error of the scores.

    Scores are quantized only if both linears are; an attention without `statistics` of their outputs, under the keys of
    `output_of`, stays unchanged.
    """
    editor, known, folds = Editor(model), dict(statistics), []
    for scores in find_scores(editor, find_attentions(model)):
        names = [output_of(scores.query), output_of(scores.key)]
        if not {scores.query.name, scores.key.name} <= set(request.layers) or not set(names) <= set(known):
            continue
        query, key = (known[name] for name in names)
        queries = query.taken(scores.partner)  # in the order of the keys
        zeros, ones = np.zeros(len(key.low)), np.ones(len(key.low))
        before = least = _error(queries, key)
        shift, factor, done = zeros, ones, Fold((scores.query.name, scores.key.name), None, False, 1.0)
        for c in (zeros, (key.low + key.high) / 2):
            moved = key.moved(c, ones)
            for alpha, t in ((None, ones), (0.5, np.sqrt(_reach(moved) / _reach(queries)))):
                error = _error(queries.moved(zeros, 1 / t), moved.moved(zeros, t))
                if error < least:
                    least, shift, factor = error, c, t
                    done = Fold(done.layers, alpha, bool(c.any()), before / error)
        if done.gain > 1:
            of_query = np.ones(len(factor))
            of_query[scores.partner] = factor
            key_linear, query_linear = scores.key, scores.query
            editor.set_linear(query_linear, query_linear.weight * of_query, _bias(query_linear) * of_query)
            editor.set_linear(key_linear, key_linear.weight / factor, (_bias(key_linear) - shift) / factor)
            known |= dict(zip(names, (query.moved(zeros, 1 / of_query), key.moved(shift, factor)), strict=True))
            folds.append(done)
    return known, folds


def _reach(found: Statistics) -> Numbers:
    """The largest |x| of each channel; the smallest of the others for a channel that is always zero."""
    reach = found.reach
    least = reach[reach > 0].min() if reach.any() else 1.0
    return np.asarray(np.maximum(reach, least))


def _error(query: Statistics, key: Statistics) -> float:
    """The expected squared error of a score, both operands rounded to steps of their largest |x| / 127."""
    steps = [max(-found.low.min(), found.high.max()) / 127 for found in (query, key)]
    powers = [float((found.variance + found.mean**2).sum()) for found in (query, key)]
    return float(steps[0] ** 2 * powers[1] + steps[1] ** 2 * powers[0]) / 12
