"""A function in a process of its own, which may be cut off; what it returns comes back."""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ended:
    """`status` as `os.waitstatus_to_exitcode` gives it; None where it did not end in time, and was killed."""

    status: int | None
    result: Any = None
    error: str = ""


def in_child(function: Callable[..., Any], *arguments: Any, seconds: float = 60.0) -> Ended:
    """Call it in a fork of this process, which must have no other threads."""
    return ended(begin(function, *arguments), seconds)


def begin(function: Callable[..., Any], *arguments: Any) -> tuple[int, int]:
    """Start it; the number of its process, and where its result comes from."""
    sys.stdout.flush()
    sys.stderr.flush()
    reading, writing = os.pipe()
    process = os.fork()
    if process:
        os.close(writing)
        return process, reading
    status = 70
    try:
        os.close(reading)
        try:
            answer: tuple[Any, str] = (function(*arguments), "")
            status = 0
        except Exception as error:
            answer = (None, "".join(traceback.format_exception(error)))
            status = 1
        with contextlib.suppress(OSError), os.fdopen(writing, "wb") as pipe:
            pickle.dump(answer, pipe)
    finally:
        os._exit(status)  # nothing of the parent's runs: no exit handlers, no buffers


def ended(begun: tuple[int, int], seconds: float = 60.0) -> Ended:
    """Wait for it, and kill it when it takes too long."""
    process, reading = begun
    with os.fdopen(reading, "rb") as pipe:
        if not select.select([reading], [], [], seconds)[0]:
            os.kill(process, signal.SIGKILL)
        data = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    if not data:
        return Ended(None if status == -signal.SIGKILL else status)
    result, error = pickle.loads(data)  # noqa: TID251 - of our own fork
    return Ended(status, result, error)
