"""The Pareto front: what nothing else is better than in one respect without being worse in the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def pareto_front(items: Sequence[T], measures: Callable[[T], tuple[float, float]]) -> list[T]:
    """The items that no other equals or betters in both measures, the least of the first measure first.

    Args:
        measures: of an item; less is better. Of items that are equal in both the first one stays.
    """
    front: list[T] = []
    for item in sorted(items, key=measures):
        if not front or measures(item)[1] < measures(front[-1])[1]:
            front.append(item)
    return front
