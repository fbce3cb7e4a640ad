"""What is kept of a tensor after all calibration images: numbers by channel, however many images there were."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
FIELDS = ("low", "high", "mean", "covariance", "rows")


@dataclass(frozen=True)
class Statistics:
    """Of the rows x of one tensor, the input of a linear or convolution, by channel.

    `low`, `high`: float64 [channels], over all rows. `mean` [channels] and `covariance` [channels, channels]: over a
    part of them, as many as `rows`.
    """

    low: Numbers
    high: Numbers
    mean: Numbers
    covariance: Numbers
    rows: int

    @property
    def variance(self) -> Numbers:
        return np.diag(self.covariance)

    def widened(self, margin: float) -> Statistics:
        """With bounds of each channel moved outwards by a share of its range; one near zero by no more than twice that
        share of itself, as the lowest value of a GELU."""
        more = margin * (self.high - self.low)
        low = self.low - np.minimum(more, 2 * margin * np.abs(self.low))
        return replace(self, low=low, high=self.high + np.minimum(more, 2 * margin * np.abs(self.high)))

    def moved(self, shift: Numbers, scale: Numbers) -> Statistics:
        """The statistics of (x - shift) / scale, scale > 0, by channel: exact, no image is needed again."""
        low, high, mean = ((each - shift) / scale for each in (self.low, self.high, self.mean))
        return Statistics(low, high, mean, self.covariance / np.outer(scale, scale), self.rows)

    def taken(self, source: npt.NDArray[np.int64]) -> Statistics:
        """The statistics of x[source]: channels that are copied, or in another order."""
        low, high, mean = (each[source] for each in (self.low, self.high, self.mean))
        return Statistics(low, high, mean, self.covariance[np.ix_(source, source)], self.rows)


def save_statistics(statistics: Mapping[str, Statistics], path: Path) -> None:
    """One .npz of arrays under "<tensor>|<field>", covariances as float32."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, found in statistics.items():
        arrays |= {f"{name}|{field}": np.asarray(getattr(found, field)) for field in FIELDS}
        arrays[f"{name}|covariance"] = found.covariance.astype(np.float32)
    np.savez(path, **arrays)  # type: ignore[arg-type]


def load_statistics(path: Path) -> dict[str, Statistics]:
    """What `save_statistics` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        names = dict.fromkeys(key.rpartition("|")[0] for key in arrays.files)
        return {name: _loaded({field: arrays[f"{name}|{field}"] for field in FIELDS}) for name in names}


def _loaded(fields: Mapping[str, npt.NDArray[Any]]) -> Statistics:
    low, high, mean, covariance = (fields[field].astype(np.float64) for field in FIELDS[:-1])
    return Statistics(low, high, mean, covariance, int(fields["rows"]))
