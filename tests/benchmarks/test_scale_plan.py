"""The arithmetic of docs/results/scale-plan.md on numbers that are easy to follow."""

import argparse

import pytest

pytest.importorskip("simpy", reason="pip install simpy")

from benchmarks.scale_plan import MACHINES, Measured, Plan, Prices, amounts, bounds, simulated

ROWS = {
    "shard": {"answers, KB": 2_000.0, "counts, KB": 1.0},
    "listing": {"images": 1e3, "memory, B an image": 200.0, "list, core s": 0.5, "known digests, core s": 0.5}
    | {"database, B an image": 100.0},
    "history": {"files": 100.0, "read all, core s": 0.1},
    "sweep": {"recipes": 10.0, "sweep.html, KB": 50.0, "sweep.json, KB": 100.0},
    "store": {"records": 1e5, "put, core ms": 3.0},
    "ray": {"ms a task": 2.0, "driver, KB a task": 1.0},
}
REQUESTS = {
    "make, the bytes are new": {"PUT": 2, "HEAD": 2},
    "look in vain": {"HEAD": 1},
    "find there, and bring": {"GET": 2},
}
FOUND = Measured(
    {name: [row] for name, row in ROWS.items()}, REQUESTS, decode=0.003, original=0.04, engine=0.02, boot=5
)
PLAN = Plan(513_000, 100, 10, 1_000, devices=10, on=2, measure_seconds=60, make_core_seconds=36)


def rows(text):
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()[2:]]
    return {name: others for name, *others in cells}


def test_amounts():
    found = rows(amounts(PLAN, Prices(0.5, 1.0, 0.1, 0.01), FOUND))
    assert found["shards of an evaluation"] == ["1,000, in 250 tasks"]
    assert found["tasks"] == ["27,600, and 200 measurements"]
    assert found["bytes of answers"] == ["20 GB"]
    # 513,000 images, 110 times decoded, 10 times by an original and 100 times by an engine; 36 s for each variant.
    hours = (513_000 * (110 * 0.003 + 10 * 0.04 + 100 * 0.02) + 3_600) / 3_600
    assert found["cores"] == [f"{hours:,.0f} core hours: {hours / 2:,.0f} $"]
    # Of 110,000 shards two writes each, two and two more reads, and two each for those that are brought.
    assert found["requests of the store"] == ["0 M that write, 1 M that read: 306 $"]
    assert found["devices"] == ["3 hours of measuring, 0.3 hours with all"]


def test_bounds_and_what_is_simulated():
    found = rows(bounds(PLAN, FOUND, answer=0.03))
    first = found["the driver reads results from an object store"]
    # Three requests for each of four shards, of which 32 are under way at a time.
    assert first[1].startswith(f"{4 * 3 * 0.03 / 32:.3f} s a task")
    given = argparse.Namespace(answer=0.03, life=10.0)
    lines = rows(simulated(Plan(20_000, 10, 1, 1_000, 10, 1, 60, 36), Prices(0.5, 1, 0.1, 0.01), FOUND, given))
    hours = [float(cells[0]) for cells in lines.values()]
    assert hours == sorted(hours, reverse=True) and len(lines) == len(MACHINES) + 1
