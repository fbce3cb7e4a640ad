"""One stage as a task: what a worker process does, wherever it runs."""

from __future__ import annotations

import socket
from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from vitdeploy.errors import WorkerError
from vitdeploy.pipeline.run import run_plan
from vitdeploy.progress import silent
from vitdeploy.stages.step import Step
from vitdeploy.store.places import shared_store
from vitdeploy.store.store import Artifact, Store


class StepSource(Hashable, Protocol):
    """Where steps come from, as passed to a worker process: a small value that can be pickled.

    A worker does one step after the other of what it comes from, so that `plan` keeps what took seconds to read.
    """

    @property
    def store(self) -> Path:
        """The root of the store."""
        ...

    def plan(self) -> list[Step]:
        """The steps in order, as the command has them. Errors of what they come from propagate."""
        ...


@dataclass(frozen=True)
class StageTask:
    """The step called `step` of a source. `inputs`: the key of each; `key`: that of the step, by the versions and the
    machine of the command; `resume`: reuse what is stored."""

    source: StepSource
    step: str
    inputs: tuple[tuple[str, str], ...]
    key: str
    resume: bool = True


@dataclass(frozen=True)
class StageDone:
    """`digest` of the artifact; None where this process would make another one, as on another CPU: then nothing was
    made. `made`: False where it was there already. `host`: where this is."""

    digest: str | None
    made: bool
    host: str


def make_stage(task: StageTask) -> StageDone:
    """Make a step, or find it; errors of stages propagate."""
    plan = task.source.plan()
    store = Store(task.source.store, shared_store())
    step = next(step for step in plan if step.name == task.step)
    artifacts = _inputs(task, plan, step, store)
    if step.key(artifacts) != task.key:
        return StageDone(None, False, socket.gethostname())
    made: list[bool] = []
    found = run_plan(
        [step],
        store,
        resume=task.resume,
        progress=silent,
        artifacts=artifacts,
        finished=lambda _, old: made.append(not old),
    )
    return StageDone(found[step.name].digest, made[-1], socket.gethostname())


def needed_for(plan: list[Step], step: Step) -> list[Step]:
    """The steps of a plan that a step needs, in order, without itself."""
    needed = set(step.inputs)
    for each in reversed(plan):
        needed |= set(each.inputs) if each.name in needed else set()
    return [each for each in plan if each.name in needed]


def _inputs(task: StageTask, plan: list[Step], step: Step, store: Store) -> dict[str, Artifact]:
    """The folders that a step needs; those that were damaged or removed meanwhile are made again.

    Raises:
        WorkerError: one that no step of the plan makes is not there.
    """
    found = {name: artifact for name, key in task.inputs if (artifact := store.find(key)) is not None}
    if len(found) == len(task.inputs):
        return found
    made = {each.name for each in plan}
    if missing := [name for name, _ in task.inputs if name not in found and name not in made]:
        raise WorkerError(
            f"what {step.name} needs is not in the store of {socket.gethostname()}",
            found=f"no artifact of {', '.join(missing)} that is whole",
            wanted="a store that all workers share with the command, and that nothing is removed from meanwhile",
            fix="the same command makes what is missing again",
        )
    return run_plan(needed_for(plan, step), store, resume=True, progress=silent, artifacts=found)
