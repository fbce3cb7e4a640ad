"""Who does the work that may be shared out, as a user names them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitdeploy.stages.workers import Workers


def workers_of(executor: str | None, jobs: int, *, resume: bool = True) -> Workers:
    """`executor`, `jobs`: as of `vitdeploy.deploy`. The pieces of a stage are kept in this user's store, if it can be
    written.

    Raises:
        InputError: nothing runs work under this name.
    """
    from vitdeploy.pipeline.run import default_store
    from vitdeploy.runtime.host import usable_cores
    from vitdeploy.stages.workers import Workers
    from vitdeploy.tasks.images import scratch_folder
    from vitdeploy.workflows.executors import RayCluster, executor_of

    found = executor_of(executor, jobs or (usable_cores() if executor == "processes" else 1))
    if jobs and isinstance(found, RayCluster):
        found = dataclasses.replace(found, at_a_time=jobs)
    store = default_store()
    return Workers(found, store if scratch_folder() == store.root else None, resume)
