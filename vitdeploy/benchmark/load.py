"""Query loads, and waiting for a quiet machine."""

import math
import random
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from vitdeploy.benchmark import machine as probes
from vitdeploy.benchmark.evidence import TAKEN_SHARE, beyond_noise

# --- Loads of queries -------------------------------------------------------------------------------------------------
# Back to back, or with Poisson arrivals that do not wait for answers. Clocks are monotonic.


# Timers may be late by this much, so the last part of a wait spins.
SPIN_NS = 200_000

Query = Callable[[], object]


@dataclass(frozen=True)
class Load:
    """The result of a block: the latency of each answered query, the seconds of the block, and the seconds with a
    running query.

    `waiting_ns`: the ages of the queries that had arrived but not started.
    """

    latencies_ns: list[int]
    seconds: float
    busy_seconds: float
    waiting_ns: list[int]


def back_to_back(query: Query, seconds: float, least: int) -> Load:
    """Send queries for at least `seconds` and at least `least` times, each one when the previous one is answered."""
    latencies: list[int] = []
    start = end = time.perf_counter_ns()
    while end - start < seconds * 1e9 or len(latencies) < least:
        begin = time.perf_counter_ns()
        query()
        end = time.perf_counter_ns()
        latencies.append(end - begin)
    return Load(latencies, (end - start) / 1e9, sum(latencies) / 1e9, [])


class PoissonLoad:
    """Queries that arrive at random, `rate` a second on average, and are answered one after the other.

    A latency counts from the scheduled arrival, so it includes the time in the queue, however late the query started.
    The arrival clock stops between blocks, and the queue is kept: the blocks together are one run. The first query
    arrives at 0, as in MLPerf's LoadGen. Equal seeds give equal arrivals.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self._rate = rate
        self._random = random.Random(seed)  # noqa: S311  (nothing secret)
        self._arrivals: deque[int] = deque([0])
        self._now = 0

    def arrivals_until(self, moment: int) -> deque[int]:
        """The arrivals in ns that have not started, at least up to the first one after `moment`."""
        while self._arrivals[-1] <= moment:
            self._arrivals.append(self._arrivals[-1] + max(1, round(self._random.expovariate(self._rate) * 1e9)))
        return self._arrivals

    def block(self, query: Query, seconds: float) -> Load:
        """Answer the queries that arrive within the next `seconds` of the run; a started query is finished."""
        offset, first, latencies, busy = time.perf_counter_ns() - self._now, self._now, [], 0
        deadline = first + int(seconds * 1e9)
        while (now := time.perf_counter_ns() - offset) < deadline:
            arrival = self.arrivals_until(now)[0]
            if arrival > now:
                _wait_until(min(arrival, deadline) + offset)
                continue
            self._arrivals.popleft()
            query()
            end = time.perf_counter_ns() - offset
            latencies.append(end - arrival)
            busy += end - now
        self._now = now
        waiting = [now - arrival for arrival in self.arrivals_until(now) if arrival <= now]
        return Load(latencies, (now - first) / 1e9, busy / 1e9, waiting)


def _wait_until(moment: int) -> None:
    """Sleep, and spin for the last part, until the monotonic clock reaches `moment`."""
    left = moment - time.perf_counter_ns()
    if left > SPIN_NS:
        time.sleep((left - SPIN_NS) / 1e9)
    while time.perf_counter_ns() < moment:
        pass


# --- Waiting for a quiet machine, within a time limit -----------------------------------------------------------------


# The machine is watched this long before it counts as quiet: a few dozen kernel ticks.
WATCH_SECONDS = 0.3
NAMED_PROCESSES = 2

Times = Mapping[int, tuple[str, float]]


@dataclass(frozen=True)
class Others:
    """Activity of other processes while the machine was watched: the number of busy `cpus`, and the `names` of the
    busiest processes."""

    cpus: float
    of: int
    names: tuple[str, ...]

    @property
    def quiet(self) -> bool:
        return self.cpus <= TAKEN_SHARE * self.of

    def __str__(self) -> str:
        by = f" ({', '.join(self.names)})" if self.names else ""
        return f"other processes use {self.cpus:.1f} of {self.of} CPUs{by}"


class Patience:
    """A limit on the total seconds that a benchmark run waits. `tell` is called with the reason."""

    def __init__(self, seconds: float, tell: Callable[[str], None], root: Path = probes.ROOT) -> None:
        self._left, self._tell, self._root = seconds, tell, root
        self._told = False
        self._watches = seconds >= WATCH_SECONDS

    def wait(self) -> bool:
        """Wait within the limit for a quiet machine; returns whether it is quiet or cannot be watched."""
        if not self._watches:
            return True
        while True:
            others = watched(self._root)
            if others is None or others.quiet:
                return True
            if self._left < WATCH_SECONDS:
                return False
            if not self._told:
                self._tell(f"{others}; waiting up to {math.ceil(self._left)} s for a quiet machine")
                self._told = True
            self._left -= WATCH_SECONDS


def watched(root: Path = probes.ROOT, seconds: float = WATCH_SECONDS) -> Others | None:
    """Activity of other processes on the CPUs of this idle process; None if the system does not report it."""
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
    """The name, PID and CPU share of the busiest processes."""
    shares = {pid: (used - before.get(pid, ("", 0.0))[1]) / seconds for pid, (_, used) in after.items()}
    order = sorted((pid for pid in shares if shares[pid] > TAKEN_SHARE), key=lambda pid: -shares[pid])[:NAMED_PROCESSES]
    return tuple(f"{probes.printable(after[pid][0])} {pid}: {100 * shares[pid]:.0f} %" for pid in order)
