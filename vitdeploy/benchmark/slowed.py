"""Which blocks were measured while the machine slowed itself down, by what its kernel and firmware say of it.

Such a block is not one of a slow moment to be averaged: a board that is too hot, or has too little power, is another
machine. It is left out like a block in which others computed; never by its latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vitdeploy.benchmark.results import Entry, Round

# How far a clock after a block may be below the usual one of its artifact, which is the upper quartile: steps of turbo
# clocks under one load are smaller.
CLOCK_FELL = 0.15
# How far the limit of the clocks may be below the highest of these blocks: a kernel rounds it.
LIMIT_FELL = 0.01
MOST_REASONS = 3


@dataclass(frozen=True)
class Throttled:
    """How many blocks of a scenario were measured while the machine throttled, `of` how many; whether they are left
    out; the reasons, the most frequent first."""

    blocks: int
    of: int
    left_out: bool
    seen: tuple[str, ...]

    def __str__(self) -> str:
        kept = ", left out" if self.left_out else ""
        return f"throttled: {self.blocks} of {self.of} blocks{kept} ({'; '.join(self.seen)})"


def reasons(rounds: Sequence[Round], *, loaded: bool = True) -> list[tuple[str, ...]]:
    """For each block of one artifact and scenario, why the machine was slower in it; empty for one that counts.

    `loaded`: the CPU had work until the end of each block, so that a governor had no reason to lower its clock.
    """
    limits = [block.machine.limit_mhz if block.machine else None for block in rounds]
    clocks = [block.machine.mhz if block.machine else None for block in rounds]
    highest = max((limit for limit in limits if limit is not None), default=0.0)
    known = [clock for clock in clocks if clock is not None]
    usual = float(np.quantile(known, 0.75)) if known and loaded else 0.0
    return [
        (
            *(block.machine.throttled if block.machine else ()),
            *(["the limit of the clock fell"] if limit is not None and limit < (1 - LIMIT_FELL) * highest else []),
            *(["the clock fell"] if clock is not None and clock < (1 - CLOCK_FELL) * usual else []),
        )
        for block, limit, clock in zip(rounds, limits, clocks, strict=True)
    ]


def throttled(rounds: Sequence[Round], spread: bool) -> Throttled | None:
    """What is reported of these blocks, None where none was throttled. `spread`: they are of a scenario whose rounds
    may be spread over processes; `left_out` is for the caller to say."""
    found = [each for each in reasons(rounds, loaded=spread) if each]
    if not found:
        return None
    counted = Counter(text for each in found for text in each)
    return Throttled(len(found), len(rounds), False, tuple(text for text, _ in counted.most_common(MOST_REASONS)))


def mostly_slowed(entries: Sequence[Entry], scenario: str) -> bool:
    """Whether the machine throttled in most blocks of one of these artifacts."""
    found = [reasons(entry.rounds[scenario]) for entry in entries]
    return any(2 * sum(map(bool, each)) > len(each) for each in found)
