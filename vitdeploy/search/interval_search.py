"""Finds where a quantity rises along a line with few measurements, each in the middle of the steepest piece."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Rise:
    """The increase from one position to another."""

    low: int
    high: int
    gain: float


def largest_increases(
    measure: Callable[[int], float | None], last: int, *, first: float, total: float, share: float
) -> list[Rise]:
    """The line from 0 to `last` in pieces, the one with the largest gain first.

    The piece that gains most is halved until it is one step long, or gains less than `share` of the total. If the
    quantity never falls, the first piece is then the steepest step, or no step gains `share`: each of the at most
    1 / share pieces that gain so much is halved log2(last) times. If it falls in places, the gain of the first piece is
    still measured, but a rise and a fall inside another piece may have cancelled out.

    Args:
        measure: the quantity at a position, which may be infinite; None if it is undefined, and the position is
            skipped.
        first, total: the quantity at 0 and at `last`.
    """
    known, left_out, least = {0: first, last: total}, set[int](), share * max(gain(first, total), 0.0)

    def inside(rise: Rise) -> list[int]:
        return [i for i in range(rise.low + 1, rise.high) if i not in left_out]

    while True:
        places = sorted(known)
        rises = [Rise(a, b, gain(known[a], known[b])) for a, b in itertools.pairwise(places)]
        rises.sort(key=lambda rise: -rise.gain)
        choice = inside(rises[0]) if rises else []
        if not choice or rises[0].gain < least:
            return rises
        middle = choice[len(choice) // 2]
        found = measure(middle)
        if found is None:
            left_out.add(middle)
        else:
            known[middle] = found


def gain(before: float, after: float) -> float:
    """after - before; both may be infinite."""
    return 0.0 if math.isinf(before) and math.isinf(after) else after - before
