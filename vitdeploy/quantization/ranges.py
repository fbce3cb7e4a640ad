"""Turn statistics into ranges, scales and zero points; and float weights into INT8.

Activations: uint8, asymmetric, one scale and zero point per tensor. Weights: int8, symmetric, one scale per output
channel, values -127..127, or -63..63 in 7 bits. Source: ONNX QuantizeLinear, q = saturate(round(x / scale) +
zero_point), round half to even.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitdeploy.quantization.statistics import Statistics
from vitdeploy.spec import WeightBits

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
