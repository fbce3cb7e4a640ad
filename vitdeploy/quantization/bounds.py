"""How far a tensor reaches, by channel and by batch: what merges to the same bytes in any order and any grouping."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

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
