"""p99 against p99: seen where it is so, and not where it is not."""

import numpy as np
import pytest

from vitdeploy.benchmark.protocol import Protocol
from vitdeploy.benchmark.results import BenchRun, Measurements, Round
from vitdeploy.benchmark.tail import Tail, p99_ms, tail_of

PROTOCOL = Protocol(("single",), (1,), duration=10.0, max_extension=1)


def entry(name, drawn, slower=1.0, tail=1.0, queries=100):
    """Rounds of a single stream, whose processes and queries differ; a share of 3 % takes `tail` times as long."""
    rounds = []
    for process in range(PROTOCOL.processes):
        own = drawn.normal(0, 0.005)
        for _ in range(PROTOCOL.rounds_of(process)):
            times = slower * np.exp(own + drawn.normal(0, 0.02, queries))
            times[drawn.random(queries) < 0.03] *= tail
            rounds.append(Round(1, times, float(times.sum() / 1e3) * 1.0001, process))
    return Measurements(name, "openvino-cpu", "int8", "CPU", 0.1, 1.0, {"single": rounds})


def measured(seed, **how):
    drawn = np.random.default_rng(seed)
    return BenchRun(PROTOCOL, (entry("new", drawn, **how), entry("current", drawn, tail=how.get("tail", 1.0))), 0.0, 2)


def tails(count=60, **how):
    return [tail_of(measured(seed, **how), "new", "current") for seed in range(count)]


@pytest.mark.parametrize("tail", [1.0, 3.0])
def test_a_release_as_fast_is_hardly_ever_called_slower(tail):
    found = tails(tail=tail)
    assert sum(each.slower(0.1) for each in found) == 0
    assert np.mean([each.low <= 1 <= each.high for each in found]) >= 0.9
    assert np.mean([each.undecided(0.1) == "" for each in found]) >= 0.8


def test_one_that_is_a_third_slower_is_seen():
    found = tails(slower=1.33, tail=3.0)
    assert np.mean([each.slower(0.1) for each in found]) >= 0.95
    assert np.mean([each.ratio for each in found]) == pytest.approx(1.33, abs=0.03)


def test_only_the_tail_may_be_slower():
    drawn = np.random.default_rng(3)
    entries = (entry("new", drawn, tail=2.0), entry("current", drawn))
    tail = tail_of(BenchRun(PROTOCOL, entries, 0.0, 2), "new", "current")
    assert tail.slower(0.5) and 1.7 < tail.ratio < 2.2
    assert tail.a_ms == pytest.approx(p99_ms(BenchRun(PROTOCOL, entries[:1], 0.0, 2), "new"))


def test_what_nobody_can_say_is_said():
    level = (1.0, 0.99, 1.01)
    wide = Tail(1.1, 0.9, 1.4, 2.0, 1.8, 100, level)
    assert not wide.slower(0.1) and "p99 is 1.10 times (0.90 to 1.40): measure for longer" in wide.undecided(0.1)
    assert Tail(1.0, 0.9, 1.05, 2, 2, 100, level, "busy").undecided(0.1) == "busy"
    assert Tail(2.0, 1.9, 2.1, 2, 1, 100, level, "busy").undecided(0.1) == ""  # it is slower, whatever else ran
    assert Tail(2.0, 0.5, 8.0, 2, 1, 100, (3.0, 2.9, 3.1)).slower(0.1)  # nobody sees its tail, and medians tell


def test_one_process_of_few_queries_is_enough_for_a_number():
    rounds = [Round(1, np.array([1.0 + number]), 1.0, 0) for number in range(3)]
    entries = tuple(Measurements(name, "x", "int8", "CPU", 0.1, 1.0, {"single": rounds}) for name in ("new", "current"))
    tail = tail_of(BenchRun(Protocol(("single",), (1,)), entries, 0.0, 2), "new", "current")
    assert (tail.ratio, tail.queries) == (1.0, 3) and tail.low < 1 < tail.high
