"""The simulation behind docs/results/scale-plan.md, where its answer is known without it."""

import pytest

pytest.importorskip("simpy", reason="pip install simpy")

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.scale_model import Place, Task, Work, simulate

SHARDS = Work(variants=1, make=Task(0.0), shards=12, shard=Task(2.0))


@pytest.mark.parametrize(
    ("workers", "cores", "seconds"),
    [(1, 2, 24.0), (2, 2, 12.0), (4, 2, 12.0), (4, 4, 6.0), (3, 2, 12.0), (1, 1, 24.0)],
)
def test_workers_share_the_cores_that_there_are(workers, cores, seconds):
    found = simulate(SHARDS, Place(workers=workers, cores=cores))
    assert found.seconds == pytest.approx(seconds)
    assert found.core_seconds == pytest.approx(24.0) and found.failed == found.deaths == 0


def test_a_task_of_several_threads_takes_the_cores_that_others_leave():
    wide = Work(variants=1, shards=4, shard=Task(6.0, threads=2))
    assert simulate(wide, Place(workers=1, cores=2)).seconds == pytest.approx(12.0)
    assert simulate(wide, Place(workers=1, cores=8)).seconds == pytest.approx(12.0)
    assert simulate(wide, Place(workers=4, cores=8)).seconds == pytest.approx(3.0)


def test_engines_of_one_machine_run_in_turns_while_images_are_decoded():
    shard = Task(3.0, turn_core_seconds=4.0, turn_threads=2)
    work = Work(variants=1, shards=4, shard=shard)
    # One worker: 3 and 4 core seconds share two cores, as fast as both can.
    assert simulate(work, Place(workers=1, cores=2)).seconds == pytest.approx(4 * 7 / 2)
    assert simulate(work, Place(workers=4, cores=2)).seconds == pytest.approx(4 * 7 / 2)
    # With many cores the turns are what counts, and another machine has turns of its own.
    assert simulate(work, Place(workers=4, cores=16)).seconds == pytest.approx(4 * 2)
    assert simulate(work, Place(workers=4, machines=2, cores=16)).seconds == pytest.approx(2 * 2)


def test_the_driver_and_the_start_of_workers_take_their_time():
    work = Work(variants=1, shards=12, shard=Task(2.0), before=Task(3.0), after=Task(1.0))
    assert simulate(work, Place(cores=1, boot=Task(5.0))).seconds == pytest.approx(3 + 5 + 24 + 1)
    # Thirteen results, one after the other, each longer than a worker needs for the next one.
    slow = simulate(SHARDS, Place(workers=12, cores=12, collect_seconds=10.0))
    assert slow.seconds == pytest.approx(10 + 2 + 120) and slow.waiting == 11
    assert slow.driver_busy == pytest.approx(130 / 132)


def test_the_store_answers_so_many_requests_a_second():
    work = Work(variants=1, shards=100, shard=Task(0.0, requests=3, bytes=10.0))
    bound = simulate(work, Place(workers=50, store_rate=10.0))
    assert bound.seconds == pytest.approx(30.0, rel=0.01) and bound.requests == 300 and bound.store_busy > 0.99
    slow = simulate(work, Place(workers=1, store_seconds=0.5, store_bytes=10.0))
    assert slow.seconds == pytest.approx(100 * (1.5 + 1.0))


def test_devices_measure_one_after_the_other():
    work = Work(variants=6, measured_on=2, measure_seconds=7.0)
    found = simulate(work, Place(devices=3))
    assert found.measured == found.seconds == pytest.approx(4 * 7.0) and found.device_busy == pytest.approx(1.0)
    away = simulate(work, Place(devices=3, device_life=20.0, device_away=5.0))
    assert away.seconds > found.seconds


@settings(deadline=None, max_examples=25)
@given(seed=st.integers(0, 1000), life=st.floats(20, 200), workers=st.integers(1, 5))
def test_deaths_cost_time_and_lose_nothing(seed, life, workers):
    calm = simulate(SHARDS, Place(workers=workers, cores=2, boot=Task(1.0)))
    found = simulate(SHARDS, Place(workers=workers, cores=2, boot=Task(1.0), worker_life=life), seed)
    assert found.deaths >= 3 * found.failed
    if not found.failed:
        assert found.seconds >= calm.seconds - 1e-6 and found.core_seconds >= calm.core_seconds - 1e-6
    assert found == simulate(SHARDS, Place(workers=workers, cores=2, boot=Task(1.0), worker_life=life), seed)


def test_a_task_that_dies_each_time_is_given_up():
    work = Work(variants=1, shards=2, shard=Task(1000.0))
    found = simulate(work, Place(worker_life=1.0))
    assert (found.failed, found.deaths) == (2, 6)
    whole = Work(variants=1, make=Task(1000.0), shards=2, measured_on=1, measure_seconds=1.0)
    assert simulate(whole, Place(worker_life=1.0, devices=1)).failed == 1


def test_a_driver_that_dies_ends_its_workers_and_what_was_finished_stays():
    work = Work(variants=1, shards=12, shard=Task(2.0), before=Task(1.0))
    calm = simulate(work, Place())
    found = simulate(work, Place(driver_life=10.0, driver_start_seconds=3.0), seed=1)
    again = found.driver_deaths * (3.0 + 1.0)
    assert found.driver_deaths > 0 and (found.failed, found.deaths) == (0, 0)
    assert calm.seconds + again < found.seconds <= calm.seconds + again + 2.0 * found.driver_deaths
