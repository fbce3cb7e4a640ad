"""One job a device at a time: tickets give the order of arrival, a lock of the whole machine the right to measure.

The lock lies in the device's temporary folder, so that the jobs of its other users are waited for too; tickets are of
one user's jobs. A ticket whose process is gone is void.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitdeploy.devices.agent.state import Process, home

LOCK_NAME = "vitdeploy-device.lock"
LOOK_SECONDS = 0.25


@contextlib.contextmanager
def turn(what: str, waits_for: Callable[[str], None]) -> Iterator[None]:
    """Wait until the device is ours; `what` tells others what they wait for, `waits_for` hears it of others."""
    ticket = _take(what)
    descriptor = None
    try:
        told = ""
        while True:
            first = tickets()[0]
            if first[0] != ticket:
                found = str(first[1]["what"])
            else:
                descriptor = _lock()
                if descriptor is not None:
                    break
                found = "a job of another user"
            if found != told:
                told = found
                waits_for(found)
            time.sleep(LOOK_SECONDS)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
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
    with (queue / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # given back when the file is closed
        last = max((int(path.name) for path, _ in tickets()), default=0)
        ticket, temporary = queue / f"{last + 1:09d}", queue / f".{os.getpid()}"
        temporary.write_text(json.dumps({"what": what, "process": asdict(Process.current())}), encoding="utf-8")
        temporary.replace(ticket)
    return ticket


def _lock() -> int | None:
    """A descriptor that holds the machine's lock, or None while another holds it."""
    path = Path(tempfile.gettempdir()) / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except PermissionError:
        # Another user's file in a sticky folder: it may be opened, not created (fs.protected_regular).
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor
