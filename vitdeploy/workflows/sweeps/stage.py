"""One stage of a recipe as a task: what a worker process does, wherever it runs."""

from __future__ import annotations

import functools
import socket
from dataclasses import dataclass

from vitdeploy.pipeline.job import Job
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.pipeline.run import run_plan
from vitdeploy.progress import silent
from vitdeploy.stages.step import Step
from vitdeploy.store.places import shared_store
from vitdeploy.store.store import Artifact, Store
from vitdeploy.workflows.sweeps.entries import Entry


@dataclass(frozen=True)
class StageTask:
    """The step called `step` of a recipe at its image size number `size`. `inputs`: the key of each; `key`: that of the
    step, by the versions and the machine of the command."""

    entry: Entry
    size: int
    step: str
    inputs: tuple[tuple[str, str], ...]
    key: str


@dataclass(frozen=True)
class StageDone:
    """`digest` of the artifact; None where this process would make another one, as on another CPU: then nothing was
    made. `made`: False where it was there already. `host`: where this is."""

    digest: str | None
    made: bool
    host: str


# A worker does one step of a recipe after the other, and reading its model and listing its data takes seconds.
@functools.lru_cache(maxsize=2)
def _jobs(entry: Entry) -> tuple[Job, ...]:
    return entry.prepare()


def make_stage(task: StageTask) -> StageDone:
    """Make a step, or find it; errors of stages propagate."""
    plan = make_plan(_jobs(task.entry)[task.size])
    store = Store(task.entry.store, shared_store())
    step = next(step for step in plan if step.name == task.step)
    artifacts = _inputs(task, plan, step, store)
    if step.key(artifacts) != task.key:
        return StageDone(None, False, socket.gethostname())
    made: list[bool] = []
    found = run_plan(
        [step], store, resume=True, progress=silent, artifacts=artifacts, finished=lambda _, old: made.append(not old)
    )
    return StageDone(found[step.name].digest, made[-1], socket.gethostname())


def _inputs(task: StageTask, plan: list[Step], step: Step, store: Store) -> dict[str, Artifact]:
    """The folders that a step needs; those that were damaged or removed meanwhile are made again."""
    found = {name: artifact for name, key in task.inputs if (artifact := store.find(key)) is not None}
    if len(found) == len(task.inputs):
        return found
    needed = set(step.inputs)
    for each in reversed(plan):
        needed |= set(each.inputs) if each.name in needed else set()
    return run_plan([each for each in plan if each.name in needed], store, resume=True, progress=silent)
