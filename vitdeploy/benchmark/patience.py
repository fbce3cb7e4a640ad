"""Waiting until nobody else uses the machine, for so long and no longer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.benchmark import probes
from vitdeploy.benchmark.quiet import TAKEN_SHARE, beyond_noise

# How long the machine is watched before it is called quiet: some dozens of the ticks in which the kernel counts.
WATCH_SECONDS = 0.3
NAMED_PROCESSES = 2

Times = Mapping[int, tuple[str, float]]


@dataclass(frozen=True)
class Others:
    """What others computed while the machine was watched: `cpus` of them were busy with it; `names` are the busiest."""

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
    """So many seconds in which a benchmark run may wait, all together. `tell` hears what is waited for."""

    def __init__(self, seconds: float, tell: Callable[[str], None], root: Path = probes.ROOT) -> None:
        self._left, self._tell, self._root = seconds, tell, root
        self._told = False
        self._watches = seconds >= WATCH_SECONDS

    def wait(self) -> bool:
        """Wait until the machine is quiet, while there is patience; returns whether it is, or cannot be seen."""
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
    """What others do on the CPUs of this process, which does nothing meanwhile; None where the system does not say."""
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
    """The name, number and share of a CPU of those that computed most."""
    shares = {pid: (used - before.get(pid, ("", 0.0))[1]) / seconds for pid, (_, used) in after.items()}
    order = sorted((pid for pid in shares if shares[pid] > TAKEN_SHARE), key=lambda pid: -shares[pid])[:NAMED_PROCESSES]
    return tuple(f"{_printable(after[pid][0])} {pid}: {100 * shares[pid]:.0f} %" for pid in order)


def _printable(name: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in name)
