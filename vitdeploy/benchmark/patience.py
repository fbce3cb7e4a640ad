"""Waiting until nobody else uses the machine, within a time limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.benchmark import probes
from vitdeploy.benchmark.quiet import TAKEN_SHARE, beyond_noise

# How long the machine is watched before it counts as quiet: a few dozen of the kernel's ticks.
WATCH_SECONDS = 0.3
NAMED_PROCESSES = 2

Times = Mapping[int, tuple[str, float]]


@dataclass(frozen=True)
class Others:
    """Other activity while the machine was watched: how many `cpus` it kept busy, and the `names` of the busiest
    processes."""

    cpus: float
    of: int
    names: tuple[str, ...]

    @property
    def quiet(self) -> bool:
        return self.cpus <= TAKEN_SHARE * self.of

    def __str__(self) -> str:
        by = f" ({', '.join(self.names)})" if self.names else ""
        return f"others use {self.cpus:.1f} of {self.of} CPUs{by}"


class Patience:
    """The total seconds that a benchmark run may wait. `tell` is called with what it waits for."""

    def __init__(self, seconds: float, tell: Callable[[str], None], root: Path = probes.ROOT) -> None:
        self._left, self._tell, self._root = seconds, tell, root
        self._told = False
        self._watches = seconds >= WATCH_SECONDS

    def wait(self) -> bool:
        """Wait until the machine is quiet, within the limit; returns whether it is quiet, or cannot be watched."""
        if not self._watches:
            return True
        while True:
            others = watched(self._root)
            if others is None or others.quiet:
                return True
            if self._left < WATCH_SECONDS:
                return False
            if not self._told:
                self._tell(f"{others}: waits for a quiet machine, at most {self._left:.0f} s")
                self._told = True
            self._left -= WATCH_SECONDS


def watched(root: Path = probes.ROOT, seconds: float = WATCH_SECONDS) -> Others | None:
    """Other activity on the CPUs of this process, which idles meanwhile; None if the system does not report it."""
    cpus = probes.affinity()
    earlier, begun, own = probes.process_seconds(root), time.monotonic(), time.process_time()
    before = probes.cpu_times(cpus, root)
    time.sleep(seconds)
    after = probes.cpu_times(cpus, root)
    own, passed = time.process_time() - own, time.monotonic() - begun
    if before is None or after is None:
        return None
    busy = after.busy - before.busy + after.stolen - before.stolen - own
    used = beyond_noise(busy, len(cpus)) / passed
    if used <= TAKEN_SHARE * len(cpus):
        return Others(used, len(cpus), ())
    return Others(used, len(cpus), _busiest(earlier, probes.process_seconds(root), passed))


def _busiest(before: Times, after: Times, seconds: float) -> tuple[str, ...]:
    """The name, process number and CPU share of the busiest processes."""
    shares = {pid: (used - before.get(pid, ("", 0.0))[1]) / seconds for pid, (_, used) in after.items()}
    order = sorted((pid for pid in shares if shares[pid] > TAKEN_SHARE), key=lambda pid: -shares[pid])[:NAMED_PROCESSES]
    return tuple(f"{_printable(after[pid][0])} {pid}: {100 * shares[pid]:.0f} %" for pid in order)


def _printable(name: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in name)
