"""How a runner is queried: back to back, or by Poisson arrivals that do not wait for answers. Clocks are monotonic."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

# A timer may wake up this late: the rest of the wait spins.
SPIN_NS = 200_000

Query = Callable[[], object]


@dataclass(frozen=True)
class Load:
    """The result of a block: the latency of each answered query, the seconds of the block, and those with a query
    running.

    `waiting_ns`: the ages of the queries that had arrived but not started.
    """

    latencies_ns: list[int]
    seconds: float
    busy_seconds: float
    waiting_ns: list[int]


def back_to_back(query: Query, seconds: float, least: int) -> Load:
    """Query for at least `seconds` and `least` queries, the next one when the previous one is answered."""
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
        """Answer what arrives within the next `seconds` of the run; a query that has started is finished."""
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
    """Sleep, and for the last part spin, until the monotonic clock says `moment`."""
    left = moment - time.perf_counter_ns()
    if left > SPIN_NS:
        time.sleep((left - SPIN_NS) / 1e9)
    while time.perf_counter_ns() < moment:
        pass
