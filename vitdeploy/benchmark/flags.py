"""Why a latency or a throughput cannot be relied on; a flagged one passes no gate.

An imprecise number has a wide interval and gets no flag. A flag marks a number whose interval may not contain the true
value, or one that measured something other than its name says. Ratios are judged separately (`decided`): much that
affects both artifacts cancels out in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from vitdeploy.benchmark.paired import clustered, medians_of
from vitdeploy.benchmark.percentiles import queries_needed
from vitdeploy.benchmark.protocol import parse_scenario
from vitdeploy.benchmark.quiet import SUSPENDED_SECONDS, TAKEN_SHARE, enough, undisturbed, usable
from vitdeploy.benchmark.results import BenchRun, Entry, Machine, Round
from vitdeploy.benchmark.slowed import reasons

# How far the interval of the median query of a block may reach to either side.
UNSTABLE = 0.1
# How much a clock, or the throughput, may slow down.
THROTTLED = 0.05
# A server that is busy for this share of the time has no steady latency: its queue only grows.
OVERLOADED = 0.98
# The least number of rounds with a first and a last quarter.
QUARTERS = 4


def flags(bench_run: BenchRun, entry: Entry, scenario: str, percents: Sequence[float]) -> list[str]:
    """The flags of one candidate, whose latency is that of `scenario`; docs/measuring.md says what each means."""
    rounds = usable(bench_run.protocol, entry, scenario)
    used = [block for name in entry.rounds for block in usable(bench_run.protocol, entry, name)]
    every = [block for blocks in entry.rounds.values() for block in blocks]
    machines = [block.machine for block in every if block.machine is not None]
    found = {
        "throttled": any(_slows_down(blocks) for blocks in entry.rounds.values())
        or _throttles(machines)
        or any(_mostly_throttled(bench_run, name, blocks) for name, blocks in entry.rounds.items())
        or any(_tires(blocks) for name, blocks in entry.rounds.items() if name.startswith("sustain")),
        "unstable": _unstable(rounds),
        "contended": _contended(bench_run, entry),
        "fallback": falls_back(entry),
        "short": sum(block.latencies_ms.size for block in rounds) < max(map(queries_needed, percents)),
        "overloaded": any(_overloaded(blocks) for name, blocks in entry.rounds.items() if name.startswith("server")),
        "suspended": any(_slept(block) for block in used),
    }
    return [name for name, holds in found.items() if holds]


def falls_back(entry: Entry) -> bool:
    """Whether it ran on another provider than when it was built."""
    return bool(entry.made_for) and entry.provider != entry.made_for


def _slept(block: Round) -> bool:
    return block.machine is not None and block.machine.suspended_seconds > SUSPENDED_SECONDS


def taken_by_others(entry: Entry, rounds: Sequence[Round]) -> float | None:
    """The share of its CPUs' time that other processes and other virtual machines used; None if unknown."""
    seconds, taken = 0.0, 0.0
    for block in rounds:
        machine = block.machine
        if machine is None or machine.other_seconds is None or machine.stolen_seconds is None:
            return None
        seconds += block.seconds
        taken += machine.other_seconds + machine.stolen_seconds
    return max(0.0, taken) / (seconds * len(entry.affinity)) if seconds and entry.affinity else None


def first_and_last(rounds: Sequence[Round], seconds: float = 60.0) -> tuple[float, float]:
    """Images per second in the first minute of a sustained run, and in the last; of a short one in its first and last
    third."""
    count = max(1, min(round(seconds), len(rounds) // 3))
    return _rate(rounds[:count]), _rate(rounds[-count:])


def _rate(rounds: Sequence[Round]) -> float:
    return sum(block.batch * block.latencies_ms.size for block in rounds) / sum(block.seconds for block in rounds)


def _unstable(rounds: Sequence[Round]) -> bool:
    filled = [block for block in rounds if block.latencies_ms.size]
    if len(filled) < 2:
        return False
    medians = np.log(np.asarray(medians_of(filled)))
    return clustered(medians, [block.process for block in filled]).reach > UNSTABLE


def _contended(bench_run: BenchRun, entry: Entry) -> bool:
    """Whether so many blocks were disturbed that the quiet ones cannot stand for all; for a scenario that is one long
    run, whose blocks all count, whether others used more than the allowed share."""
    for name, rounds in entry.rounds.items():
        if parse_scenario(name).spread:
            if not enough(bench_run.protocol, _numbers(undisturbed(rounds, len(entry.affinity))), rounds):
                return True
        elif (taken_by_others(entry, rounds) or 0.0) > TAKEN_SHARE:
            return True
    return load_disturbs(bench_run, entry)


def _mostly_throttled(bench_run: BenchRun, name: str, rounds: Sequence[Round]) -> bool:
    """Whether the machine throttled in so many blocks that the others cannot stand for all; for a scenario that is one
    long run, in any."""
    spread = parse_scenario(name).spread
    slowed = reasons(rounds, loaded=spread)
    if not spread:
        return any(slowed)
    return any(slowed) and not enough(bench_run.protocol, _numbers([not each for each in slowed]), rounds)


def _numbers(holds: Sequence[bool]) -> list[int]:
    return [number for number, each in enumerate(holds) if each]


def load_disturbs(bench_run: BenchRun, entry: Entry) -> bool:
    """Whether the load at the start was above the number of CPUs, if the system does not report who uses them."""
    every = [block for blocks in entry.rounds.values() for block in blocks]
    unknown = taken_by_others(entry, every) is None
    return unknown and bench_run.load_average is not None and bench_run.load_average > bench_run.cpus + 0.5


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
