"""What is made of a variant: its steps, and where a worker process has them from."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from pathlib import Path

from vitdeploy.pipeline.job import Job
from vitdeploy.pipeline.plan import engine_plan, judge_plan
from vitdeploy.stages.rows import pruning_step
from vitdeploy.stages.search import score_step
from vitdeploy.stages.step import OPTIMIZE, Step
from vitdeploy.stages.workers import HERE, Workers
from vitdeploy.workflows.making.making import GivenRecipe
from vitdeploy.workflows.tuning.variants import Variant

# The float graph that nothing is merged in and nothing is pruned of, for a variant that has another one itself. Its
# first word is the kind.
UNCHANGED = f"{OPTIMIZE} unchanged"


def job_of(job: Job, variant: Variant) -> Job:
    return replace(job, recipe=variant.recipe(job.recipe))


def scored_plan(job: Job, variant: Variant, workers: Workers = HERE) -> list[Step]:
    """From the original to the distance of a variant's answers from those of the float graph: its own, or `UNCHANGED`
    where its answers are others even in float. `job`: of the search."""
    own, candidate = job_of(job, variant), variant.candidate
    reference = UNCHANGED if variant.changes_answers else OPTIMIZE
    return [*engine_plan(own, [candidate], workers), score_step(candidate, reference, job.data)]


def judged_plan(job: Job, variant: Variant) -> list[Step]:
    """The answers of the original, and of a variant's engine, to the evaluation samples. `job`: of the search."""
    return judge_plan(job_of(job, variant), [variant.candidate])


def pruning_plan(job: Job) -> list[Step]:
    """What can be pruned of the graph of a search."""
    return [*engine_plan(job, ()), pruning_step(job.data)]


@dataclass(frozen=True)
class VariantSteps:
    """A variant of a search, as the source of steps; None: what can be pruned of its graph."""

    search: GivenRecipe
    variant: Variant | None

    @property
    def store(self) -> Path:
        return self.search.store

    def plan(self) -> list[Step]:
        job = _job(self.search)
        if self.variant is None:
            return pruning_plan(job)
        return [*scored_plan(job, self.variant), *judged_plan(job, self.variant)]


@functools.lru_cache(maxsize=1)
def _job(search: GivenRecipe) -> Job:
    [job] = search.prepare()
    return job
