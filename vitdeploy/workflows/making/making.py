"""Stages made side by side by an executor."""

from __future__ import annotations

import functools
import json
import socket
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, cast

from vitdeploy.errors import VitdeployError, WorkerError
from vitdeploy.pipeline.job import Job, prepare
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.pipeline.run import run_plan
from vitdeploy.progress import Progress, silent
from vitdeploy.recipe.load import validate
from vitdeploy.stages.step import Outline, Step
from vitdeploy.stages.workers import Pool
from vitdeploy.store.places import shared_store
from vitdeploy.store.store import Artifact, Store, files_digest

# --- One stage as a task: what a worker process does, wherever it runs ------------------------------------------------


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


# --- Make the steps of many plans side by side, but what measures: what several share is one task ---------------------


@dataclass
class Line:
    """Steps of one plan, in order. A step that measures, or is shared out itself, is taken if it is there, and never
    begun.

    `owner`: what has failed when one of them has, maybe with other lines; `shown`: what people call it. `digests` and
    `keys` of what is there, at first of what the steps need from elsewhere; `asked`: the steps of which nothing is to
    be begun any more.
    """

    owner: Hashable
    source: StepSource
    shown: str
    steps: Sequence[Outline]
    digests: dict[str, str] = field(default_factory=dict)
    keys: dict[str, str] = field(default_factory=dict)
    asked: set[str] = field(default_factory=set)


class Making:
    """The steps of some lines on their way. One is begun when its inputs are there, so that its key is known: of steps
    with one key one is made, for all lines that need it.

    Args:
        told: called with a line on what a user should know.
        over: whether nothing more is to be begun.
        progress: called with how many steps of all are there, and how many there are.
        resume: reuse what earlier runs have stored.
        fresh: keys of the steps that are of this run, which it always reuses; those that are made are added.
        finished: called with each step that was made, or that a worker has found meanwhile, and which of both.
    """

    def __init__(
        self,
        pool: Pool,
        store: Store,
        told: Callable[[str], None],
        over: Callable[[], bool],
        progress: Callable[[int, int], None],
        *,
        resume: bool = True,
        fresh: set[str] | None = None,
        finished: Callable[[Outline, bool], None] = lambda step, reused: None,
    ) -> None:
        self._pool, self._store, self._told, self._over, self._progress = pool, store, told, over, progress
        self._resume, self._fresh, self._finished = resume, set() if fresh is None else fresh, finished
        self._lines: Sequence[Line] = ()
        # By key: the digest of what is there; and who waits for what is being made.
        self._there: dict[str, str] = {}
        self._waiting: dict[str, list[tuple[Line, Outline]]] = {}
        self._failed: dict[str, VitdeployError] = {}
        self._elsewhere: set[str] = set()
        self._asked, self._made = 0, 0
        self.errors: dict[Hashable, VitdeployError] = {}

    @property
    def counts(self) -> tuple[int, int, int]:
        """How many steps all lines asked for, how many of these are distinct and there, and how many were made."""
        return self._asked, len(self._there), self._made

    def run(self, lines: Sequence[Line]) -> None:
        """Make the steps of these lines. `errors` has the owners that failed, by what."""
        self._lines = lines
        self._asked += sum(len(line.steps) for line in self._lines)
        for line in self._lines:
            self._advance(line)
        self._tell()
        while (found := self._pool.next()) is not None:
            self._finish(*cast("tuple[str, StageDone | VitdeployError]", found))
            self._tell()
            if self._over():
                for key in self._pool.drop():
                    self._waiting.pop(str(key))

    def _tell(self) -> None:
        there = sum(step.name in line.digests for line in self._lines for step in line.steps)
        self._progress(there, sum(len(line.steps) for line in self._lines))

    def _advance(self, line: Line) -> None:
        """Take what is there, and begin what can be."""
        for step in line.steps:
            ready = step.name not in line.asked and all(name in line.digests for name in step.inputs)
            if not ready or line.owner in self.errors:
                continue
            line.asked.add(step.name)
            key = line.keys[step.name] = step.key(line.digests)
            if (digest := self._look(key, step)) is not None:
                line.digests[step.name] = digest
            elif key in self._failed:
                self.errors[line.owner] = self._failed[key]
            elif key in self._waiting:
                self._waiting[key].append((line, step))
            elif not (step.measured or step.shared_out or self._over()):
                self._waiting[key] = [(line, step)]
                self._begin(line, step, key)

    def _begin(self, line: Line, step: Outline, key: str) -> None:
        inputs = tuple((name, line.keys[name]) for name in step.inputs)
        task = StageTask(line.source, step.name, inputs, key, self._resume)
        self._pool.submit(key, make_stage, task, f"{line.shown}: {step.name}")

    def _look(self, key: str, step: Outline) -> str | None:
        """The digest of a step that is there already."""
        ours = key in self._fresh
        if key not in self._there and (ours or self._resume) and (record := self._store.look(key)) is not None:
            folder = self._store.folder(key)
            if (ours and step.measured) or not folder.is_dir() or step.usable(folder):
                self._there[key] = files_digest(record.files)
        return self._there.get(key)

    def _finish(self, key: str, found: StageDone | VitdeployError) -> None:
        waiting = self._waiting.pop(key)
        if isinstance(found, VitdeployError):
            self._failed[key] = found
            for line, _ in waiting:
                self.errors.setdefault(line.owner, found)
            return
        if found.digest is None:
            self._leave(found.host)
            return
        self._made += found.made
        self._fresh.add(key)
        self._there[key] = found.digest
        self._finished(waiting[0][1], not found.made)
        for line, step in waiting:
            line.digests[step.name] = found.digest
            self._advance(line)

    def _leave(self, host: str) -> None:
        """What a node would make otherwise is left to the process that measures, with all that needs it."""
        if host not in self._elsewhere:
            self._elsewhere.add(host)
            self._told(
                f"{host} has another CPU, driver or release of a package than this machine: what depends on it is made"
                " where it is measured"
            )


# --- What a run or a search is begun with, as a worker process has it -------------------------------------------------


class RecipeSource(Hashable, Protocol):
    """Where jobs come from: a small value that can be pickled."""

    @property
    def store(self) -> Path:
        """The root of the store."""
        ...

    def prepare(self) -> tuple[Job, ...]:
        """As `pipeline.job.prepare`."""
        ...


@dataclass(frozen=True)
class GivenRecipe:
    """A recipe that was read: `recipe` in JSON, `store`: its root; the others as for `pipeline.job.prepare`."""

    recipe: str
    store: Path
    skip_bad: bool
    function: str | None = None
    module: Path | None = None

    def prepare(self, progress: Progress = silent) -> tuple[Job, ...]:
        """Its jobs. Errors of `pipeline.job.prepare` propagate."""
        code = self.function or (self.module.stem if self.module else None)
        recipe = validate(json.loads(self.recipe), "the recipe", code)
        how = {"function": self.function, "module": self.module}
        return prepare(recipe, skip_bad=self.skip_bad, progress=progress, **how)  # type: ignore[arg-type]


@dataclass(frozen=True)
class AtSize:
    """A recipe at its image size number `size`, as the source of steps."""

    recipe: RecipeSource
    size: int

    @property
    def store(self) -> Path:
        return self.recipe.store

    def plan(self) -> list[Step]:
        return make_plan(_jobs(self.recipe)[self.size])


@functools.lru_cache(maxsize=2)
def _jobs(recipe: RecipeSource) -> tuple[Job, ...]:
    return recipe.prepare()


# --- The steps of several variants side by side, before a search goes through the variants one after the other --------
# What measures is made by the search itself, while no worker has anything to do; so is what is shared out to the
# workers in pieces. Neither changes what the search finds: it takes what is there by its key, and makes what is not.


Run = Callable[[list[Step], Mapping[str, Artifact]], object]


@dataclass(frozen=True)
class Wanted:
    """A plan whose steps are to be made. `owner`: what has failed when one of them has; `given`: artifacts of steps
    before it; `source`: of its steps and those before, for workers."""

    owner: Hashable
    source: StepSource
    shown: str
    plan: list[Step]
    given: Mapping[str, Artifact] = field(default_factory=dict)


class Ahead:
    """Makes plans in a pool.

    Args:
        run: makes steps of a plan here and now, where others are given.
        fatal: whether an error of an owner ends the search: then nothing more is begun.
        told, finished: of `Making`. progress: called with how many steps of all are there, and how many there are.
        resume, fresh: as for `run_plan`.
    """

    def __init__(
        self,
        pool: Pool,
        store: Store,
        run: Run,
        fatal: Callable[[Hashable, VitdeployError], bool],
        told: Callable[[str], None],
        finished: Callable[[Outline, bool], None],
        progress: Callable[[int, int], None],
        *,
        resume: bool,
        fresh: set[str],
    ) -> None:
        self._run, self._fatal = run, fatal
        self._late: Callable[[], bool] = _never
        how = {"resume": resume, "fresh": fresh, "finished": finished}
        self._making = Making(pool, store, told, self._over, progress, **how)  # type: ignore[arg-type]
        self.errors = self._making.errors

    def make(self, wanted: Sequence[Wanted], late: Callable[[], bool] | None = None) -> set[Hashable]:
        """Make what these need, and return the owners of which all is there, or that have failed: see `errors`.

        Args:
            late: whether nothing more is to be begun; None: never.

        Raises:
            WorkerError: what is made here has no worker that does it.
        """
        self._late = late or _never
        begun: set[str] = set()
        while True:
            lines = [_line(each) for each in wanted]
            self._making.run(lines)
            ours = [step for each, line in zip(wanted, lines, strict=True) for step in self._next(each, line, begun)]
            if not ours:
                break
            for each, step, key in ours:
                if not self._over() and key not in begun:
                    begun.add(key)
                    self._make_here(each, step)
        left = {line.owner for line in lines if any(step.name not in line.digests for step in line.steps)}
        return {each.owner for each in wanted if each.owner not in left or each.owner in self.errors}

    def _next(self, wanted: Wanted, line: Line, begun: set[str]) -> Iterator[tuple[Wanted, Step, str]]:
        """What is to be made here, and could be now, with its key."""
        if line.owner in self.errors or self._over():
            return
        for step, outline in zip(wanted.plan, line.steps, strict=True):
            here = outline.measured or outline.shared_out
            ready = step.name not in line.digests and all(name in line.digests for name in step.inputs)
            if here and ready and (key := outline.key(line.digests)) not in begun:
                yield wanted, step, key

    def _make_here(self, wanted: Wanted, step: Step) -> None:
        try:
            self._run([*needed_for(wanted.plan, step), step], wanted.given)
        except WorkerError:
            raise  # of what measures, or of pieces that all INT8 needs
        except VitdeployError as error:
            self.errors.setdefault(wanted.owner, error)

    def _over(self) -> bool:
        return self._late() or any(self._fatal(owner, error) for owner, error in self.errors.items())


def _never() -> bool:
    return False


def _line(wanted: Wanted) -> Line:
    """As it is begun: nothing of the plan is known to be there, and all that was given is."""
    steps = [step.outline() for step in wanted.plan]
    digests = {name: artifact.digest for name, artifact in wanted.given.items()}
    keys = {name: artifact.key for name, artifact in wanted.given.items()}
    return Line(wanted.owner, wanted.source, wanted.shown, steps, digests, keys)
