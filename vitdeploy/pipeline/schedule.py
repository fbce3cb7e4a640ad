"""The scheduler: runs the steps of plans in parallel in a pool of workers, and measuring steps in this process.

A later `run_plan` finds the artifacts by their keys and computes missing ones, so scheduling never changes the result.
"""

import contextlib
import functools
import socket
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

from vitdeploy.errors import VitdeployError, WorkerError
from vitdeploy.pipeline.job import Job, prepare
from vitdeploy.pipeline.plan import make_plan
from vitdeploy.pipeline.run import run_plan
from vitdeploy.progress import Progress, silent
from vitdeploy.recipe.recipe import Recipe
from vitdeploy.stages.step import Step
from vitdeploy.stages.workers import Executor, Pool, Workers
from vitdeploy.store.store import Artifact, Store, files_digest, shared_store

# --- Sources of steps for worker processes: small values that can be pickled ------------------------------------------


@dataclass(frozen=True)
class LoadedRecipe:
    """A loaded recipe. `store`: the root of the store; other fields as for `pipeline.job.prepare`."""

    recipe: Recipe = field(hash=False)  # not all of its values can be hashed
    store: Path
    skip_bad: bool
    function: str | None = None
    module: Path | None = None

    def prepare(self, progress: Progress = silent) -> tuple[Job, ...]:
        """The jobs of the recipe. Errors of `pipeline.job.prepare` propagate."""
        return prepare(
            self.recipe, skip_bad=self.skip_bad, progress=progress, function=self.function, module=self.module
        )


@dataclass(frozen=True)
class StepSource:
    """The ordered steps that `steps`, a module-level function or a partial one, derives from the jobs of a recipe."""

    recipe: LoadedRecipe
    steps: Callable[[tuple[Job, ...]], list[Step]]

    @property
    def store(self) -> Path:
        return self.recipe.store

    def plan(self) -> list[Step]:
        """The steps. Errors of reading the recipe's inputs propagate."""
        return self.steps(_prepared(self.recipe))


@functools.lru_cache(maxsize=2)
def _prepared(recipe: LoadedRecipe) -> tuple[Job, ...]:
    """The jobs, cached for the next step of the worker because reading them takes seconds."""
    return recipe.prepare()


def at_size(recipe: LoadedRecipe, number: int) -> StepSource:
    """The steps of a recipe at its image size with this index."""
    return StepSource(recipe, functools.partial(_plan_at, number))


def _plan_at(number: int, jobs: tuple[Job, ...]) -> list[Step]:
    return make_plan(jobs[number])


# --- One step in a worker ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StageTask:
    """The step named `step` of a source. `inputs`: the key of each input; `key`: the step's key with the versions and
    the machine of the command; `resume`: reuse stored artifacts."""

    source: StepSource
    step: str
    inputs: tuple[tuple[str, str], ...]
    key: str
    resume: bool = True


@dataclass(frozen=True)
class _StageDone:
    """The result of a task. `digest` of the artifact; None if this process would compute another artifact (because of
    a different CPU, for example) and did not run the step. `made`: False if the artifact was stored before. `host`: the
    name of this node."""

    digest: str | None
    made: bool
    host: str


def make_stage(task: _StageTask) -> _StageDone:
    """Run a step, or find its artifact; errors of stages propagate."""
    plan = task.source.plan()
    store = Store(task.source.store, shared_store())
    step = next(step for step in plan if step.name == task.step)
    artifacts = _inputs(task, plan, step, store)
    if step.key(artifacts) != task.key:
        return _StageDone(None, False, socket.gethostname())
    made: list[bool] = []
    artifacts = run_plan(
        [step],
        store,
        resume=task.resume,
        progress=silent,
        artifacts=artifacts,
        finished=lambda _, reused: made.append(not reused),
    )
    return _StageDone(artifacts[step.name].digest, made[-1], socket.gethostname())


def _needed_for(plan: Sequence[Step], step: Step) -> list[Step]:
    """The steps of a plan that a step needs, in order, without itself."""
    needed = set(step.inputs)
    for other in reversed(plan):
        needed |= set(other.inputs) if other.name in needed else set()
    return [other for other in plan if other.name in needed]


def _inputs(task: _StageTask, plan: list[Step], step: Step, store: Store) -> dict[str, Artifact]:
    """The artifacts that a step needs; damaged or removed ones are computed again.

    Raises:
        WorkerError: an artifact is missing, and no step of the plan computes it.
    """
    there = {name: artifact for name, key in task.inputs if (artifact := store.find(key)) is not None}
    if len(there) == len(task.inputs):
        return there
    planned = {other.name for other in plan}
    if missing := [name for name, _ in task.inputs if name not in there and name not in planned]:
        raise WorkerError(
            f"inputs of {step.name} are not in the store of {socket.gethostname()}",
            found=f"no complete artifact of {', '.join(missing)}",
            expected="a store that all workers share with the command, and from which nothing is removed meanwhile",
            fix="run the same command again: it computes what is missing",
        )
    return run_plan(_needed_for(plan, step), store, resume=True, progress=silent, artifacts=there)


# --- The scheduler ----------------------------------------------------------------------------------------------------


@dataclass
class PlanProgress:
    """A plan and its progress.

    `owner`: fails if one of the steps fails; plans may share it. `source`: the source of the steps, for workers.
    `shown`: the name in messages. `before`: artifacts of earlier steps. `digests`: those of the stored artifacts, by
    step; `keys`: those of steps with known inputs.
    """

    owner: Hashable
    source: StepSource
    shown: str
    steps: Sequence[Step]
    before: Mapping[str, Artifact] = field(default_factory=dict)
    digests: dict[str, str] = field(init=False)
    keys: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self.digests = {name: artifact.digest for name, artifact in self.before.items()}
        self.keys = {name: artifact.key for name, artifact in self.before.items()}

    @property
    def ready(self) -> list[Step]:
        """The steps without an artifact whose inputs all have one."""
        there = self.digests
        return [step for step in self.steps if step.name not in there and all(name in there for name in step.inputs)]


@contextlib.contextmanager
def pooled(workers: Workers) -> Iterator[tuple[Workers, Pool | None]]:
    """The workers with one pool for all their tasks, and that pool (None without an executor); errors as in
    `Executor.pool`."""
    if isinstance(workers.executor, Executor):
        with workers.executor.pool() as pool:
            yield replace(workers, executor=pool), pool
    else:
        yield workers, workers.executor


@dataclass
class Scheduler:
    """Runs plans. A step starts when its inputs exist, so that its key is known; steps with the same key run once for
    all plans. A step that measures, or that distributes its own tasks over the workers, runs in this process while the
    workers are idle; if a plan consists of outlines, such steps are skipped.

    `progress`: called with `text`, the number of finished steps, and the number of all steps. `note`: called with notes
    for the user. `resume`, `fresh`: as for `run_plan`. `finished`: called with each step that was computed or found,
    and whether it was reused. `fatal`: whether an error of an owner stops everything, so that no further step starts.
    `errors`: by owner.
    """

    pool: Pool
    store: Store
    progress: Progress
    text: str
    note: Callable[[str], None]
    resume: bool = True
    fresh: set[str] = field(default_factory=set)
    finished: Callable[[Step, bool], None] = lambda step, reused: None
    fatal: Callable[[Hashable, VitdeployError], bool] = lambda owner, error: False
    errors: dict[Hashable, VitdeployError] = field(default_factory=dict, init=False)
    _plans: Sequence[PlanProgress] = field(default=(), init=False)
    _late: Callable[[], bool] | None = field(default=None, init=False)
    # By key: the digests of stored artifacts; the plans that wait for a running step; the errors of failed steps.
    _there: dict[str, str] = field(default_factory=dict, init=False)
    _waiting: dict[str, list[tuple[PlanProgress, Step]]] = field(default_factory=dict, init=False)
    _failed: dict[str, VitdeployError] = field(default_factory=dict, init=False)
    _other_hosts: set[str] = field(default_factory=set, init=False)
    _needed: int = field(default=0, init=False)
    _made: int = field(default=0, init=False)

    @property
    def counts(self) -> tuple[int, int, int]:
        """The numbers of steps in all plans, of distinct finished steps, and of steps that were computed."""
        return self._needed, len(self._there), self._made

    def run(self, plans: Sequence[PlanProgress], late: Callable[[], bool] | None = None) -> set[Hashable]:
        """Run these plans, and return the owners that are finished or have failed (see `errors`).

        Args:
            late: returns whether no further step may start; None for never.

        Raises:
            WorkerError: a step of this process lost its worker.
        """
        self._plans, self._late = plans, late
        self._needed += sum(len(plan.steps) for plan in plans)
        begun: set[str] = set()
        while True:
            self._make_side_by_side()
            here = [(plan, step) for plan in plans for step in self._next_here(plan, begun)]
            if not here:
                break
            for plan, step in here:
                if not self._over() and plan.keys[step.name] not in begun:
                    begun.add(plan.keys[step.name])
                    self._make_here(plan, step)
        left = {plan.owner for plan in plans if any(step.name not in plan.digests for step in plan.steps)}
        return {plan.owner for plan in plans if plan.owner not in left or plan.owner in self.errors}

    def _over(self) -> bool:
        late = self._late is not None and self._late()
        return late or any(self.fatal(owner, error) for owner, error in self.errors.items())

    def _make_side_by_side(self) -> None:
        for plan in self._plans:
            self._advance(plan)
        self._tell()
        while (done := self.pool.next()) is not None:
            self._finish(*cast("tuple[str, _StageDone | VitdeployError]", done))
            self._tell()
            if self._over():
                for key in self.pool.drop():
                    self._waiting.pop(str(key))

    def _tell(self) -> None:
        there = sum(step.name in plan.digests for plan in self._plans for step in plan.steps)
        self.progress(self.text, there, sum(len(plan.steps) for plan in self._plans))

    def _advance(self, plan: PlanProgress) -> None:
        """Find stored artifacts, and start steps that are ready."""
        for step in plan.steps:
            if plan.owner in self.errors or step.name in plan.digests or not plan.digests.keys() >= set(step.inputs):
                continue
            if new := step.name not in plan.keys:
                plan.keys[step.name] = step.key(plan.digests)
            key = plan.keys[step.name]
            if (digest := self._look(key, step) if new else self._there.get(key)) is not None:
                plan.digests[step.name] = digest
            elif new and key in self._failed:
                self.errors[plan.owner] = self._failed[key]
            elif new and key in self._waiting:
                self._waiting[key].append((plan, step))
            elif new and not (step.measured or step.shared_out or self._over()):
                self._waiting[key] = [(plan, step)]
                inputs = tuple((name, plan.keys[name]) for name in step.inputs)
                task = _StageTask(plan.source, step.name, inputs, key, self.resume)
                self.pool.submit(key, make_stage, task, f"{plan.shown}: {step.name}")

    def _look(self, key: str, step: Step) -> str | None:
        """The digest of a step's stored artifact; None without one."""
        ours = key in self.fresh
        if key not in self._there and (ours or self.resume) and (record := self.store.look(key)) is not None:
            folder = self.store.folder(key)
            if (ours and step.measured) or not folder.is_dir() or step.usable(folder):
                self._there[key] = files_digest(record.files)
        return self._there.get(key)

    def _finish(self, key: str, done: _StageDone | VitdeployError) -> None:
        waiting = self._waiting.pop(key)
        if isinstance(done, VitdeployError):
            self._failed[key] = done
            for plan, _ in waiting:
                self.errors.setdefault(plan.owner, done)
            return
        if done.digest is None:
            self._leave(done.host)
            return
        self._made += done.made
        self.fresh.add(key)
        self._there[key] = done.digest
        self.finished(waiting[0][1], not done.made)
        for plan, step in waiting:
            plan.digests[step.name] = done.digest
            self._advance(plan)

    def _leave(self, host: str) -> None:
        """Leave steps for which a node would compute another artifact, and those that need them, to this process."""
        if host not in self._other_hosts:
            self._other_hosts.add(host)
            self.note(f"{host} has a different CPU, driver or package version; steps that depend on it run here")

    def _next_here(self, plan: PlanProgress, begun: set[str]) -> list[Step]:
        """The steps for this process that are ready and not started."""
        if plan.owner in self.errors or self._over():
            return []
        here = [step for step in plan.ready if step.write is not None and (step.measured or step.shared_out)]
        return [step for step in here if plan.keys[step.name] not in begun]

    def _make_here(self, plan: PlanProgress, step: Step) -> None:
        """Run a step in this process, and first the steps whose artifacts it needs and that were removed."""
        try:
            artifacts = run_plan(
                [*_needed_for(plan.steps, step), step],
                self.store,
                resume=self.resume,
                progress=self.progress,
                finished=self.finished,
                artifacts=plan.before,
                fresh=self.fresh,
            )
            self._there[plan.keys[step.name]] = artifacts[step.name].digest
        except WorkerError:
            raise  # from a measurement, or from calibration shards, which all INT8 steps need
        except VitdeployError as error:
            self.errors.setdefault(plan.owner, error)
