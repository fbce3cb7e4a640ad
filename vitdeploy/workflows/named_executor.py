"""The executor that a user names."""

from __future__ import annotations

from vitdeploy.errors import InputError
from vitdeploy.stages.workers import Executor
from vitdeploy.workflows.executors import Processes
from vitdeploy.workflows.ray_cluster import RayCluster


def executor_of(text: str | None, at_a_time: int) -> Executor | None:
    """What `text` names: "processes", "ray" or "ray:ADDRESS"; without it processes, or None for one at a time.

    Raises:
        InputError: it names none.
    """
    name, _, address = (text or "").partition(":")
    if name == "ray":
        return RayCluster(address, at_a_time if at_a_time > 1 else None)
    if text not in (None, "processes"):
        raise InputError(
            "nothing runs work under this name", found=f"{text!r}", wanted="processes, ray or ray:HOST:PORT"
        )
    return Processes(at_a_time) if text or at_a_time > 1 else None
