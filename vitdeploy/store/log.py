"""What a store has made and brought, one line of JSON each, in the order of the ends.

Each line is appended by one write, so that those of several processes do not mix. Nothing is read from the log to find
artifacts: a line that is lost or cut off loses an estimate of a plan.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import os
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vitdeploy.runtime.host import describe_host
from vitdeploy.spec import DecodeError, decode, encode
from vitdeploy.store.key import canonical_json
from vitdeploy.store.record import Made, Record

LOG_FILE = "log.jsonl"
# How much of the end of a log is read: some 10,000 lines.
MOST_BYTES = 8 << 20


@dataclass(frozen=True)
class Line:
    """One artifact, `bytes` large, that was made here, or brought from the shared store."""

    event: Literal["made", "brought"]
    key: str
    kind: str
    bytes: int
    made: Made


def made_now(name: str, seconds: float, about: Mapping[str, int]) -> Made:
    """What this process says of something that it has finished now."""
    when = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
    cpu, cores = this_machine()
    return Made(name, when, socket.gethostname(), os.getpid(), round(seconds, 3), cpu, cores, dict(about))


@functools.cache
def this_machine() -> tuple[str, int]:
    """Its CPU, and how many cores this process may use."""
    host = describe_host()
    return host["cpu"], int(host["cores"])


def append(root: Path, event: Literal["made", "brought"], record: Record) -> None:
    """Add a line to the log of the store at `root`. What is stored already is of more worth than a line, so a disk that
    fails here is no error."""
    if record.made is None:
        return
    line = canonical_json(encode(Line(event, record.key, record.kind, record.bytes, record.made))) + "\n"
    with contextlib.suppress(OSError):
        descriptor = os.open(root / LOG_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            os.write(descriptor, line.encode())
        finally:
            os.close(descriptor)


def read_log(root: Path, most: int = MOST_BYTES) -> Iterator[Line]:
    """The lines at the end of a log, oldest first; what was cut off is left out."""
    try:
        with (root / LOG_FILE).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - most))
            data = file.read()
    except FileNotFoundError:
        return
    for text in data.splitlines():
        with contextlib.suppress(DecodeError, ValueError, RecursionError):
            yield decode(Line, json.loads(text))
