"""Facts about a tensor that is hard to quantize, for a person to read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.runner import Array

# At most this many channels are listed as outliers, each reaching at least this many times as far as the median one.
SHOWN_CHANNELS, OUTLIER_RATIO = 4, 10.0


@dataclass(frozen=True)
class TensorFacts:
    """Over all images: the smallest and the largest value, the 99.9th percentile of |x|, the median over the channels
    of max |x|, and outlier channels with their max |x|, largest first. `finite` is the share of finite values; all
    others are left out of the rest."""

    low: float
    high: float
    percentile: float
    median_channel: float
    outliers: dict[int, float]
    finite: float


def facts_of(batches: Iterable[Array], images: int, axis: int) -> TensorFacts:
    """Facts of a tensor that arrives in batches [n, ...] of `images` in total; channels lie along `axis`.

    Only the largest thousandth of the values is kept in memory.
    """
    low, high, count, finite = np.inf, -np.inf, 0, 0
    largest: npt.NDArray[np.float32] = np.zeros(0, np.float32)
    reach: npt.NDArray[np.float32] = np.zeros(0, np.float32)
    for batch in batches:
        rows = np.moveaxis(batch, axis, -1).reshape(-1, batch.shape[axis])
        good = np.isfinite(rows)
        count, finite = count + rows.size, finite + int(good.sum())
        values = np.where(good, rows, np.float32(0))
        low, high = min(low, float(values.min())), max(high, float(values.max()))
        power = np.abs(values)
        most = power.max(axis=0)
        reach = np.maximum(reach, most) if len(reach) else most
        # The k largest of all are among the k largest of each batch.
        kept = _held(images * rows.size // len(batch))
        largest = np.concatenate([largest, power.ravel()])
        if len(largest) > kept:
            largest = np.partition(largest, len(largest) - kept)[-kept:]
    order = np.argsort(-reach, kind="stable")[:SHOWN_CHANNELS]
    median = float(np.median(reach))
    return TensorFacts(
        low=low,
        high=high,
        percentile=float(np.sort(largest)[-_held(count)]),
        median_channel=median,
        outliers={int(i): float(reach[i]) for i in order if reach[i] > OUTLIER_RATIO * median},
        finite=finite / count,
    )


def _held(count: int) -> int:
    """How many of `count` values are at or above the 99.9th percentile, which 999 of 1,000 do not exceed."""
    return count // 1000 + 1
