"""The steps of a run side by side, but what measures, before the run goes through them one after the other."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from vitdeploy.pipeline.assemble import Helpers
from vitdeploy.pipeline.job import Job
from vitdeploy.pipeline.run import run_plan
from vitdeploy.progress import Progress
from vitdeploy.stages.step import Outline, Step
from vitdeploy.stages.workers import Pool, Workers
from vitdeploy.store.store import Artifact, Store
from vitdeploy.workflows.executors import InPool
from vitdeploy.workflows.making.making import Ahead, AtSize, GivenRecipe, Wanted


@dataclass(frozen=True)
class Beside:
    """What is made in a pool: all steps of `jobs`, which are those of the recipe; the others as for `run_pipeline`."""

    given: GivenRecipe
    jobs: Sequence[Job]
    store: Store
    resume: bool
    progress: Callable[[Job], Progress]
    finished: Callable[[Job, Step | Outline, bool], None]
    note: Callable[[Job, str], None]

    @contextlib.contextmanager
    def helpers(self, workers: Workers) -> Iterator[Helpers]:
        """With one pool for all that these workers do; errors as `Executor.pool`."""
        if workers.executor is None:
            yield Helpers(workers)
            return
        with workers.executor.pool() as pool:
            yield Helpers(replace(workers, executor=InPool(pool)), functools.partial(self._make, pool))

    def _make(self, pool: Pool, job: Job, plan: list[Step], artifacts: Mapping[str, Artifact], fresh: set[str]) -> None:
        progress, finished = self.progress(job), functools.partial(self.finished, job)
        run = functools.partial(
            run_plan, store=self.store, resume=self.resume, progress=progress, finished=finished, fresh=fresh
        )
        ahead = Ahead(
            pool,
            self.store,
            lambda steps, given: run(steps, artifacts=given),
            lambda owner, error: True,
            functools.partial(self.note, job),
            finished,
            functools.partial(progress, "make stages"),
            resume=self.resume,
            fresh=fresh,
        )
        [number] = [at for at, each in enumerate(self.jobs) if each is job]
        ahead.make([Wanted(number, AtSize(self.given, number), job.recipe.name, plan, artifacts)])
        for error in ahead.errors.values():
            raise error
