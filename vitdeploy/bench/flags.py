"""What makes a measurement less than a good one; a flagged one passes no gate."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from vitdeploy.bench.percentiles import queries_needed
from vitdeploy.bench.results import Contest, Entry, Machine, Round

# Of the medians of rounds, and of the medians of processes.
UNSTABLE, UNSTABLE_PROCESSES = 0.05, 0.03
# The share of its CPUs' time that others may take.
CONTENDED = 0.05
# How much slower a clock, or what is computed in a second, may become.
THROTTLED = 0.05
# Busy for so much of the time, a server has no steady latency: its queue only grows.
OVERLOADED = 0.98
SUSPENDED_SECONDS = 0.05
# Rounds that a first and a last quarter can be made of.
QUARTERS = 4


def flags(contest: Contest, entry: Entry, scenario: str, percents: Sequence[float]) -> list[str]:
    """The flags of one contestant, whose latency is that of `scenario`; docs/measuring.md says what each means."""
    rounds = entry.rounds[scenario]
    every = [block for blocks in entry.rounds.values() for block in blocks]
    machines = [block.machine for block in every if block.machine is not None]
    found = {
        "throttled": any(_slows_down(blocks) for blocks in entry.rounds.values())
        or _throttles(machines)
        or any(_tires(blocks) for name, blocks in entry.rounds.items() if name.startswith("sustain")),
        "unstable": _unstable(rounds),
        "contended": _contended(contest, entry, every),
        "fallback": bool(entry.made_for) and entry.provider != entry.made_for,
        "short": sum(block.latencies_ms.size for block in rounds) < max(map(queries_needed, percents)),
        "overloaded": any(_overloaded(blocks) for name, blocks in entry.rounds.items() if name.startswith("server")),
        "suspended": any(machine.suspended_seconds > SUSPENDED_SECONDS for machine in machines),
    }
    return [name for name, holds in found.items() if holds]


def taken_by_others(entry: Entry, rounds: Sequence[Round]) -> float | None:
    """The share of its CPUs' time that other processes and other virtual machines had; None where nobody knows."""
    seconds, taken = 0.0, 0.0
    for block in rounds:
        machine = block.machine
        if machine is None or machine.other_seconds is None or machine.stolen_seconds is None:
            return None
        seconds += block.seconds
        taken += machine.other_seconds + machine.stolen_seconds
    return taken / (seconds * len(entry.affinity)) if seconds and entry.affinity else None


def first_and_last(rounds: Sequence[Round], seconds: float = 60.0) -> tuple[float, float]:
    """Images per second in the first minute of a sustained run, and in the last; of a short one in its first and last
    third."""
    count = max(1, min(round(seconds), len(rounds) // 3))
    return _rate(rounds[:count]), _rate(rounds[-count:])


def _rate(rounds: Sequence[Round]) -> float:
    return sum(block.batch * block.latencies_ms.size for block in rounds) / sum(block.seconds for block in rounds)


def _unstable(rounds: Sequence[Round]) -> bool:
    medians = [(block.process, float(np.median(block.latencies_ms))) for block in rounds if block.latencies_ms.size]
    if _varies([median for _, median in medians], UNSTABLE):
        return True
    processes = sorted({process for process, _ in medians})
    return _varies([float(np.median([m for p, m in medians if p == each])) for each in processes], UNSTABLE_PROCESSES)


def _varies(values: Sequence[float], limit: float) -> bool:
    """Whether the coefficient of variation is above `limit`."""
    return len(values) > 1 and bool(np.std(values, ddof=1) > limit * np.mean(values))


def _contended(contest: Contest, entry: Entry, rounds: Sequence[Round]) -> bool:
    share = taken_by_others(entry, rounds)
    if share is not None:
        return share > CONTENDED
    return contest.load_average is not None and contest.load_average > contest.cpus + 0.5


def _slows_down(rounds: Sequence[Round]) -> bool:
    """Whether the clock of the last quarter of the rounds is lower than that of the first."""
    clocks = [block.machine.mhz for block in rounds if block.machine is not None and block.machine.mhz is not None]
    quarter = len(clocks) // QUARTERS
    return quarter > 0 and bool(np.median(clocks[-quarter:]) < (1 - THROTTLED) * np.median(clocks[:quarter]))


def _throttles(machines: Sequence[Machine]) -> bool:
    counts = [machine.throttles for machine in machines if machine.throttles is not None]
    return any(after > before for before, after in pairwise(counts))


def _tires(rounds: Sequence[Round]) -> bool:
    first, last = first_and_last(rounds)
    return last < (1 - THROTTLED) * first


def _overloaded(rounds: Sequence[Round]) -> bool:
    return sum(block.busy_seconds for block in rounds) > OVERLOADED * sum(block.seconds for block in rounds)
