"""Figure: a crash after each operation of plans that publish, with all that a file system may lose (`crash`)."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.faults.crash import Crashed, Recorder, crashes
from tests.faults.forking import in_child
from tests.faults.gate import Row
from tests.faults.plans import PLANS, Plan, in_memory

SEED = 7
# Sets of operations drawn at random at each point; the short form has those that are no chance.
DRAWS, FULL_DRAWS = 0, 40


def run(full: bool, work: Path) -> list[Row]:
    """Each different disk that a crash may leave is looked at, and the plan done there again."""
    row = Row("crash points of small plans", 0)
    with in_memory(work) as memory:
        for plan in PLANS:
            row.expected += crash(row, plan, memory, FULL_DRAWS if full else DRAWS)
    return [row]


def crash(row: Row, plan: Plan, work: Path, draws: int = DRAWS, *, to_first: bool = False) -> int:
    """Add a case for each disk, or up to the first one that is wrong; returns the number of points."""
    home = work / "recorded"
    home.mkdir()
    recorded = in_child(record, plan, home)
    shutil.rmtree(home)
    if recorded.status != 0:
        row.add(plan.name, "crash", note=f"exit status {recorded.status} {recorded.error[-300:]}")
        return 1
    before, operations = recorded.result
    for number, crashed in enumerate(crashes(before, operations, SEED, draws)):
        wrong = _look(plan, crashed, work / str(number))
        row.add(f"{plan.name}, {crashed.told}", "wrong" if wrong else "clean", note=wrong)
        if wrong and to_first:
            break
    return len(operations) + 1


def record(plan: Plan, home: Path) -> object:
    """In a process that is gone when its disks are looked at."""
    plan.before(home)
    with Recorder(home, links=plan.links) as recorder:
        plan.run(home)
    return recorder.before, recorder.operations


def _look(plan: Plan, crashed: Crashed, home: Path) -> str:
    """What is wrong with a disk, and with what the same command makes there. What was done to its end stays done."""
    home.mkdir()
    crashed.disk.write(home)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: None)  # nobody cuts the power here
            wrong = plan.made(home) if crashed.ended else plan.wrong(home)
            if wrong:
                return wrong
            plan.run(home)
            return plan.done(home)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(home)
