"""The queue before the engine: order, bounds, cancelled requests, its end."""

import threading
import time
from concurrent.futures import CancelledError, wait

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vitdeploy.serve.batcher import Batcher, ExecutionPlan


def rows(*values):
    return np.array(values, np.float32).reshape(-1, 1)


def make(engine, max_batch, max_delay=0.0, observe=None, together=None):
    """One run after the other, of all that fit or of as many as `together` says."""

    def plan(waiting, running):
        assert not running
        return ExecutionPlan(engine, max_batch if together is None else together(waiting))

    return Batcher(plan, max_batch, max_delay, observe)


class Engine:
    """Doubles; waits until it may run, and remembers what it was given."""

    def __init__(self, free=True):
        self.runs = []
        self.started = threading.Semaphore(0)
        self.free = threading.Event()
        if free:
            self.free.set()

    def __call__(self, tensor):
        self.started.release()
        self.free.wait(10)
        self.runs.append(tensor.ravel().tolist())
        if np.isnan(tensor).any():
            raise FloatingPointError("not a number")
        return {"twice": 2 * tensor}


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=12), st.integers(5, 8), st.sampled_from([0.0, 0.001]))
def test_all_are_answered_in_their_order_and_no_run_is_too_large(sizes, max_batch, max_delay):
    engine, number = Engine(), iter(range(1000))
    batcher = make(engine, max_batch, max_delay)
    tensors = [rows(*(next(number) for _ in range(size))) for size in sizes]
    futures = [batcher.submit(tensor) for tensor in tensors]
    batcher.close()
    for tensor, future in zip(tensors, futures, strict=True):
        answer = future.result(0)
        assert np.array_equal(answer.outputs["twice"], 2 * tensor)
        assert len(tensor) <= answer.batch <= max_batch
    assert [value for run in engine.runs for value in run] == [value for each in tensors for value in each.ravel()]
    assert all(len(run) <= max_batch for run in engine.runs)
    assert batcher.waiting == 0


def test_what_comes_while_the_engine_runs_is_answered_in_its_next_run():
    engine = Engine(free=False)
    seen = []
    batcher = make(engine, 4, observe=lambda images, seconds: seen.append(images))
    first = batcher.submit(rows(0))
    engine.started.acquire()
    others = [batcher.submit(rows(value)) for value in range(1, 7)]
    assert batcher.waiting == 6
    engine.free.set()
    wait([first, *others])
    batcher.close()
    assert engine.runs == [[0], [1, 2, 3, 4], [5, 6]]
    assert seen == [1, 4, 2]
    assert others[0].result().waited > 0


def test_what_is_not_faster_together_runs_alone():
    engine = Engine(free=False)
    batcher = make(engine, 8, together=lambda waiting: 8 if waiting >= 4 else 1)
    first = batcher.submit(rows(0))
    engine.started.acquire()
    others = [batcher.submit(rows(*values)) for values in ([1], [2, 3], [4, 5], [6], [7, 8, 9], [10])]
    engine.free.set()
    wait([first, *others])
    batcher.close()
    # Ten wait, so eight may run; of those left two are one request, which is not split.
    assert engine.runs == [[0], [1, 2, 3, 4, 5, 6], [7, 8, 9, 10]]
    engine = Engine(free=False)
    batcher = make(engine, 8, together=lambda waiting: 8 if waiting >= 4 else 1)
    first = batcher.submit(rows(0))
    engine.started.acquire()
    others = [batcher.submit(rows(*values)) for values in ([1, 2], [3])]
    engine.free.set()
    wait([first, *others])
    batcher.close()
    assert engine.runs == [[0], [1, 2], [3]]


def test_a_delay_gathers_and_a_full_batch_does_not_wait_for_its_end():
    engine = Engine()
    batcher = make(engine, 3, 60.0)
    futures = [batcher.submit(rows(value)) for value in range(3)]
    assert [future.result(10).batch for future in futures] == [3, 3, 3]
    alone = batcher.submit(rows(9))
    batcher.close()  # does not wait for the delay either
    assert alone.result(0).batch == 1


def test_a_request_alone_waits_for_the_delay_only():
    batcher = make(Engine(), 8, 0.05)
    answer = batcher.submit(rows(1)).result(10)
    assert answer.waited >= 0.045
    batcher.close()


def test_cancelled_requests_are_left_out():
    engine = Engine(free=False)
    batcher = make(engine, 4)
    first = batcher.submit(rows(0))
    engine.started.acquire()
    assert not first.cancel()  # it runs
    gone, stays = batcher.submit(rows(1)), batcher.submit(rows(2))
    assert gone.cancel()
    engine.free.set()
    assert stays.result(10).outputs["twice"].tolist() == [[4.0]]
    batcher.close()
    assert engine.runs == [[0], [2]]
    with pytest.raises(CancelledError):
        gone.result(0)


def test_an_error_is_told_to_its_run_only_and_the_next_goes_on():
    engine = Engine()
    batcher = make(engine, 1)
    wrong, right = batcher.submit(rows(np.nan)), batcher.submit(rows(3))
    with pytest.raises(FloatingPointError):
        wrong.result(10)
    assert right.result(10).outputs["twice"].tolist() == [[6.0]]
    batcher.close()


def test_closing_answers_all_and_takes_no_more():
    engine = Engine(free=False)
    batcher = make(engine, 1)
    futures = [batcher.submit(rows(value)) for value in range(5)]
    closing = threading.Thread(target=batcher.close)
    closing.start()
    while not batcher._closing:
        time.sleep(0.001)
    with pytest.raises(RuntimeError, match="closed"):
        batcher.submit(rows(1))
    engine.free.set()
    closing.join(10)
    assert all(future.done() for future in futures)


@pytest.mark.parametrize("count", [0, 5])
def test_a_request_that_can_never_run_is_refused(count):
    batcher = make(Engine(), 4)
    with pytest.raises(ValueError, match="expected 1 to 4"):
        batcher.submit(rows(*range(count)))
    batcher.close()


def side_by_side(engine, max_batch):
    """Two runs at a time, each of what fits."""
    return Batcher(lambda waiting, running: ExecutionPlan(engine, max_batch, alone=False), max_batch, workers=2)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=12))
def test_side_by_side_everybody_gets_his_own_answer(sizes):
    engine, number = Engine(), iter(range(1000))
    batcher = side_by_side(engine, 5)
    tensors = [rows(*(next(number) for _ in range(size))) for size in sizes]
    futures = [batcher.submit(tensor) for tensor in tensors]
    batcher.close()
    for tensor, future in zip(tensors, futures, strict=True):
        assert np.array_equal(future.result(0).outputs["twice"], 2 * tensor)
    assert sorted(value for run in engine.runs for value in run) == list(range(sum(sizes)))
    assert all(len(run) <= 5 for run in engine.runs)
    assert batcher.waiting == 0


def test_runs_go_side_by_side_but_for_one_that_is_alone():
    """An image that comes while nothing runs is alone; the others wait for its end, and then go at the same time."""
    engine, asked = Engine(free=False), []

    def plan(waiting, running):
        asked.append((waiting, running))
        return ExecutionPlan(engine, 1, alone=False) if waiting > 1 or running else ExecutionPlan(engine, 1)

    batcher = Batcher(plan, 8, workers=2)
    first = batcher.submit(rows(0))
    assert engine.started.acquire(timeout=10)
    others = [batcher.submit(rows(1)), batcher.submit(rows(2))]
    assert not engine.started.acquire(timeout=0.1)
    assert batcher.waiting == 2
    engine.free.set()
    answers = [future.result(10).outputs["twice"].tolist() for future in (first, *others)]
    assert answers == [[[0.0]], [[2.0]], [[4.0]]]
    batcher.close()
    assert asked[:2] == [(1, 0), (2, 0)]


def test_what_may_not_run_now_waits_for_the_end_of_a_run():
    """The second worker is free, but the plan says: not beside another one."""
    engine = Engine(free=False)
    batcher = Batcher(lambda waiting, running: None if running else ExecutionPlan(engine, 1, alone=False), 8, workers=2)
    futures = [batcher.submit(rows(value)) for value in range(3)]
    assert engine.started.acquire(timeout=10)
    assert not engine.started.acquire(timeout=0.1)
    engine.free.set()
    assert [future.result(10).outputs["twice"].item() for future in futures] == [0.0, 2.0, 4.0]
    batcher.close()
    assert engine.runs == [[0], [1], [2]]
