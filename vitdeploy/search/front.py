"""The Pareto front: the items that no other beats in one measure without being worse in the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def undominated(items: Sequence[T], distance: Callable[[T], float], faster: Callable[[T, T], bool]) -> list[T]:
    """The items that no other of at most their `distance` is proven to be `faster` than, in ascending order of it: what
    remains of a front where times prove little."""
    order = sorted(items, key=distance)
    return [
        item
        for item in order
        if not any(other is not item and distance(other) <= distance(item) and faster(other, item) for other in order)
    ]


def pareto_front(items: Sequence[T], measures: Callable[[T], tuple[float, float]]) -> list[T]:
    """The items that no other matches or beats in both measures, in ascending order of the first.

    Args:
        measures: of an item; less is better. Of items that are equal in both, the first one stays.
    """
    front: list[T] = []
    for item in sorted(items, key=measures):
        if not front or measures(item)[1] < measures(front[-1])[1]:
            front.append(item)
    return front
