"""Statistics of tensors; the ranges, scales and zero points derived from them; and quantized attention scores."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.attention import Attention, find_attentions
from vitdeploy.graph.analysis.rows import Indices, Linear, exclusive, leaves, origin
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.passes.qkv import split_qkv
from vitdeploy.spec import WeightBits

# --- Statistics of a tensor over all calibration images: numbers by channel, independent of the number of images ------


Numbers = npt.NDArray[np.float64]
FIELDS = ("low", "high", "mean", "covariance", "rows")
# The share of values below `Statistics.upper`.
UPPER = 0.999


@dataclass(frozen=True)
class Statistics:
    """Statistics by channel of the rows x of one tensor, the input of a linear or convolution.

    `low`, `high`: float64 [channels], over all rows. `mean` [channels] and `covariance` [channels, channels]: over
    `rows` of them. If nothing uses the full matrix, `covariance` is its diagonal, [channels]. It is stored as float32,
    since the covariances of a model may take more memory than its weights.
    `upper`: about 99.9 % of the values |x| are below it; NaN if unknown.
    """

    low: Numbers
    high: Numbers
    mean: Numbers
    covariance: npt.NDArray[np.floating]
    rows: int
    upper: float = float("nan")

    @property
    def variance(self) -> npt.NDArray[np.floating]:
        diagonal = self.covariance if self.covariance.ndim == 1 else np.diag(self.covariance)
        return diagonal.astype(np.float64)

    @property
    def reach(self) -> Numbers:
        """The largest |x| of each channel."""
        return np.asarray(np.maximum(np.abs(self.low), np.abs(self.high)))

    def without_covariance(self) -> Statistics:
        """The statistics with variances only."""
        return replace(self, covariance=self.variance)

    def widened(self, margin: float) -> Statistics:
        """The statistics with the bounds of each channel moved outwards by a share of its range; a bound near zero,
        such as the lowest value of a GELU, by at most twice that share of itself."""
        more = margin * (self.high - self.low)
        low = self.low - np.minimum(more, 2 * margin * np.abs(self.low))
        return replace(self, low=low, high=self.high + np.minimum(more, 2 * margin * np.abs(self.high)))

    def moved(self, shift: Numbers, scale: Numbers) -> Statistics:
        """The statistics of (x - shift) / scale, scale > 0, by channel: exact, without reading images again."""
        low, high, mean = ((each - shift) / scale for each in (self.low, self.high, self.mean))
        divisor = scale**2 if self.covariance.ndim == 1 else np.outer(scale, scale)
        return Statistics(low, high, mean, (self.covariance / divisor).astype(self.covariance.dtype), self.rows)

    def taken(self, source: npt.NDArray[np.int64]) -> Statistics:
        """The statistics of x[source]: copied or reordered channels."""
        low, high, mean = (each[source] for each in (self.low, self.high, self.mean))
        both = source if self.covariance.ndim == 1 else np.ix_(source, source)
        return Statistics(low, high, mean, self.covariance[both], self.rows)


def save_statistics(statistics: Mapping[str, Statistics], path: Path) -> None:
    """Write one .npz of arrays under "<tensor>|<field>", covariances as float32."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, found in statistics.items():
        arrays |= {f"{name}|{field}": np.asarray(getattr(found, field)) for field in FIELDS}
        arrays[f"{name}|upper"] = np.array(found.upper)
        arrays[f"{name}|covariance"] = found.covariance.astype(np.float32)
    np.savez(path, **arrays)  # type: ignore[arg-type]


def load_statistics(path: Path) -> dict[str, Statistics]:
    """Read the file of `save_statistics`."""
    with np.load(path, allow_pickle=False) as arrays:
        names = dict.fromkeys(key.rpartition("|")[0] for key in arrays.files)
        return {name: _loaded({field: arrays[f"{name}|{field}"] for field in (*FIELDS, "upper")}) for name in names}


def _loaded(fields: Mapping[str, npt.NDArray[Any]]) -> Statistics:
    low, high, mean = (fields[field].astype(np.float64) for field in FIELDS[:-2])
    return Statistics(low, high, mean, fields["covariance"], int(fields["rows"]), float(fields["upper"]))


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
        """The range with both ends multiplied by a share."""
        return Range(self.low * share, self.high * share)


def range_of(statistics: Statistics) -> Range:
    """The range from the smallest to the largest value of all channels."""
    return Range(float(statistics.low.min()), float(statistics.high.max()))


def step_of(bounds: Range) -> float:
    """The distance between neighbouring uint8 codes on a range, widened to include zero."""
    return (max(bounds.high, 0.0) - min(bounds.low, 0.0)) / 255


def activation_scale(observed: Range) -> tuple[np.float32, np.uint8]:
    """(scale, zero point) of a uint8 tensor that map [low, high], widened to include zero, onto 0..255; zero is
    represented exactly: real = (quantized - zero_point) * scale."""
    low, high = min(observed.low, 0.0), max(observed.high, 0.0)
    scale = np.float32(max((high - low) / 255.0, TINY))
    return scale, np.uint8(np.clip(np.rint(-low / float(scale)), 0, 255))


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


# --- INT8 for attention scores, the product of queries and keys -------------------------------------------------------
# Finds the attentions that allow it; `folds.smooth_scores` prepares them.


@dataclass(frozen=True)
class Scores:
    """An attention whose query and key come from a linear each, without other readers.

    `partner` [channels]: for each output channel of `key`, the channel of `query` that it is multiplied with.
    """

    attention: Attention
    query: Linear
    key: Linear
    partner: Indices


def separate_scores(model: ir.Model, ignored: Callable[[str], bool] = lambda name: False) -> int:
    """Split merged linears into one each for query, key and value, in place, if scores can then be quantized; exact.

    Args:
        ignored: whether the merged linear with this name must stay unchanged.

    Returns: the number of linears that were split.
    """
    return split_qkv(model, lambda attention, merged: _plain(attention) and not ignored(merged.name))


def find_scores(editor: Editor, attentions: Collection[Attention]) -> list[Scores]:
    """Find attentions whose operands of Q K^T can be quantized with one scale each: only layout operations after the
    linears, only sums between the product and softmax, and more than one query."""
    found = []
    for attention in attentions:
        query, key = (editor.linear_behind(origin(value)) for value in (attention.query, attention.key))
        if not _plain(attention) or query is None or key is None or query.node is key.node:
            continue
        of_query, of_key = _columns(query, attention.query, attention), _columns(key, attention.key, attention)
        if of_query is None or of_key is None:
            continue
        # [..., queries, channels] and [..., channels, keys]: the first image and token, since all others are alike.
        queries, keys = of_query[:1, ..., :1, :], np.swapaxes(of_key, -1, -2)[:1, ..., :1, :]
        alike = (of_query == queries).all() and (np.swapaxes(of_key, -1, -2) == keys).all()
        whole = sorted(keys.ravel()) == list(range(key.weight.shape[1]))
        if alike and whole and len(np.unique(queries)) == queries.size == keys.size == query.weight.shape[1]:
            partner = np.empty(keys.size, np.int64)
            partner[keys.ravel()] = queries.ravel()
            found.append(Scores(attention, query, key, partner))
    return found


def output_of(linear: Linear) -> str:
    """The key of a linear's output in statistics and ranges: the name of its tensor changes when a bias is added."""
    return f"{linear.name}:output"


def score_tensors(model: ir.Model) -> dict[str, str]:
    """The outputs to observe for `find_scores`: the current tensor names of all queries and keys, with the keys of
    their statistics."""
    pairs = find_scores(Editor(model), find_attentions(model))
    return {str(linear.output.name): output_of(linear) for scores in pairs for linear in (scores.query, scores.key)}


def _plain(attention: Attention) -> bool:
    """Whether only masks and biases lie between the product and softmax, and there is more than one query: runtimes
    fuse such an attention, and the gain is worth it."""
    shape = attention.query.shape
    added = all(node.op_type == "Add" for node in attention.between)
    return added and shape is not None and len(shape) == 4 and shape[-2] != 1


def _columns(linear: Linear, value: ir.Value, attention: Attention) -> Indices | None:
    sources = leaves(linear.output)
    return None if sources is None else exclusive(sources, value, attention.scores, linear.weight.shape[1])
