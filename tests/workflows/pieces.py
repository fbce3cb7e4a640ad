"""Pieces of work for executors: functions of a module, so that other processes find them. What they need of vitdeploy
beyond its errors is imported by those that need it: most begin in a process of their own."""

from __future__ import annotations

import dataclasses
import os
import signal
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.errors import DataError

if TYPE_CHECKING:
    from vitdeploy.pipeline.schedule import _StageDone, _StageTask
    from vitdeploy.workflows.sharded import _ShardTask


def squared(number: int) -> int:
    if number < 0:
        raise DataError("a number below zero", found=str(number), expected="0 or more")
    return number * number


def surprised(number: int) -> int:
    raise ZeroDivisionError(f"nobody expected {number}")


def where(name: str) -> tuple[str, str]:
    return os.environ.get(name, ""), str(Path.cwd())


def dies(ask: tuple[str, int]) -> int:
    """Ends its process, the first times that it is asked; a folder counts these."""
    folder, times = Path(ask[0]), ask[1]
    begun = len(list(folder.iterdir()))
    (folder / str(begun)).touch()
    if begun < times:
        os.kill(os.getpid(), signal.SIGKILL)
    return begun


def begun(ask: tuple[str, int, float]) -> int:
    """How many pieces have begun when so many have, or when its seconds are over; a folder counts them."""
    folder, count, seconds = Path(ask[0]), ask[1], ask[2]
    (folder / uuid.uuid4().hex).touch()
    end = time.monotonic() + seconds
    while len(list(folder.iterdir())) < count and time.monotonic() < end:
        time.sleep(0.01)
    return len(list(folder.iterdir()))


def evaluates(ask: tuple[str, _ShardTask]) -> None:
    from vitdeploy.workflows.sharded import do

    do(ask[1])


def evaluates_at_second_try(ask: tuple[str, _ShardTask]) -> None:
    """Ends its process the first time that it is asked for these shards, after half of them."""
    from vitdeploy.workflows.sharded import do

    work = ask[1]
    place = Path(ask[0]) / work.parts[0].content / str(work.parts[0].original)
    if not place.exists():
        place.mkdir(parents=True)
        do(dataclasses.replace(work, parts=work.parts[: len(work.parts) // 2]))
        os.kill(os.getpid(), signal.SIGKILL)
    do(work)


def always_dies(ask: tuple[str, _ShardTask]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def stage_at_second_try(task: _StageTask) -> _StageDone:
    """Ends its process once, at the first stage that is quantized."""
    from vitdeploy.pipeline.schedule import make_stage

    if task.step.endswith("-int8"):
        try:
            (task.source.store.parent / "killed").mkdir()
            os.kill(os.getpid(), signal.SIGKILL)
        except FileExistsError:
            pass
    return make_stage(task)


def node(_: None) -> dict[str, float]:
    """What the task has of its node, by what Ray says."""
    import ray

    return dict(ray.get_runtime_context().get_assigned_resources())
