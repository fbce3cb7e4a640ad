"""The observer of one tensor: statistics of fixed size, updated with each batch.

So memory depends on the model and the batch, not on the number of images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.linalg import blas

from vitdeploy.quantization import ranges, rounding

# Second moments cost most: they use the rows of `MOMENT_IMAGES` images, or of more images with few rows each. Rows of
# an image are similar, and weights rounded for the rows of few images fit only these. So with enough images of at least
# `SPREAD_ROWS` rows each, they use every `SPREAD`-th row of `SPREAD` times this many images.
MOMENT_IMAGES, FEW_ROWS, SPREAD, SPREAD_ROWS = 32, 4096, 4, 64
# The histogram of magnitudes uses the exponent and the first three bits of the fraction of a float32: eight bins per
# octave. In large batches every 13th value is counted: few widths are divisible by 13, so all channels are sampled.
BIN_BITS, MANY, SAMPLED = 20, 1 << 14, 13

MOMENTS = ("centre", "total", "products", "sizes")
BOUNDS = ("low", "high", "reach", "holder")
Arrays = dict[str, npt.NDArray[Any]]
Floats = npt.NDArray[np.float32]


def covariance_pays(rows: int, channels: int, images: int | None) -> bool:
    """Whether this many images (None: enough) of `rows` rows each give a covariance that rounding can use."""
    shown = max(MOMENT_IMAGES, math.ceil(FEW_ROWS / rows))
    return rows * (shown if images is None else min(shown, images)) >= rounding.ROWS_PER_CHANNEL * channels


def spread_of(rows: int, images: int | None) -> int:
    """The row spacing for the moments of a tensor (`Observer.spread`), with `rows` rows in each of this many images."""
    return max(1, min(SPREAD, (images or 0) // MOMENT_IMAGES)) if rows >= SPREAD_ROWS else 1


@dataclass(frozen=True)
class Bounds:
    """The bounds of a tensor over all observed batches; they merge to the same bytes in any order and grouping.

    `low`, `high`: float32 [channels], without negative zeros, which would make a merge depend on the order. `reach`:
    float64 [2, 2], the maxima of -x and of x in the batch with the largest one, and in the next batch. `holder`: int64
    [2], the number of the first batch; -1 if several are equal.
    """

    low: Floats
    high: Floats
    reach: npt.NDArray[np.float64]
    holder: npt.NDArray[np.int64]

    @classmethod
    def of(cls, values: Floats, batch: int) -> Bounds:
        """The bounds of one batch, [..., channels, ...] with three axes."""
        zero = np.float32(0)
        low, high = values.min(axis=(0, 2)) + zero, values.max(axis=(0, 2)) + zero
        reach = np.array([[-float(low.min()), -np.inf], [float(high.max()), -np.inf]])
        return cls(low, high, reach, np.full(2, batch, np.int64))

    def merged(self, other: Bounds) -> Bounds:
        """The bounds over the batches of both, which must be disjoint. Non-finite bounds stay non-finite."""
        reach = -np.sort(-np.concatenate([self.reach, other.reach], axis=1))[:, :2]
        further = np.where(self.reach[:, 0] > other.reach[:, 0], self.holder, other.holder)
        holder = np.where(reach[:, 0] == reach[:, 1], -1, further)
        # numpy's minimum, unlike Python's min, keeps a NaN once there is one.
        return Bounds(np.minimum(self.low, other.low), np.maximum(self.high, other.high), reach, holder)

    def renumbered(self, batches: npt.NDArray[np.int64]) -> Bounds:
        """The bounds with batch number i replaced by `batches[i]`."""
        return replace(self, holder=np.where(self.holder < 0, -1, batches[self.holder]))

    @property
    def finite(self) -> bool:
        return bool(np.isfinite(self.low).all() and np.isfinite(self.high).all())

    def stretch(self, batch: int) -> float:
        """The width of the range, including zero, divided by its width without this batch."""
        reach = np.maximum(self.reach, 0)
        without = sum(reach[side, int(self.holder[side] == batch)] for side in range(2))
        whole = float(reach[:, 0].sum())
        return whole / float(without) if without > 0 else (math.inf if whole > 0 else 1.0)


class Observer:
    """Running bounds and moments of one tensor, by its channels along `axis`. Only the two widest bounds per batch are
    kept. Moments use every `spread`-th row.

    Moments are those of x - centre, with the mean of the first batch as centre, so that float32 holds them without
    cancellation ("shifted data": Chan, Golub, LeVeque, "Algorithms for computing the sample variance", 1983). They are
    sums of floats, so they depend on the order of the batches; bounds do not.
    """

    def __init__(self, axis: int, *, covariance: bool = True, spread: int = 1) -> None:
        self.axis, self.covariance, self.spread, self.rows = axis, covariance, spread, 0
        self.bounds: Bounds | None = None
        self.centre = np.zeros(0, np.float32)
        self.total = np.zeros(0)
        self.products: npt.NDArray[np.floating] = np.zeros(0)
        self.sizes = np.zeros(1 << (31 - BIN_BITS), np.int64)

    def update(self, values: npt.NDArray[np.float32], batch: int = 0, *, moments: bool = True) -> None:
        """Add batch number `batch`; only its bounds if `moments` is False and enough rows are known."""
        values = by_channel(values, self.axis)
        if not self.rows:
            self._begin(values)
        self.join(Bounds.of(values, batch))
        if self.finite and (moments or self.rows < FEW_ROWS):
            self.add_moments(values, batch)

    def join(self, bounds: Bounds) -> None:
        """Merge the bounds of further batches."""
        self.bounds = bounds if self.bounds is None else self.bounds.merged(bounds)

    def _begin(self, values: npt.NDArray[np.float32]) -> None:
        channels = values.shape[1]
        self.centre = values.mean(axis=(0, 2), dtype=np.float64).astype(np.float32)
        self.total = np.zeros(channels)
        shape = (channels, channels)
        self.products = np.zeros(shape, np.float32, order="F") if self.covariance else np.zeros(channels)

    def add_moments(self, values: npt.NDArray[np.float32], batch: int) -> None:
        """Add the moments and magnitudes of a batch, [..., channels, ...] with three axes, whose bounds are known."""
        first = batch % self.spread  # so that every row is used in turn
        by_first_axis = len(values) >= values.shape[2]
        values = values[first :: self.spread] if by_first_axis else values[..., first :: self.spread]
        centred = values - self.centre[:, None]
        self.total += centred.sum(axis=(0, 2), dtype=np.float64)
        if self.covariance:
            rows = np.moveaxis(centred, 1, -1).reshape(-1, values.shape[1])
            # In place, and only the lower half: computing the whole product and adding it takes too long.
            self.products = blas.ssyrk(1.0, rows.T, beta=1.0, c=self.products, lower=1, overwrite_c=1)
        else:
            self.products += np.einsum("acb,acb->c", centred, centred)
        self.rows += values.shape[0] * values.shape[2]
        step = SAMPLED if values.size > MANY else 1
        sampled = values.reshape(-1)[batch % step :: step].view(np.int32) & 0x7FFFFFFF
        self.sizes += np.bincount(sampled >> BIN_BITS, minlength=len(self.sizes))

    @property
    def finite(self) -> bool:
        return self.bounds is None or self.bounds.finite

    @property
    def moment_images(self) -> int:
        """The number of images for the moments, unless images have few rows."""
        return MOMENT_IMAGES * self.spread

    @property
    def known(self) -> Bounds:
        assert self.bounds is not None, "no batch was observed"
        return self.bounds

    def statistics(self) -> ranges.Statistics:
        mean = self.total / self.rows
        products, square = self.products, mean**2
        if products.ndim == 2:
            products, square = np.tril(products) + np.tril(products, -1).T, np.outer(mean, mean)
        covariance = products / self.rows - square.astype(products.dtype)
        low, high = self.known.low.astype(np.float64), self.known.high.astype(np.float64)
        return ranges.Statistics(low, high, self.centre + mean, covariance, self.rows, self._upper())

    def _upper(self) -> float:
        """The magnitude that the share UPPER of all values is below, interpolated in its bin, at most the largest."""
        counts = np.cumsum(self.sizes)
        expected = ranges.UPPER * counts[-1]
        found = int(np.searchsorted(counts, expected))
        edges = (np.array([found, found + 1], np.int32) << BIN_BITS).view(np.float32).astype(np.float64)
        share = (expected - (counts[found] - self.sizes[found])) / self.sizes[found]
        largest = float(self.known.reach[:, 0].max())
        return min(float(edges[0] + share * (edges[1] - edges[0])), largest)

    def state(self) -> Arrays:
        """The whole state as arrays, for `restore`."""
        return {
            **{name: getattr(self, name) for name in MOMENTS},
            **{name: getattr(self.known, name) for name in BOUNDS},
            "rows": np.array(self.rows),
            "spread": np.array(self.spread),
        }

    @classmethod
    def restore(cls, axis: int, state: Mapping[str, npt.NDArray[Any]]) -> Observer:
        observer = cls(axis, covariance=state["products"].ndim == 2, spread=int(state["spread"]))
        for name in MOMENTS:
            setattr(observer, name, np.asfortranarray(state[name]))
        observer.bounds = Bounds(*(state[name] for name in BOUNDS))
        observer.rows = int(state["rows"])
        return observer


def by_channel(values: npt.NDArray[np.float32], axis: int) -> npt.NDArray[np.float32]:
    """Reshape to three axes, with the channels on the second."""
    axis = axis % values.ndim
    return values.reshape(math.prod(values.shape[:axis]), values.shape[axis], -1)
