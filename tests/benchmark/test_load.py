"""How a runner is queried: back to back, and by arrivals of their own. The clock is one that only these tests move."""

import numpy as np
import pytest
from scipy import stats

from vitdeploy.benchmark import load as module
from vitdeploy.benchmark.load import Load, PoissonLoad, back_to_back

MS = 10**6


class Clock:
    """In the place of `time`: each look takes 100 ns, a query as long as it says, and a sleep 80 us more than asked."""

    def __init__(self):
        self.now, self.slept = 7 * 10**9, []

    def perf_counter_ns(self):
        self.now += 100
        return self.now

    def sleep(self, seconds):
        self.slept.append(seconds)
        self.now += round(seconds * 1e9) + 80_000

    def query(self, ns):
        def run():
            self.now += ns

        return run


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_back_to_back_counts_every_query(clock):
    """Each takes 4 ms and a look at the clock; there is one look more between two of them."""
    found = back_to_back(clock.query(4 * MS), 0.0, least=5)
    assert found == Load([4 * MS + 100] * 5, pytest.approx((5 * 4 * MS + 1000) / 1e9), 5 * (4 * MS + 100) / 1e9, [])
    assert len(back_to_back(clock.query(4 * MS), 0.1, least=5).latencies_ns) == 25


def test_arrivals_are_a_poisson_process_and_the_same_for_the_same_seed():
    arrivals = np.array(PoissonLoad(100.0, seed=1).arrivals_until(60 * 10**9))
    assert arrivals[0] == 0
    assert list(PoissonLoad(100.0, seed=1).arrivals_until(60 * 10**9)) == list(arrivals)
    assert list(PoissonLoad(100.0, seed=2).arrivals_until(60 * 10**9)) != list(arrivals)
    gaps = np.diff(arrivals) / 1e9
    assert stats.kstest(gaps, stats.expon(scale=0.01).cdf).pvalue > 0.01
    counts = np.histogram(arrivals, bins=60, range=(0, 60e9))[0]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.5)  # as many more or fewer as chance gives


def answered(load, clock, ns, seconds, times):
    """The blocks of queries that take so long; other work of 2 s goes on between them."""
    blocks = []
    for _ in range(times):
        blocks.append(load.block(clock.query(ns), seconds))
        clock.now += 2 * 10**9
    return blocks


def queue(arrivals, ns, seconds, times):
    """What a queue with one server does: the latencies and ages by Lindley's recursion, and the ends of the blocks."""
    latencies, now = [], 0
    for _ in range(times):
        end = now + round(seconds * 1e9)
        while len(latencies) < len(arrivals) and max(now, arrivals[len(latencies)]) < end:
            now = max(now, arrivals[len(latencies)]) + ns
            latencies.append(now - arrivals[len(latencies)])
        now = max(now, end)
    return latencies, [now - each for each in arrivals[len(latencies) :] if each <= now], now


@pytest.mark.parametrize(("rate", "ns"), [(400.0, 5 * MS), (50.0, 5 * MS), (1000.0, MS // 2)])
def test_latencies_count_from_the_arrival_and_nothing_is_forgotten(clock, rate, ns):
    """Where more arrives than can be answered, latencies rise with the queue; and between blocks no time passes."""
    blocks = answered(PoissonLoad(rate, seed=0), clock, ns, 0.1, 3)
    arrivals = [each for each in PoissonLoad(rate, seed=0).arrivals_until(10**9) if each <= 10**9]
    latencies, waiting, end = queue(arrivals, ns, 0.1, 3)
    found = [each for block in blocks for each in block.latencies_ns]
    looks = 0.1 * MS  # what looking at the clock takes, and waking up
    np.testing.assert_allclose(found, latencies, atol=looks)
    np.testing.assert_allclose(blocks[-1].waiting_ns, waiting, atol=looks)
    assert sum(block.seconds for block in blocks) == pytest.approx(end / 1e9, rel=1e-3)
    assert sum(block.busy_seconds for block in blocks) == pytest.approx(len(found) * ns / 1e9, rel=1e-3)
    assert (len(waiting) > 20) == (rate == 400)


def test_a_timer_that_wakes_up_late_delays_no_query(clock):
    """It sleeps until 200 us before the arrival, and looks at the clock from then on."""
    blocks = answered(PoissonLoad(100.0, seed=3), clock, MS, 0.2, 1)
    alone = [each for each in blocks[0].latencies_ns if each < 1.5 * MS]
    assert len(alone) > 5
    assert max(alone[:5]) - MS < 1000
    assert clock.slept
