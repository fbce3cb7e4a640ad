"""Statistics of a tensor over all calibration images: numbers by channel, independent of the number of images."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
FIELDS = ("low", "high", "mean", "covariance", "rows")
# The share of values below `Statistics.upper`.
UPPER = 0.999


@dataclass(frozen=True)
class Statistics:
    """Statistics by channel of the rows x of one tensor, the input of a linear or convolution.

    `low`, `high`: float64 [channels], over all rows. `mean` [channels] and `covariance` [channels, channels]: over
    `rows` of them. If nothing uses the full matrix, `covariance` is its diagonal, [channels].
    `upper`: about 99.9 % of the values |x| are below it; NaN where that is not known.
    """

    low: Numbers
    high: Numbers
    mean: Numbers
    covariance: npt.NDArray[np.floating]
    rows: int
    upper: float = float("nan")

    @property
    def variance(self) -> npt.NDArray[np.floating]:
        return self.covariance if self.covariance.ndim == 1 else np.diag(self.covariance)

    @property
    def reach(self) -> Numbers:
        """The largest |x| of each channel."""
        return np.asarray(np.maximum(np.abs(self.low), np.abs(self.high)))

    def without_covariance(self) -> Statistics:
        """The same with the variances alone."""
        return replace(self, covariance=self.variance)

    def widened(self, margin: float) -> Statistics:
        """The same with the bounds of each channel moved outwards by a share of its range; one near zero, such as the
        lowest value of a GELU, by no more than twice that share of itself."""
        more = margin * (self.high - self.low)
        low = self.low - np.minimum(more, 2 * margin * np.abs(self.low))
        return replace(self, low=low, high=self.high + np.minimum(more, 2 * margin * np.abs(self.high)))

    def moved(self, shift: Numbers, scale: Numbers) -> Statistics:
        """The statistics of (x - shift) / scale, scale > 0, by channel: exact, no image is needed again."""
        low, high, mean = ((each - shift) / scale for each in (self.low, self.high, self.mean))
        divisor = scale**2 if self.covariance.ndim == 1 else np.outer(scale, scale)
        return Statistics(low, high, mean, self.covariance / divisor, self.rows)

    def taken(self, source: npt.NDArray[np.int64]) -> Statistics:
        """The statistics of x[source]: channels that are copied, or in another order."""
        low, high, mean = (each[source] for each in (self.low, self.high, self.mean))
        both = source if self.covariance.ndim == 1 else np.ix_(source, source)
        return Statistics(low, high, mean, self.covariance[both], self.rows)


def save_statistics(statistics: Mapping[str, Statistics], path: Path) -> None:
    """One .npz of arrays under "<tensor>|<field>", covariances as float32."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, found in statistics.items():
        arrays |= {f"{name}|{field}": np.asarray(getattr(found, field)) for field in FIELDS}
        arrays[f"{name}|upper"] = np.array(found.upper)
        arrays[f"{name}|covariance"] = found.covariance.astype(np.float32)
    np.savez(path, **arrays)  # type: ignore[arg-type]


def load_statistics(path: Path) -> dict[str, Statistics]:
    """Read what `save_statistics` wrote."""
    with np.load(path, allow_pickle=False) as arrays:
        names = dict.fromkeys(key.rpartition("|")[0] for key in arrays.files)
        return {name: _loaded({field: arrays[f"{name}|{field}"] for field in (*FIELDS, "upper")}) for name in names}


def _loaded(fields: Mapping[str, npt.NDArray[Any]]) -> Statistics:
    low, high, mean, covariance = (fields[field].astype(np.float64) for field in FIELDS[:-1])
    return Statistics(low, high, mean, covariance, int(fields["rows"]), float(fields["upper"]))
