"""The workers for work that may be distributed, by the user's names."""

import dataclasses

from vitdeploy.pipeline.run import default_store
from vitdeploy.runtime.host import usable_cores
from vitdeploy.stages.workers import Executor, Workers
from vitdeploy.tasks.images import scratch_folder
from vitdeploy.workflows.executors import RayCluster, executor_of


def executor_for(executor: str | None, jobs: int) -> Executor | None:
    """Return an executor by name; `executor` and `jobs` as in `vitdeploy.deploy`. Raises InputError: unknown name."""
    chosen = executor_of(executor, jobs or (usable_cores() if executor == "processes" else 1))
    if jobs and isinstance(chosen, RayCluster):
        return dataclasses.replace(chosen, at_a_time=jobs)
    return chosen


def workers_of(executor: str | None, jobs: int, *, resume: bool = True) -> Workers:
    """Like `executor_for`; the pieces of a stage are kept in this user's store, if it is writable."""
    chosen, store = executor_for(executor, jobs), default_store()
    return Workers(chosen, store if scratch_folder() == store.root else None, resume)
