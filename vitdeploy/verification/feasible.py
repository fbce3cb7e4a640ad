"""What so many images can prove at all, said before the work; and a drop that is proven by agreement alone.

Both rest on the intervals that the gate judges by. What an engine can prove at best is what it proves when it gives
every one of the original's answers: so the original is compared with itself.

An answer that is the original's is as right as the original's. So top-1 cannot drop by more than the share of images
with another answer, 100 - agreement, and the upper end of that share's interval bounds the drop: without any label.
For a metric of single answers only: of mAP, PQ or neighbours it is not true.

Which of the two bounds judges is settled before an engine has answered (`criterion_to_prove`). Whichever turns out
better would be a choice by the data, and would pass an engine that is too bad more often than its 2.5 % say.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Literal

from vitdeploy.spec import Budget
from vitdeploy.verification.agreement import TOP1_ANSWERS
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.intervals import paired_difference, wilson

Criterion = Literal["labels", "agreement"]

MOST_IMAGES = 1 << 30


def provable_agreement(n: int) -> float:
    """The percent of agreement that `n` images prove if all answers are the same."""
    return 100 * wilson(n, n)[0]


def provable_drop(n: int, accuracy: float) -> float:
    """The drop in points that `n` labelled images prove if all answers are the same; the original's share is
    `accuracy`, 0..1."""
    right = round(accuracy * n)
    return 100 * paired_difference(right, 0, 0, n - right)[1]


def images_for_agreement(bound: float) -> int | None:
    """How many images prove `bound` percent if all answers are the same; None: no number does."""
    return _least(lambda n: provable_agreement(n) >= bound)


def images_for_drop(bound: float, accuracy: float) -> int | None:
    """How many labelled images prove a drop of at most `bound` points if all answers are the same; None as above."""
    return _least(lambda n: provable_drop(n, accuracy) <= bound)


def drop_by_agreement(found: Comparison) -> tuple[float, float] | None:
    """The 95 % interval of the drop in points as far as agreement bounds it, with or without labels; None for a metric
    that it does not bound."""
    if found.agreement_of != TOP1_ANSWERS:
        return None
    reach = 100 - found.agreement_ci95[0]
    return -reach, reach


def criterion_to_prove(perfect: Comparison, max_drop: float) -> Criterion:
    """By what a drop is to be judged: by labels, but by agreement where there are none, or where they are too few to
    prove `max_drop` and agreement is not.

    Args:
        perfect: the original compared with itself, so that nothing of an engine decides this.
    """
    bounds = drop_by_agreement(perfect)
    if bounds is None or (perfect.drop_ci95 is not None and perfect.drop_ci95[1] <= max_drop):
        return "labels"
    return "agreement" if perfect.drop_ci95 is None or bounds[1] <= max_drop else "labels"


def drop_to_judge(found: Comparison, criterion: Criterion) -> tuple[float, tuple[float, float]] | None:
    """The drop in points with the 95 % interval that is held against a budget: within it is a pass, and all of it
    beyond is a failure, which agreement alone never shows. None where nothing bounds the drop.

    Args:
        criterion: as `criterion_to_prove` settled it. By agreement the "drop" is the share of changed answers, its
            upper bound.
    """
    if criterion == "labels":
        return None if found.drop is None or found.drop_ci95 is None else (found.drop, found.drop_ci95)
    interval = drop_by_agreement(found)
    return None if interval is None else (100 - found.agreement, interval)


def unprovable(perfect: Comparison, budget: Budget, noun: str = "image") -> list[str]:
    """A sentence for each bound of the accuracy that no engine can be proven to meet on these images.

    Args:
        perfect: the original compared with itself.
    """
    lines = []
    if budget.max_drop is not None:
        lines += _of_drop(perfect, budget.max_drop, noun)
    if budget.min_agreement is not None and perfect.agreement_ci95[0] < budget.min_agreement:
        can = f"{perfect.n:,} {noun}s can prove an agreement of {_below(perfect.agreement_ci95[0])} % at best"
        needed = images_for_agreement(budget.min_agreement) if perfect.agreement_of == TOP1_ANSWERS else None
        lines.append(f"{can}; {budget.min_agreement:g} needs {_images(needed, noun)}")
    return lines


def _of_drop(perfect: Comparison, max_drop: float, noun: str) -> list[str]:
    by_labels, by_agreement = perfect.drop_ci95, drop_by_agreement(perfect)
    bounds = [each[1] for each in (by_labels, by_agreement) if each is not None]
    if not bounds:
        return [f"max_drop needs labels, and the {noun}s have none"]
    if min(bounds) <= max_drop:
        return []
    needed = None
    if by_labels is not None and perfect.metric == "top-1" and perfect.reference_value is not None:
        needed = images_for_drop(max_drop, perfect.reference_value / 100)
    elif by_labels is None:
        needed = images_for_agreement(100 - max_drop)
    can = f"{perfect.n:,} {noun}s can prove a drop of {_above(bounds[0])} points at best"
    return [f"{can}; {max_drop:g} needs {_images(needed, noun)}"]


def _images(count: int | None, noun: str) -> str:
    return f"about {count:,} {noun}s at full agreement" if count is not None else f"more {noun}s"


def _above(value: float) -> str:
    """Two decimals, rounded up: a smaller bound is not proven."""
    return f"{math.ceil(100 * value - 1e-9) / 100:.2f}"


def _below(value: float) -> str:
    return f"{math.floor(100 * value + 1e-9) / 100:.2f}"


def _least(enough: Callable[[int], bool]) -> int | None:
    """The least n for which it is true, and from which on it stays so but for rounding to whole images."""
    found = bisect.bisect_left(range(MOST_IMAGES + 1), True, 1, key=enough)
    return found if found <= MOST_IMAGES else None
