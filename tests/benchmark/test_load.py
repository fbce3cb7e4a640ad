"""How a runner is queried: back to back, and by arrivals of their own."""

import time

import numpy as np
import pytest
from scipy import stats

from vitdeploy.benchmark.load import PoissonLoad, back_to_back


def test_back_to_back_counts_every_query():
    calls = []
    load = back_to_back(lambda: calls.append(None), 0.0, least=5)
    assert len(calls) == len(load.latencies_ns) == 5
    assert sum(load.latencies_ns) / 1e9 == pytest.approx(load.busy_seconds)
    assert load.busy_seconds <= load.seconds
    assert load.waiting_ns == []


def test_arrivals_are_a_poisson_process_and_the_same_for_the_same_seed():
    arrivals = np.array(PoissonLoad(100.0, seed=1).arrivals_until(60 * 10**9))
    assert arrivals[0] == 0
    assert list(PoissonLoad(100.0, seed=1).arrivals_until(60 * 10**9)) == list(arrivals)
    assert list(PoissonLoad(100.0, seed=2).arrivals_until(60 * 10**9)) != list(arrivals)
    gaps = np.diff(arrivals) / 1e9
    assert stats.kstest(gaps, stats.expon(scale=0.01).cdf).pvalue > 0.01
    counts = np.histogram(arrivals, bins=60, range=(0, 60e9))[0]
    assert counts.var() / counts.mean() == pytest.approx(1, abs=0.5)  # as many more or fewer as chance gives


def test_arrivals_do_not_wait_for_answers():
    """Each query takes 5 ms and 400 a second arrive: latencies rise with the queue, and nothing is forgotten."""
    load = PoissonLoad(400.0, seed=0)
    blocks = [load.block(lambda: time.sleep(0.005), 0.1) for _ in range(3)]
    latencies = [latency for block in blocks for latency in block.latencies_ns]
    seconds = sum(block.seconds for block in blocks)
    scheduled = PoissonLoad(400.0, seed=0).arrivals_until(int(seconds * 1e9))
    assert len(latencies) + len(blocks[-1].waiting_ns) == pytest.approx(len(scheduled) - 1, abs=1)
    assert min(blocks[-1].latencies_ns) > max(blocks[0].latencies_ns[:3])
    assert len(blocks[-1].waiting_ns) > 20
    assert sum(block.busy_seconds for block in blocks) == pytest.approx(seconds, rel=0.05)


def test_the_clock_of_arrivals_stands_still_between_blocks():
    load = PoissonLoad(50.0, seed=0)
    first = load.block(lambda: None, 0.05)
    time.sleep(0.2)
    second = load.block(lambda: None, 0.05)
    expected = [each for each in PoissonLoad(50.0, seed=0).arrivals_until(10**8) if each < 10**8]
    answered = len(first.latencies_ns) + len(second.latencies_ns)
    assert answered + len(second.waiting_ns) == pytest.approx(len(expected), abs=1)
    assert max(second.latencies_ns, default=0) < 0.2e9
    assert len(second.waiting_ns) <= 1  # one that arrives when the block ends
