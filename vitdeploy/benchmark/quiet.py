"""Which blocks were measured while nobody else used the machine, and while it did not throttle.

The kernel's accounting of the load and of the clock decides, never a latency: dropping slow blocks would make every
artifact look faster, and the one that varies most the fastest. Blocks of two compared artifacts count if both are
quiet.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

from vitdeploy.benchmark.protocol import Protocol, parse_scenario
from vitdeploy.benchmark.results import Entry, Machine, Round
from vitdeploy.benchmark.slowed import reasons

# The share of a block that others may use: of all its CPUs' time, or of the time of one thread that waits for them.
TAKEN_SHARE = 0.05
SUSPENDED_SECONDS = 0.05
# The share of the requested rounds that must be quiet.
QUIET_SHARE = 0.5
# If the kernel reports no other processes: the share of an artifact's usual CPU time that a block needs.
STARVED_SHARE = 0.85


@dataclass(frozen=True)
class Unrest:
    """What others used of one block, as shares: `others` and `stolen` of its CPUs' time; `waited` of the block, during
    which one of its threads was ready while another process had its CPU."""

    others: float
    stolen: float
    waited: float
    suspended: bool

    @property
    def disturbs(self) -> bool:
        return self.suspended or max(self.others + self.stolen, self.waited) > TAKEN_SHARE


def unrest(machine: Machine, seconds: float, cpus: int) -> Unrest:
    """What others used of a block of `seconds`; 0 for what the kernel does not report."""
    others = beyond_noise(machine.other_seconds or 0.0, cpus)
    # Threads of one process that are more than its CPUs wait for each other: of a wait, only what others ran explains.
    waited = min(machine.waited_seconds or 0.0, others)
    # While both together have no more than half of the CPUs, each has a core of its own, even where a core is two CPUs.
    if machine.own_seconds + others <= 0.5 * cpus * seconds:
        others = 0.0
    whole = cpus * seconds
    return Unrest(
        others / whole,
        (machine.stolen_seconds or 0.0) / whole,
        waited / seconds,
        machine.suspended_seconds > SUSPENDED_SECONDS,
    )


def left_over(rounds: Sequence[Round]) -> float:
    """The mean share of these blocks for which a thread waited while others ran. Below the limit it disturbs no block,
    but it may slow one artifact more than another: by about as much if all threads wait for the slowest."""
    shares = [0.0]
    for block in rounds:
        if block.machine is not None and block.machine.other_seconds is not None:
            others, waited = max(0.0, block.machine.other_seconds), block.machine.waited_seconds
            shares.append((beyond_noise(others, 1) if waited is None else min(waited, others)) / block.seconds)
    return math.fsum(shares) / max(1, len(rounds))


def beyond_noise(seconds: float, cpus: int) -> float:
    """CPU seconds of others beyond possible rounding: the kernel counts whole ticks of each CPU."""
    return max(0.0, seconds - 1.5 * math.sqrt(cpus) / _ticks_per_second())


def _ticks_per_second() -> float:
    return float(os.sysconf("SC_CLK_TCK")) if hasattr(os, "sysconf") else 100.0


def quiet(rounds: Sequence[Round], cpus: int) -> list[bool]:
    """For each block of one artifact and scenario, whether nobody else is known to have disturbed it, and the machine
    is not known to have throttled."""
    slowed = reasons(rounds)
    return [alone and not slow for alone, slow in zip(undisturbed(rounds, cpus), slowed, strict=True)]


def undisturbed(rounds: Sequence[Round], cpus: int) -> list[bool]:
    """For each block of one artifact and scenario, whether nobody else is known to have disturbed it."""
    shares = [_own_share(block) for block in rounds]
    usual = sorted(share for share in shares if share is not None)
    least = STARVED_SHARE * usual[(3 * len(usual)) // 4] if usual else 0.0
    return [_is_quiet(block, cpus, share, least) for block, share in zip(rounds, shares, strict=True)]


def _is_quiet(block: Round, cpus: int, share: float | None, least: float) -> bool:
    machine = block.machine
    if machine is None:
        return True
    if unrest(machine, block.seconds, max(1, cpus)).disturbs:
        return False
    # A process with a steady load uses as much CPU time in every block, unless somebody else takes it.
    return machine.other_seconds is not None or share is None or share >= least


def _own_share(block: Round) -> float | None:
    return None if block.machine is None else block.machine.own_seconds / block.seconds


def awake(every: Sequence[Sequence[Round]]) -> list[int]:
    """The rounds, by number, in which the machine never slept; all if there is none."""
    slept = [
        any(block.machine is not None and block.machine.suspended_seconds > SUSPENDED_SECONDS for block in each)
        for each in zip(*every, strict=True)
    ]
    return [number for number, each in enumerate(slept) if not each or all(slept)]


def undelayed(block: Round, cpus: int) -> float:
    """The seconds of a block, at least, in which no thread was ready without a CPU: then all ran as they do alone."""
    machine = block.machine
    if machine is None:
        return block.seconds
    others, stolen = max(0.0, machine.other_seconds or 0.0), machine.stolen_seconds or 0.0
    waited = others if machine.waited_seconds is None else min(others, cpus * machine.waited_seconds)
    return max(0.0, block.seconds - waited - stolen)


def quiet_together(entries: Sequence[Entry], scenario: str) -> list[int]:
    """The rounds of a scenario, by number, that were quiet for all these artifacts."""
    found = [quiet(entry.rounds[scenario], len(entry.affinity)) for entry in entries]
    return [number for number, each in enumerate(zip(*found, strict=True)) if all(each)]


def enough(protocol: Protocol, numbers: Sequence[int], rounds: Sequence[Round]) -> bool:
    """Whether these rounds can stand for all: at least half of the requested ones, from two processes or more if there
    were several."""
    wanted = QUIET_SHARE * min(protocol.rounds, len(rounds))
    processes = {rounds[number].process for number in numbers}
    several = min(2, len({block.process for block in rounds}))
    return len(numbers) >= max(1.0, wanted) and len(processes) >= several


def usable(protocol: Protocol, entry: Entry, scenario: str) -> list[Round]:
    """The blocks that an artifact's own numbers come from: the quiet ones, or all if these are too few. A scenario that
    is
    one long run is kept whole: its queue, or its heat, depends on everything before."""
    return together(protocol, [entry], scenario)[0]


def together(protocol: Protocol, entries: Sequence[Entry], scenario: str) -> list[list[Round]]:
    """As `usable`, for several artifacts: the blocks of the same rounds of each."""
    every = [entry.rounds[scenario] for entry in entries]
    if not parse_scenario(scenario).spread:
        return [list(rounds) for rounds in every]
    numbers = quiet_together(entries, scenario)
    if not all(enough(protocol, numbers, rounds) for rounds in every):
        numbers = awake(every)
    return [[rounds[number] for number in numbers] for rounds in every]
