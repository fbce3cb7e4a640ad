"""Round the weights of linears to INT4, with a scale for each group of inputs; activations stay float.

A code is -8..7 and stands for code * scale, without a zero point. A scale may be negative, so that the largest weight
of a group, whatever its sign, can be -8: 16 codes are few, and none is left out (as ONNX Runtime's own quantizer does).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitdeploy.quantization.ranges import TINY
from vitdeploy.quantization.rounding import CLIPS, compensated, knows_covariance
from vitdeploy.quantization.statistics import Numbers, Statistics

LOWEST, HIGHEST = -8, 7
# The sizes of groups, the preferred one first: the scales of 64 inputs add half a bit to a weight, those of 32 a whole.
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
        """The weight that it stands for, float32 [in, out]."""
        return self.codes.astype(np.float32) * np.repeat(self.scales, self.group, axis=0)


def group_of(inputs: int) -> int | None:
    """The size of the groups that so many inputs are divided into; None where they cannot be."""
    return next((size for size in GROUPS if inputs % size == 0), None)


def nearest(weight: npt.NDArray[np.float32], group: int) -> GroupedWeight:
    """A weight [in, out] rounded to the nearest, the largest of each group to -8."""
    scales = _whole(weight, group)
    return GroupedWeight(_codes(weight, np.repeat(scales, group, axis=0)), scales)


def round_groups(weight: npt.NDArray[np.float32], found: Statistics, group: int) -> GroupedWeight:
    """A weight [in, out] rounded so that the outputs change least, by the statistics of what it reads.

    Each scale is the one of least expected error among clipped ones of either sign; rounding is GPTQ's, with the scales
    held (see `rounding.round_weight`), and to the nearest where too few rows were seen.
    """
    power = np.maximum(found.variance, 0).astype(np.float32)
    scales = _scales(weight, power, group)
    rows = np.repeat(scales, group, axis=0)
    if not knows_covariance(found):
        return GroupedWeight(_codes(weight, rows), scales)
    hessian = found.covariance.astype(np.float64)
    return GroupedWeight(compensated(weight.astype(np.float64), rows, hessian, (LOWEST, HIGHEST)), scales)


def _codes(weight: npt.NDArray[np.float32], scales: npt.NDArray[np.float32]) -> npt.NDArray[np.int8]:
    codes: npt.NDArray[np.int8] = np.clip(np.rint(weight / scales), LOWEST, HIGHEST).astype(np.int8)
    return codes


def _whole(weight: npt.NDArray[np.float32], group: int) -> npt.NDArray[np.float32]:
    """The scales by which the largest weight of each group is -8, float32 [in / group, out]; 1 where all are 0."""
    grouped = weight.reshape(-1, group, weight.shape[1])
    largest = np.take_along_axis(grouped, np.abs(grouped).argmax(axis=1)[:, None], axis=1)[:, 0]
    scales = (largest / LOWEST).astype(np.float32)
    return np.where(np.abs(scales) < TINY, np.float32(1), scales)


def _scales(weight: npt.NDArray[np.float32], power: Numbers, group: int) -> npt.NDArray[np.float32]:
    """The scale of each group, clipped where that rounds better, its inputs weighted by their power."""
    whole = _whole(weight, group)
    best, least = whole, np.full(whole.shape, np.inf)
    for side in (1.0, LOWEST / HIGHEST):  # the largest weight is -8, or on the other side 7
        for clip in CLIPS:
            tried = (whole * (side * clip)).astype(np.float32)
            rows = np.repeat(tried, group, axis=0)
            error = np.square(weight - _codes(weight, rows) * rows) * power[:, None]
            total = error.reshape(-1, group, weight.shape[1]).sum(axis=1)
            best, least = np.where(total < least, tried, best), np.minimum(total, least)
    return best
