"""Ranges of a tensor: candidates, their errors, groups that share one."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.attention import Attention, find_attentions
from vitdeploy.graph.analysis.rows import Indices, Linear, exclusive, leaves, origin
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.passes.qkv import split_qkv
from vitdeploy.quantization.fold import Fold, FoldRequest
from vitdeploy.quantization.statistics import Numbers, Statistics
from vitdeploy.spec import WeightBits

# --- Ranges of a tensor: candidates, their errors, groups that share one ----------------------------------------------


# --- Turn statistics into ranges, scales and zero points; and float weights into INT8 ---------------------------------
# Activations: uint8, asymmetric, one scale and zero point per tensor. Weights: int8, symmetric, one scale per output
# channel, values -127..127, or -63..63 in 7 bits. Source: ONNX QuantizeLinear, q = saturate(round(x / scale) +
# zero_point), round half to even.


# int8 weights, and float32 scales [output channels].
QuantizedWeight = tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]
TINY = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True)
class Range:
    """The representable range of a tensor: values outside are clipped."""

    low: float
    high: float

    def times(self, share: float) -> Range:
        """Both ends moved towards zero, or away from it."""
        return Range(self.low * share, self.high * share)


@dataclass(frozen=True)
class ActivationScale:
    """uint8 quantization of one tensor: real = (quantized - zero_point) * scale."""

    scale: np.float32
    zero_point: np.uint8


def range_of(found: Statistics) -> Range:
    """The range from the smallest to the largest value of all channels."""
    return Range(float(found.low.min()), float(found.high.max()))


def step_of(bounds: Range) -> float:
    """The distance of two neighbours of uint8 on a range, widened to hold zero."""
    return (max(bounds.high, 0.0) - min(bounds.low, 0.0)) / 255


def activation_scale(observed: Range) -> ActivationScale:
    """The scale that maps [low, high], widened to hold zero, onto 0..255; zero is represented exactly."""
    low, high = min(observed.low, 0.0), max(observed.high, 0.0)
    scale = np.float32(max((high - low) / 255.0, TINY))
    return ActivationScale(scale, np.uint8(np.clip(np.rint(-low / float(scale)), 0, 255)))


def symmetric_step(bounds: Range) -> np.float32:
    """The scale of an int8 tensor whose zero point is 0, values -127..127."""
    step: np.float32 = np.float32(max(-bounds.low / 127, bounds.high / 127, TINY))
    return step


def largest_weight(bits: WeightBits) -> int:
    """The largest magnitude of a symmetric INT8 weight with this number of bits."""
    return int(2 ** (bits - 1) - 1)


def quantize_weight(
    weight: npt.NDArray[np.float32], out_axis: int, bits: WeightBits = 8
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """int8 weights of the same shape, and float32 scales [output channels], so that weight ~= int8 * scale."""
    other_axes = tuple(axis for axis in range(weight.ndim) if axis != out_axis)
    largest = largest_weight(bits)
    scales = np.maximum(np.abs(weight).max(axis=other_axes) / largest, TINY).astype(np.float32)
    shape = [-1 if axis == out_axis else 1 for axis in range(weight.ndim)]
    quantized = np.clip(np.rint(weight / scales.reshape(shape)), -largest, largest).astype(np.int8)
    return quantized, scales


# --- INT8 for the scores of attention, the product of queries and keys ------------------------------------------------
# where it can stand, and the folds in front of it.
#
#     softmax(Q K^T) = softmax((Q T) ((K - 1 c^T) / T)^T)        T: a factor a channel, c: a shift a channel
#
# The shift adds one number, q . c, to a whole row of the scores, and the factors cancel: both are exact, and free in
# the linears that make queries and keys. Queries and keys are then as wide as each other, and keys lie around zero, as
# a symmetric range wants it. Sources: SageAttention (arXiv 2410.02367, section 4.2) for the shift, which takes the mean
# of each image where this takes the middle of the calibrated range; SmoothQuant (arXiv 2211.10438, equation 4) for
# factors.


@dataclass(frozen=True)
class Scores:
    """An attention whose query and key come from a linear each, which nothing else reads.

    `partner` [channels]: for each output channel of `key`, the one of `query` that it is multiplied with.
    """

    attention: Attention
    query: Linear
    key: Linear
    partner: Indices


def separate_scores(model: ir.Model, ignored: Callable[[str], bool] = lambda name: False) -> int:
    """Give query, key and value a linear each, in place, wherever the scores can then be quantized; exact.

    Args:
        ignored: whether the merged linear of this name is to stay as it is.

    Returns: the number of linears that were split.
    """
    return split_qkv(model, lambda attention, merged: _plain(attention) and not ignored(merged.name))


def find_scores(editor: Editor, attentions: Collection[Attention]) -> list[Scores]:
    """Find attentions whose operands of Q K^T can be quantized by one scale each: only layout operations behind the
    linears, only sums between the product and softmax, and more than one query."""
    found = []
    for attention in attentions:
        query, key = (editor.linear_behind(origin(value)) for value in (attention.query, attention.key))
        if not _plain(attention) or query is None or key is None or query.node is key.node:
            continue
        of_query, of_key = _columns(query, attention.query, attention), _columns(key, attention.key, attention)
        if of_query is None or of_key is None:
            continue
        # [..., queries, channels] and [..., channels, keys]: of the first image and token, as all others are alike.
        queries, keys = of_query[:1, ..., :1, :], np.swapaxes(of_key, -1, -2)[:1, ..., :1, :]
        alike = (of_query == queries).all() and (np.swapaxes(of_key, -1, -2) == keys).all()
        whole = sorted(keys.ravel()) == list(range(key.weight.shape[1]))
        if alike and whole and len(np.unique(queries)) == queries.size == keys.size == query.weight.shape[1]:
            partner = np.empty(keys.size, np.int64)
            partner[keys.ravel()] = queries.ravel()
            found.append(Scores(attention, query, key, partner))
    return found


def output_of(linear: Linear) -> str:
    """The key of a linear's output in statistics and ranges: its tensor gets another name once there is a bias."""
    return f"{linear.name}:output"


def score_tensors(model: ir.Model) -> dict[str, str]:
    """The outputs of all linears that make queries and keys of `find_scores`: what is to be observed for them, the
    names of their tensors now with what to call their statistics."""
    found = find_scores(Editor(model), find_attentions(model))
    return {str(linear.output.name): output_of(linear) for each in found for linear in (each.query, each.key)}


def smooth_scores(
    model: ir.Model, statistics: Mapping[str, Statistics], request: FoldRequest
) -> tuple[dict[str, Statistics], list[Fold]]:
    """Centre the keys and balance them with the queries, wherever that lessens the expected error of the scores.

    Only where both linears will be quantized, the scores will be; an attention stays without `statistics` of their
    outputs, as `output_of` calls them.
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
            _change(editor, scores, shift, factor, of_query)
            known |= dict(zip(names, (query.moved(zeros, 1 / of_query), key.moved(shift, factor)), strict=True))
            folds.append(done)
    return known, folds


def _plain(attention: Attention) -> bool:
    """Whether only masks and biases lie between the product and softmax, and there is more than one query: runtimes
    fuse such an attention, and it pays."""
    shape = attention.query.shape
    added = all(node.op_type == "Add" for node in attention.between)
    return added and shape is not None and len(shape) == 4 and shape[-2] != 1


def _columns(linear: Linear, value: ir.Value, attention: Attention) -> Indices | None:
    found = leaves(linear.output)
    return None if found is None else exclusive(found, value, attention.scores, linear.weight.shape[1])


def _reach(found: Statistics) -> Numbers:
    """The largest |x| of each channel; a channel that is always zero counts as the least of the others."""
    reach = found.reach
    least = reach[reach > 0].min() if reach.any() else 1.0
    return np.asarray(np.maximum(reach, least))


def _error(query: Statistics, key: Statistics) -> float:
    """The expected squared error of a score, both operands rounded to steps of their largest |x| / 127."""
    steps = [max(-found.low.min(), found.high.max()) / 127 for found in (query, key)]
    powers = [float((found.variance + found.mean**2).sum()) for found in (query, key)]
    return float(steps[0] ** 2 * powers[1] + steps[1] ** 2 * powers[0]) / 12


def _change(editor: Editor, scores: Scores, shift: Numbers, of_key: Numbers, of_query: Numbers) -> None:
    """Write the fold into the weights and biases of the two linears."""
    q_bias, k_bias = (
        np.zeros(linear.weight.shape[1]) if linear.bias is None else linear.bias
        for linear in (scores.query, scores.key)
    )
    editor.set_linear(scores.query, scores.query.weight * of_query, q_bias * of_query)
    editor.set_linear(scores.key, scores.key.weight / of_key, (k_bias - shift) / of_key)


# --- How far a tensor reaches, by channel and by batch ----------------------------------------------------------------
# what merges to the same bytes in any order and any grouping.


Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Bounds:
    """Of the batches that were shown.

    `low`, `high`: float32 [channels], no zero of which is negative: which of 0 and -0 is the lesser is a matter of
    order. `reach`: float64 [2, 2], of -x and of x how far the tensor reaches in the batch that reaches furthest, and in
    the next. `holder`: int64 [2], the number of the first; -1 where several reach as far.
    """

    low: Floats
    high: Floats
    reach: npt.NDArray[np.float64]
    holder: npt.NDArray[np.int64]

    @classmethod
    def of(cls, values: Floats, batch: int) -> Bounds:
        """Of one batch, [..., channels, ...] with three axes."""
        zero = np.float32(0)
        low, high = values.min(axis=(0, 2)) + zero, values.max(axis=(0, 2)) + zero
        reach = np.array([[-float(low.min()), -np.inf], [float(high.max()), -np.inf]])
        return cls(low, high, reach, np.full(2, batch, np.int64))

    def merged(self, other: Bounds) -> Bounds:
        """Of the batches of both; none may be in both. What is not finite stays so."""
        reach = -np.sort(-np.concatenate([self.reach, other.reach], axis=1))[:, :2]
        further = np.where(self.reach[:, 0] > other.reach[:, 0], self.holder, other.holder)
        holder = np.where(reach[:, 0] == reach[:, 1], -1, further)
        # numpy's minimum, unlike Python's min, keeps a NaN once there is one.
        return Bounds(np.minimum(self.low, other.low), np.maximum(self.high, other.high), reach, holder)

    def renumbered(self, batches: npt.NDArray[np.int64]) -> Bounds:
        """The same with the number `batches[i]` for i."""
        return replace(self, holder=np.where(self.holder < 0, -1, batches[self.holder]))

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())

    def stretch(self, batch: int) -> float:
        """The width of the range, including zero, over its width without that batch."""
        reach = np.maximum(self.reach, 0)
        without = sum(reach[side, int(self.holder[side] == batch)] for side in range(2))
        whole = float(reach[:, 0].sum())
        return whole / float(without) if without > 0 else (math.inf if whole > 0 else 1.0)
