"""The common fields of every task's comparison of an artifact with the original, for one gate and one report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.verification.intervals import paired_difference


@dataclass(frozen=True)
class Control:
    """What answers score that have nothing to do with the image: the artifact's own, each against the original's answer
    to another image. A measure under which they score as well cannot tell one model from another.

    agreement: as `Comparison.agreement`; value: as `Comparison.value`, None without labels; difference: as
    `Comparison.max_difference`, by which outputs change from image to image.
    """

    agreement: float
    value: float | None
    difference: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One artifact against the original on the same n images (or sequences). Percents are 0..100, drops are points.

    metric: the name of what `value` (the artifact's) and `reference_value` (the original's) measure against labels.
    drop: reference_value - value (negative: the artifact gains), with its paired 95 % interval. All of these are None
        without labels.
    agreement: percent of the original's answers that the artifact gives too, whatever the labels say, with its 95 %
        interval; `agreement_of` says in a few words what is counted.
    max_difference: max|a - b| / max|b| over the raw outputs, b the original's.
    control: None where there is none: of one image alone.
    """

    n: int
    metric: str | None
    value: float | None = None
    reference_value: float | None = None
    drop: float | None = None
    drop_ci95: tuple[float, float] | None = None
    agreement: float
    agreement_ci95: tuple[float, float]
    agreement_of: str
    max_difference: float
    control: Control | None = None

    @property
    def proves_nothing(self) -> str:
        """Why the agreement says nothing of the artifact; "" where it does.

        It has to be nearer to that of the original itself, which is 100 %, than to that of unrelated answers, and its
        interval above these.
        """
        if self.control is None:
            why = "there is one image" if self.n == 1 else "answers to other images are of other shapes"
            return f"{why}, so nothing shows how unrelated answers would score"
        others = self.control.agreement
        if self.agreement > least_to_prove(self.control) and self.agreement_ci95[0] > others:
            return ""
        return f"answers to other images agree to {others:.2f} %"

    def drop_proves_nothing(self, max_drop: float) -> str:
        """The same of a drop by labels of at most `max_drop` points: answers to other images have to lose more, and
        more than twice of what the artifact loses."""
        if self.control is None:
            return self.proves_nothing
        if self.drop is None or self.drop_ci95 is None or self.reference_value is None:
            return ""
        lost = self.reference_value - (self.control.value or 0.0)
        if lost <= max(max_drop, self.drop_ci95[1], 2 * self.drop):
            return f"answers to other images would lose {lost:.2f} points"
        return self.proves_nothing if self.agreement_ci95[0] <= self.control.agreement else ""


def least_to_prove(control: Control) -> float:
    """The agreement in percent half-way between unrelated answers and the original's."""
    return (100 + control.agreement) / 2


def paired_counts(ours: npt.NDArray[np.bool_], theirs: npt.NDArray[np.bool_]) -> tuple[int, int, int, int]:
    """How many are right of both, only of the original, only of the artifact, of neither: from who was right, bool [n]
    each."""
    both, lost, gained = (int(each.sum()) for each in (ours & theirs, theirs & ~ours, ours & ~theirs))
    return both, lost, gained, len(ours) - both - lost - gained


def paired_accuracy(both: int, lost: int, gained: int, neither: int) -> dict[str, Any]:
    """The accuracy fields of a `Comparison`, from `paired_counts`."""
    # The difference is original minus artifact, so that a loss is positive.
    low, high = paired_difference(both, lost, gained, neither)
    n = both + lost + gained + neither
    return {
        "value": 100 * (both + gained) / n,
        "reference_value": 100 * (both + lost) / n,
        "drop": 100 * (lost - gained) / n,
        "drop_ci95": (100 * low, 100 * high),
    }
