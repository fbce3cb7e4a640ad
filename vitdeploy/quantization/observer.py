"""The observer of one tensor: fixed-size statistics that each batch updates.

Memory therefore depends on the model and the batch, not on the number of images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.quantization.rounding import ROWS_PER_CHANNEL
from vitdeploy.quantization.statistics import UPPER, Statistics

# Second moments converge fast and cost most: all rows of this many images, and of more where one has few rows.
MOMENT_IMAGES, FEW_ROWS = 32, 4096
# Sizes of values are counted by the exponent and the first three bits of the fraction of a float32: eight bins an
# octave. Of a batch of many values each 13th is counted: hardly a width has the divisor 13, so all channels come up.
BIN_BITS, MANY, SAMPLED = 20, 1 << 14, 13

Arrays = dict[str, npt.NDArray[Any]]


def covariance_pays(rows: int, channels: int, images: int | None) -> bool:
    """Whether this many images (None: enough) of `rows` rows give a covariance that rounding would use."""
    shown = max(MOMENT_IMAGES, math.ceil(FEW_ROWS / rows))
    return rows * (shown if images is None else min(shown, images)) >= ROWS_PER_CHANNEL * channels


class Observer:
    """Running bounds and moments of one tensor by its channels along `axis`; bounds of each batch but the two widest
    are forgotten.

    Moments are those of x - centre, the mean of the first batch, so that float32 holds them without cancellation
    ("shifted data": Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983).
    """

    def __init__(self, axis: int, *, covariance: bool = True) -> None:
        self.axis, self.covariance, self.rows = axis, covariance, 0
        self.low = self.high = self.centre = np.zeros(0, np.float32)
        self.total = np.zeros(0)
        self.products: npt.NDArray[np.floating] = np.zeros(0)
        self.sizes = np.zeros(1 << (31 - BIN_BITS), np.int64)
        # Of -x and of x: how far the tensor reaches in the batch that reaches furthest, in the next, and which it is.
        self.reach = np.full((2, 2), -np.inf)
        self.holder = np.full(2, -1)

    def update(self, values: npt.NDArray[np.float32], batch: int = 0, *, moments: bool = True) -> None:
        """Batch number `batch`; its bounds only where `moments` is False and there are rows enough."""
        axis, channels = self.axis % values.ndim, values.shape[self.axis]
        values = values.reshape(math.prod(values.shape[:axis]), channels, -1)
        low, high = values.min(axis=(0, 2)), values.max(axis=(0, 2))
        if not self.rows:
            self._begin(values)
        # numpy's minimum, unlike Python's min, keeps a NaN once there is one.
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)
        if not self.finite:
            return
        for side, reach in enumerate((-float(low.min()), float(high.max()))):
            if reach > self.reach[side, 0]:
                self.reach[side], self.holder[side] = (reach, self.reach[side, 0]), batch
            elif reach > self.reach[side, 1]:
                self.reach[side, 1] = reach
        if moments or self.rows < FEW_ROWS:
            self._add_moments(values)
            step = SAMPLED if values.size > MANY else 1
            sampled = values.reshape(-1)[batch % step :: step].view(np.int32) & 0x7FFFFFFF
            self.sizes += np.bincount(sampled >> BIN_BITS, minlength=len(self.sizes))

    def _begin(self, values: npt.NDArray[np.float32]) -> None:
        channels = values.shape[1]
        self.low = np.full(channels, np.inf, np.float32)
        self.high = -self.low
        self.centre = values.mean(axis=(0, 2), dtype=np.float64).astype(np.float32)
        self.total = np.zeros(channels)
        self.products = np.zeros((channels, channels), np.float32) if self.covariance else np.zeros(channels)

    def _add_moments(self, values: npt.NDArray[np.float32]) -> None:
        centred = values - self.centre[:, None]
        self.total += centred.sum(axis=(0, 2), dtype=np.float64)
        if self.covariance:
            rows = np.moveaxis(centred, 1, -1).reshape(-1, values.shape[1])
            self.products += rows.T @ rows
        else:
            self.products += np.einsum("acb,acb->c", centred, centred)
        self.rows += values.shape[0] * values.shape[2]

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())

    def stretch(self, batch: int) -> float:
        """The width of the range, including zero, over its width without that batch."""
        reach = np.maximum(self.reach, 0)
        without = sum(reach[side, int(self.holder[side] == batch)] for side in range(2))
        whole = float(reach[:, 0].sum())
        return whole / float(without) if without > 0 else (math.inf if whole > 0 else 1.0)

    def statistics(self) -> Statistics:
        mean = self.total / self.rows
        square = mean**2 if self.products.ndim == 1 else np.outer(mean, mean)
        covariance = self.products / self.rows - square.astype(self.products.dtype)
        low, high = self.low.astype(np.float64), self.high.astype(np.float64)
        return Statistics(low, high, self.centre + mean, covariance, self.rows, self._upper())

    def _upper(self) -> float:
        """The size that UPPER of all values are below, on a line through its bin, and no more than the largest."""
        counts = np.cumsum(self.sizes)
        wanted = UPPER * counts[-1]
        found = int(np.searchsorted(counts, wanted))
        edges = (np.array([found, found + 1], np.int32) << BIN_BITS).view(np.float32).astype(np.float64)
        share = (wanted - (counts[found] - self.sizes[found])) / self.sizes[found]
        largest = max(-float(self.low.min()), float(self.high.max()))
        return min(float(edges[0] + share * (edges[1] - edges[0])), largest)

    def state(self) -> Arrays:
        """All that is kept, as arrays: what `restore` takes."""
        names = ("low", "high", "centre", "total", "products", "sizes", "reach", "holder")
        return {**{name: getattr(self, name) for name in names}, "rows": np.array(self.rows)}

    @classmethod
    def restore(cls, axis: int, state: Mapping[str, npt.NDArray[Any]]) -> Observer:
        observer = cls(axis, covariance=state["products"].ndim == 2)
        for name, array in state.items():
            setattr(observer, name, array)
        observer.rows = int(state["rows"])
        return observer
