"""One job per device at a time: tickets give the order of arrival, a machine-wide lock the right to measure.

The lock is that of all measurements (`benchmark.machine_lock`), so a job also waits for other users' jobs and for
measurements without an agent; tickets order one user's jobs. A ticket whose process is gone is void.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitdeploy.benchmark.machine import MACHINE, described, holder
from vitdeploy.devices.agent.state import Process, home

LOOK_SECONDS = 0.25


@contextlib.contextmanager
def turn(what: str, waits_for: Callable[[str], None]) -> Iterator[None]:
    """Wait until the device is ours; `what` names this job to others that wait, `waits_for` is called with theirs."""
    ticket = _take(what)
    ours = False
    try:
        told = ""
        while True:
            before = [other for path, other in tickets() if path < ticket]
            if before:
                more = f" ({len(before)} jobs before this one)" if len(before) > 1 else ""
                found = f"{before[0]['what']}{more}"
            else:
                ours = MACHINE.take()
                if ours:
                    break
                found = described(holder())
            if found != told:
                told = found
                waits_for(found)
            time.sleep(LOOK_SECONDS)
        yield
    finally:
        if ours:
            MACHINE.give_back()
        ticket.unlink(missing_ok=True)


def tickets() -> list[tuple[Path, dict[str, Any]]]:
    """The tickets of living processes in the order of their arrival, with what each is for."""
    found = []
    for path in sorted((home() / "queue").glob("[0-9]*")):
        try:
            ticket = json.loads(path.read_text(encoding="utf-8"))
            living = Process(**ticket["process"]).alive()
        except (OSError, ValueError, KeyError, TypeError):
            living = False
        if living:
            found.append((path, ticket))
        else:
            path.unlink(missing_ok=True)
    return found


def _take(what: str) -> Path:
    queue = home() / "queue"
    queue.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = queue / f".{os.getpid()}"
    temporary.write_text(json.dumps({"what": what, "process": asdict(Process.current())}), encoding="utf-8")
    with (queue / ".lock").open("w") as lock:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed
        number = max((int(path.name) for path, _ in tickets()), default=0) + 1
        while not _given(temporary, queue / f"{number:09d}"):
            number += 1
    temporary.unlink(missing_ok=True)
    return queue / f"{number:09d}"


def _given(temporary: Path, ticket: Path) -> bool:
    """Whether a ticket is ours: not even where the lock does nothing have two processes the same one."""
    try:
        os.link(temporary, ticket)
    except FileExistsError:
        return False
    except OSError:  # nor has every file system links
        temporary.replace(ticket)
    return True
