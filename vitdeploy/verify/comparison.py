"""What every task's comparison of an artifact with the original says, so that one gate and one report read them all."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Comparison:
    """One artifact against the original on the same n images (or sequences). Percents are 0..100, drops are points.

    metric: the name of what `value` (the artifact's) and `reference_value` (the original's) measure against labels.
    drop: reference_value - value (negative: the artifact gains), with its paired 95 % interval. All of these are None
        without labels.
    agreement: percent of the original's answers that the artifact gives too, whatever the labels say, with its 95 %
        interval; `agreement_of` says in a few words what is counted.
    max_difference: max|a - b| / max|b| over the raw outputs, b the original's.
    """

    n: int
    metric: str | None
    value: float | None
    reference_value: float | None
    drop: float | None
    drop_ci95: tuple[float, float] | None
    agreement: float
    agreement_ci95: tuple[float, float]
    agreement_of: str
    max_difference: float

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Comparison:
        """The comparison that a task's facts begin with, whatever else they say."""
        return cls(**{field.name: facts[field.name] for field in dataclasses.fields(Comparison)})
