"""Weights of layers as matrix products, their expected INT8 error, and their rounding."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import scipy.linalg

from vitdeploy.graph.analysis.rows import Linear
from vitdeploy.quantization import ranges
from vitdeploy.spec import WeightBits

Scalar = TypeVar("Scalar", bound=np.generic)


# --- Linears and convolutions as the matrix products that INT8 kernels compute ----------------------------------------
# A convolution is, in each of its groups, the product of a row of all values under its kernel (im2col) and a matrix. So
# quantization treats both alike (the weight of an input channel, the effect of weight errors on the outputs). The
# expected INT8 error of the outputs decides which folds are applied.


@dataclass(frozen=True)
class Products:
    """The weights of one layer as matrix products, and the inputs that they multiply.

    weights: [groups, rows, outputs of a group]; a linear is one group of its input channels.
    channels: int64 [groups, rows], the input channel that each row of weights multiplies.
    inside: float64 [rows], the share of output positions where the row reads that channel instead of padding.
    """

    weights: ranges.Numbers
    channels: npt.NDArray[np.int64]
    inside: ranges.Numbers

    @staticmethod
    def of_rows(weight: npt.NDArray[np.floating]) -> Products:
        """The product of a linear, from its weight [in, out]."""
        return Products(weight[None].astype(np.float64), np.arange(len(weight))[None], np.ones(len(weight)))

    @property
    def taps(self) -> int:
        """The number of consecutive rows that multiply the same channel: the positions under the kernel."""
        return int((self.channels[0] == self.channels[0, 0]).sum())

    def strongest(self, width: int) -> ranges.Numbers:
        """The largest weight of each of `width` input channels, [width]."""
        largest = np.zeros(width)
        np.maximum.at(largest, self.channels, np.abs(self.weights).max(axis=-1))
        return largest

    def scaled(self, scale: ranges.Numbers) -> Products:
        """The products for an input whose channels were divided by `scale` [channels]."""
        return replace(self, weights=self.weights * scale[self.channels][..., None])

    def of_constant(self, values: ranges.Numbers, weights: ranges.Numbers | None = None) -> ranges.Numbers:
        """The mean over all output positions, [outputs], for an input with these `values` [channels] everywhere.

        Args:
            weights: used instead of the layer's weights, in the same shape.
        """
        weights = self.weights if weights is None else weights
        result: ranges.Numbers = np.einsum("gr,gro->go", values[self.channels] * self.inside, weights).ravel()
        return result


def products_of(linear: Linear) -> Products:
    """The weights of a linear or convolution as products."""
    if linear.kind == "matmul":
        return Products.of_rows(linear.weight)
    groups, (outputs, inputs) = linear.groups, linear.weight.shape[:2]
    weights = linear.weight.reshape(groups, outputs // groups, -1).transpose(0, 2, 1).astype(np.float64)
    taps = weights.shape[1] // inputs
    channels = np.arange(groups)[:, None] * inputs + np.repeat(np.arange(inputs), taps)
    return Products(weights, channels, np.tile(_inside(linear), inputs))


def weight_of(linear: Linear, weights: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Convert weights from the shape of `Products.weights` to that of the layer."""
    weights = weights[0] if linear.kind == "matmul" else weights.transpose(0, 2, 1)
    return weights.reshape(linear.weight.shape)


def expected_error(
    statistics: ranges.Statistics,
    weights: Sequence[npt.NDArray[np.floating]],
    step: float | None = None,
    bits: WeightBits = 8,
) -> float:
    """The expected squared error of a row of x W, over all W [in, out], with uint8 x and int8 columns of W.

    Rounding errors are assumed to be independent and uniform, step^2 / 12 each. The mean error from rounding the
    weights is omitted: a corrected bias removes it.

    Args:
        step: the step of x, if it is not that of its whole range.
        bits: the bits of the weights.
    """
    step = ranges.step_of(ranges.range_of(statistics)) if step is None else step
    power, total = float(statistics.variance.sum()), 0.0
    for weight in weights:
        columns = np.abs(weight).max(axis=0) / ranges.largest_weight(bits)
        total += step**2 * float((weight**2).sum()) + power * float((columns**2).sum())
    return total / 12


def products_error(statistics: ranges.Statistics, layer: Products, step: float, bits: WeightBits = 8) -> float:
    """The expected squared error of one output of any layer, summed over its channels, averaged over positions."""
    power = (statistics.variance[layer.channels] * layer.inside).sum(axis=-1)
    columns = np.abs(layer.weights).max(axis=1) / ranges.largest_weight(bits)
    seen = (layer.weights**2).sum(axis=(0, 2)) @ layer.inside
    return float(step**2 * seen + (power[:, None] * columns**2).sum()) / 12


def _inside(linear: Linear) -> ranges.Numbers:
    """`Products.inside` by tap, [taps]: 1 without padding, and if sizes or padding are known only at run time."""
    kernel = linear.weight.shape[2:]
    sizes = list(linear.input.shape)[2:] if linear.input.shape is not None else []
    attributes, axes = linear.node.attributes, len(kernel)
    pads = attributes.get_ints("pads", ()) or ()
    shares = np.ones(1)
    for axis, taps in enumerate(kernel):
        share, size = np.ones(taps), sizes[axis] if axis < len(sizes) else None
        if len(pads) == 2 * axes and isinstance(size, int) and linear.padded:
            stride, dilation = (
                (attributes.get_ints(name, ()) or (1,) * axes)[axis] for name in ("strides", "dilations")
            )
            before, after = pads[axis], pads[axes + axis]
            count = (size + before + after - dilation * (taps - 1) - 1) // stride + 1
            position = np.arange(count) * stride - before + np.arange(taps)[:, None] * dilation
            share = ((position >= 0) & (position < size)).mean(axis=1)
        shares = np.outer(shares, share).ravel()
    return shares


# --- INT8 weights that minimise the change of the outputs, not of the weights -----------------------------------------
# They are symmetric, with one scale per output channel, values -127..127, or -63..63 in 7 bits.


DAMPING = 0.01
CLIPS = tuple(1 - i / 50 for i in range(16))
# Rows are rounded in order. Their errors are propagated to the rows of the same inner block at once, to the rest of the
# block after each inner block, and to all other rows after each block, which saves memory traffic.
BLOCK, INNER = 128, 16
# The rows per channel that a covariance needs to be useful.
ROWS_PER_CHANNEL = 8


class _Recent:
    """A cache of rounded weights by everything they depend on, up to `MOST_BYTES`: a search and the placement after it
    round most layers alike."""

    MOST_BYTES = 256 * 2**20

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[ranges.QuantizedWeight, ranges.Numbers]] = {}
        self._lock = threading.Lock()

    def get(self, key: bytes, make: Callable[[], Rounding]) -> Rounding:
        with self._lock:
            known = self._known.get(key)
        if known is None:
            known = make()
            with self._lock:
                self._known[key] = known
                while sum(codes.nbytes for (codes, _), _ in self._known.values()) > self.MOST_BYTES:
                    del self._known[next(iter(self._known))]
        return known


# A rounded weight with its scales, and the bias.
Rounding = tuple[ranges.QuantizedWeight, ranges.Numbers]
_RECENT = _Recent()


def round_linear(linear: Linear, found: ranges.Statistics, bits: WeightBits = 8, step: float | None = None) -> Rounding:
    """As `round_new`, with a cache of recent results, which must not be modified."""
    if linear.kind != "matmul":
        return round_new(linear, found, bits, step)
    digest = hashlib.blake2b(repr((linear.weight.shape, found.covariance.shape, found.rows, bits, step)).encode())
    bias = np.zeros(0) if linear.bias is None else linear.bias
    for array in (linear.weight, bias, found.low, found.high, found.mean, found.covariance):
        digest.update(np.ascontiguousarray(array).data)
    return _RECENT.get(digest.digest(), lambda: round_new(linear, found, bits, step))


def round_new(linear: Linear, found: ranges.Statistics, bits: WeightBits = 8, step: float | None = None) -> Rounding:
    """The rounded weight of a linear or convolution, in its shape, and its corrected bias [out].

    E[x W + b] = E[x Q + b'], with Q the rounded weight. In the padding of a convolution x is zero: the mean is over all
    its output positions.

    Args:
        found: the statistics of the input.
        step: the distance between codes of the input; None: that of uint8 on its whole range.
    """
    step = ranges.step_of(ranges.range_of(found)) if step is None else step
    layer, noise = products_of(linear), step**2 / 12
    groups, _, outputs = layer.weights.shape
    rounded, scales = np.empty(layer.weights.shape, np.int8), np.empty((groups, outputs), np.float32)
    for group, channels in enumerate(layer.channels[:, :: layer.taps]):
        weight = layer.weights[group].astype(np.float32)
        rounded[group], scales[group] = round_weight(weight, found.taken(channels), noise, layer.taps, bits)
    moved = layer.of_constant(found.mean, layer.weights - rounded * scales[:, None, :])
    bias = moved if linear.bias is None else linear.bias + moved
    return (weight_of(linear, rounded), scales.ravel()), bias


def round_weight(
    weight: npt.NDArray[np.float32], statistics: ranges.Statistics, noise: float, taps: int = 1, bits: WeightBits = 8
) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float32]]:
    """(int8 [in * taps, out], float32 scales [out]) of a weight [in * taps, out], weight ~= int8 * scale.

    The scales cover the largest weight: clipped scales do not improve the outputs on images outside the calibration
    set, in 8 bits or 7. Rounding is GPTQ's: later input channels compensate for the error of each channel (arXiv
    2210.17323, section 3). Moments are centred, since a corrected bias removes the mean.

    Args:
        noise: the variance of the rounding errors of the input, which the weights multiply too.
        taps: consecutive rows that multiply the same channel at other positions. Positions are rounded separately: the
            covariance between them is not observed.
    """
    if not knows_covariance(statistics):
        return ranges.quantize_weight(weight, 1, bits)
    hessian = statistics.covariance + noise * np.eye(len(statistics.mean))
    largest = ranges.largest_weight(bits)
    scales = np.maximum(np.abs(weight).max(axis=0) / largest, ranges.TINY).astype(np.float32)
    rounded = np.empty(weight.shape, np.int8)
    for tap in range(taps):
        rounded[tap::taps] = compensated(weight[tap::taps].astype(np.float64), scales, hessian, (-largest, largest))
    return rounded, scales


def knows_covariance(statistics: ranges.Statistics) -> bool:
    """Whether enough rows were observed to round with their covariance."""
    return statistics.covariance.ndim > 1 and statistics.rows >= ROWS_PER_CHANNEL * len(statistics.mean)


def compensated(
    weight: ranges.Numbers, scales: npt.NDArray[np.float32], hessian: ranges.Numbers, bounds: tuple[int, int]
) -> npt.NDArray[np.int8]:
    """Round with GPTQ, channels of most power first, so that later channels compensate for the largest errors.

    Args:
        weight: [in, out].
        scales: [out], or [in, out].
        bounds: the smallest and the largest integer.
    """
    power = np.diag(hessian)
    order = np.argsort(-power)
    weight, hessian = weight[order].copy(), hessian[np.ix_(order, order)]
    steps = np.broadcast_to(scales, weight.shape)[order]
    damping = DAMPING * max(float(power.mean()), ranges.TINY)
    upper = _cholesky_of_inverse(hessian + damping * np.eye(len(hessian)))
    rounded = np.empty(weight.shape, np.int8)
    errors = np.empty((BLOCK, weight.shape[1]))
    for start in range(0, len(weight), BLOCK):
        end = min(start + BLOCK, len(weight))
        for inner in range(start, end, INNER):
            last = min(inner + INNER, end)
            for i in range(inner, last):
                rounded[i] = np.clip(np.rint(weight[i] / steps[i]), *bounds)
                errors[i - start] = (weight[i] - rounded[i] * steps[i].astype(np.float64)) / upper[i, i]
                weight[i + 1 : last] -= np.outer(upper[i, i + 1 : last], errors[i - start])
            weight[last:end] -= upper[inner:last, last:end].T @ errors[inner - start : last - start]
        weight[end:] -= upper[start:end, end:].T @ errors[: end - start]
    result = np.empty_like(rounded)
    result[order] = rounded
    return result


def _cholesky_of_inverse(matrix: ranges.Numbers) -> ranges.Numbers:
    """The upper triangular U for which U^T U is the inverse of a symmetric, positive definite matrix, never formed.

    Backwards, matrix = R R^T with R upper triangular; so U = R^-1.
    """
    lower = scipy.linalg.cholesky(matrix[::-1, ::-1], lower=True, overwrite_a=True, check_finite=False)
    inverse, _ = scipy.linalg.lapack.dtrtri(lower, lower=1)
    return np.asarray(inverse[::-1, ::-1])


# --- INT4 for the weights of linears, with a scale for each group of inputs; activations stay float -------------------
# A code is -8..7 and represents code * scale, without a zero point. A scale may be negative, so that the largest weight
# of a group, whatever its sign, can be -8 and all 16 codes are used (as in ONNX Runtime's quantizer).


LOWEST, HIGHEST = -8, 7
# Group sizes, the preferred one first: the scales of groups of 64 add half a bit per weight, those of 32 one bit.
GROUPS = (64, 32)


@dataclass(frozen=True)
class GroupedWeight:
    """A weight [in, out] in 4 bits: int8 codes [in, out], float32 scales [in / group, out]."""

    codes: npt.NDArray[np.int8]
    scales: npt.NDArray[np.float32]

    @property
    def group(self) -> int:
        """The number of inputs that share a scale."""
        return len(self.codes) // len(self.scales)

    @property
    def values(self) -> npt.NDArray[np.float32]:
        """The dequantized weight, float32 [in, out]."""
        return self.codes.astype(np.float32) * np.repeat(self.scales, self.group, axis=0)


def group_of(inputs: int) -> int | None:
    """The group size for this number of inputs; None if no group size divides it."""
    return next((size for size in GROUPS if inputs % size == 0), None)


def nearest(weight: npt.NDArray[np.float32], group: int) -> GroupedWeight:
    """A weight [in, out] rounded to nearest, with the largest weight of each group at -8."""
    scales = _whole(weight, group)
    return GroupedWeight(_codes(weight, np.repeat(scales, group, axis=0)), scales)


def round_groups(weight: npt.NDArray[np.float32], statistics: ranges.Statistics, group: int) -> GroupedWeight:
    """A weight [in, out] rounded so that the outputs change least, given the statistics of its input.

    Each scale has the smallest expected error among clipped scales of either sign; rounding is GPTQ's with fixed scales
    (see `round_weight`), or to nearest if too few rows were observed.
    """
    power = np.maximum(statistics.variance, 0).astype(np.float32)
    scales = _group_scales(weight, power, group)
    rows = np.repeat(scales, group, axis=0)
    if not knows_covariance(statistics):
        return GroupedWeight(_codes(weight, rows), scales)
    hessian = statistics.covariance.astype(np.float64)
    return GroupedWeight(compensated(weight.astype(np.float64), rows, hessian, (LOWEST, HIGHEST)), scales)


def _codes(weight: npt.NDArray[np.float32], scales: npt.NDArray[np.float32]) -> npt.NDArray[np.int8]:
    codes: npt.NDArray[np.int8] = np.clip(np.rint(weight / scales), LOWEST, HIGHEST).astype(np.int8)
    return codes


def _whole(weight: npt.NDArray[np.float32], group: int) -> npt.NDArray[np.float32]:
    """The scales that map the largest weight of each group to -8, float32 [in / group, out]; 1 if all are 0."""
    grouped = weight.reshape(-1, group, weight.shape[1])
    largest = np.take_along_axis(grouped, np.abs(grouped).argmax(axis=1)[:, None], axis=1)[:, 0]
    scales = (largest / LOWEST).astype(np.float32)
    return np.where(np.abs(scales) < ranges.TINY, np.float32(1), scales)


def _group_scales(weight: npt.NDArray[np.float32], power: ranges.Numbers, group: int) -> npt.NDArray[np.float32]:
    """The scale of each group, clipped if that reduces the error, with inputs weighted by their power."""
    whole = _whole(weight, group)
    best, least = whole, np.full(whole.shape, np.inf)
    for side in (1.0, LOWEST / HIGHEST):  # the largest weight becomes -8, or 7 with the opposite sign
        for clip in CLIPS:
            tried = (whole * (side * clip)).astype(np.float32)
            rows = np.repeat(tried, group, axis=0)
            error = np.square(weight - _codes(weight, rows) * rows) * power[:, None]
            total = error.reshape(-1, group, weight.shape[1]).sum(axis=1)
            best, least = np.where(total < least, tried, best), np.minimum(total, least)
    return best
