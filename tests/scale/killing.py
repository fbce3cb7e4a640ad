"""SIGKILL for workers, one every few seconds: processes that this one, or a command that it gave, has started."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from vitdeploy.workflows.executors import run_task


def processes_below(root: int) -> dict[int, str]:
    """The running descendants of a process, with the words of each."""
    parents: dict[int, int] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(stat.parent.name)] = int(parent)
    found: dict[int, str] = {}
    for process in parents:
        above = parents.get(process)
        while above and above != root:
            above = parents.get(above)
        if above == root:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ")
                found[process] = words.decode("utf-8", "replace")
    return found


def ray_workers() -> list[int]:
    """The processes of this one's Ray cluster that run a task."""
    return [process for process, words in processes_below(os.getpid()).items() if _runs_task(words)]


def _runs_task(words: str) -> bool:
    """By the name that Ray gives a process while it runs a task of `_RayPool`. Its agents have such names too, and a
    node ends with one of them."""
    return words.startswith(f"ray::{run_task.__name__}")


def pool_workers(command: int) -> list[int]:
    """The processes of an executor of a command."""
    return [process for process, words in processes_below(command).items() if "spawn_main" in words]


@contextlib.contextmanager
def killed_every(
    seconds: float, workers: Callable[[], list[int]], seed: int, done: Callable[[], int] | None = None
) -> Iterator[list[int]]:
    """While the block runs, every so often one of what `workers` gives is killed; the list is those that were.

    Args:
        done: how much is finished: no further one is killed before it is more. On a busy machine workers would else die
            before they have begun, again and again.
    """
    killed: list[int] = []
    ended, drawn = threading.Event(), random.Random(seed)

    def go_on() -> None:
        before = -1
        while not ended.wait(seconds):
            found, now = workers(), done() if done is not None else before + 1
            if found and now > before:
                process = drawn.choice(found)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                    killed.append(process)
                    before = now

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield killed
    finally:
        ended.set()
        thread.join()
