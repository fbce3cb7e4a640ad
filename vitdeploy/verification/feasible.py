"""What a number of images can prove at all, reported in advance; and bounding a drop by agreement alone.

Both use the gate's intervals. An engine proves most if it gives every one of the original's answers, so the original is
compared with itself.

An answer equal to the original's is as right as the original's. So top-1 cannot drop by more than the share of changed
answers, 100 - agreement, and the upper end of that share's interval bounds the drop without any label. This holds only
for a metric of single answers, not for mAP, PQ or neighbours.

The bound that judges is fixed before an engine has answered (`criterion_to_prove`). Picking the better one afterwards
would let the data choose, and would pass a bad engine more often than the nominal 2.5 %.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable
from typing import Literal

from vitdeploy.spec import Budget
from vitdeploy.verification.agreement import TOP1_ANSWERS
from vitdeploy.verification.comparison import Comparison, paired_accuracy
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


def images_for_agreement(bound: float, share: float = 1.0) -> int | None:
    """How many images prove `bound` percent if a `share` of the answers are the same; None: no number does."""
    return _least(lambda n: 100 * wilson(round(share * n), n)[0] >= bound) if 100 * share > bound else None


def images_for_drop(bound: float, accuracy: float) -> int | None:
    """How many labelled images prove a drop of at most `bound` points if all answers are the same; None as above."""
    return _least(lambda n: provable_drop(n, accuracy) <= bound)


def drop_by_agreement(found: Comparison) -> tuple[float, float] | None:
    """The 95 % interval of the drop in points that follows from agreement, with or without labels; None for a metric
    that agreement does not bound."""
    if found.agreement_of != TOP1_ANSWERS:
        return None
    reach = 100 - found.agreement_ci95[0]
    return -reach, reach


def criterion_to_prove(perfect: Comparison, max_drop: float) -> Criterion:
    """The criterion for a drop: labels; or agreement, if there are no labels, or too few to prove `max_drop` while
    agreement can.

    Args:
        perfect: the original compared with itself, so that nothing of an engine decides this.
    """
    bounds = drop_by_agreement(perfect)
    if bounds is None or (perfect.drop_ci95 is not None and perfect.drop_ci95[1] <= max_drop):
        return "labels"
    return "agreement" if perfect.drop_ci95 is None or bounds[1] <= max_drop else "labels"


def drop_to_judge(found: Comparison, criterion: Criterion) -> tuple[float, tuple[float, float]] | None:
    """The drop in points with the 95 % interval to compare with a budget: an interval within it passes, one entirely
    beyond it fails, which agreement alone never shows. None if nothing bounds the drop.

    Args:
        criterion: as `criterion_to_prove` settled it. By agreement the "drop" is the share of changed answers, its
            upper bound.
    """
    if criterion == "labels":
        return None if found.drop is None or found.drop_ci95 is None else (found.drop, found.drop_ci95)
    interval = drop_by_agreement(found)
    return None if interval is None else (100 - found.agreement, interval)


def perfect_answers(n: int) -> Comparison:
    """The comparison of `n` answers, all right and all the original's: no engine proves more on so many samples."""
    return Comparison(
        n=n,
        metric="top-1",
        agreement=100.0,
        agreement_ci95=(provable_agreement(n), 100.0),
        agreement_of=TOP1_ANSWERS,
        max_difference=0.0,
        **paired_accuracy(n, 0, 0, 0),
    )


def unprovable(perfect: Comparison, budget: Budget, noun: str = "image") -> list[str]:
    """A sentence for each bound of the accuracy that no engine can be proven to meet on these images.

    Args:
        perfect: the original compared with itself.
    """
    lines = []
    if perfect.control is not None and perfect.proves_nothing and budget.min_agreement != 0:
        lines.append(f"nothing can be proven of answers on these {noun}s: the original's {perfect.proves_nothing}")
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
