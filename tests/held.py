"""The lock of all measurements of a machine, held by somebody else."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from vitdeploy.benchmark.machine import LOCK_NAME

HOLD = """
import fcntl, sys
file = open(sys.argv[1], "w")
fcntl.flock(file, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def held(temporary: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Hold the machine whose temporary folder this is, until the standard input of the holder is closed, as at the end.
    The holder is a process of its own: what was started by it does not wait for it."""
    command = [sys.executable, "-c", HOLD, str(temporary / LOCK_NAME)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield holder
