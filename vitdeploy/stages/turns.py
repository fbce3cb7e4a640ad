"""Processes of one machine that evaluate side by side: they decode at the same time, and their engines run in turns.

An engine uses all cores. With fewer threads for each process its sums may be rounded otherwise, and the answers would
depend on how many processes there are.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from vitdeploy.benchmark.machine import open_lock


@contextlib.contextmanager
def machine_turn() -> Iterator[None]:
    """Wait until no other process of this user has its turn on this machine. The lock is the kernel's (flock), so it is
    released when its process ends, for whatever reason; without such a lock (Windows) nothing waits."""
    if os.name != "posix":
        yield
        return
    import fcntl

    descriptor = open_lock(Path(tempfile.gettempdir()) / f"vitdeploy-evaluation-{os.getuid()}.lock")
    try:
        if descriptor is not None:
            with contextlib.suppress(OSError):  # not every file system has locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
