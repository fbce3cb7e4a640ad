"""One measurement per machine at a time, across users: two at once would disturb each other.

The lock is the kernel's (flock) on an empty file in the machine's temporary folder, so it is released when its process
ends, for whatever reason. The kernel also reports the owner: nothing is written that another user could forge. Without
such a lock (Windows), or if the file cannot be opened, there is no waiting; other activity shows in the load.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from vitdeploy.benchmark.probes import ROOT, read_text

LOCK_NAME = "vitdeploy-device.lock"
LOOK_SECONDS = 0.25
LONGEST_COMMAND = 100


class MachineLock:
    """The lock as this process sees it. It is reentrant for the thread that holds it: a bench contains others."""

    def __init__(self) -> None:
        self._threads = threading.RLock()
        self._depth = 0
        self._descriptor: int | None = None

    def take(self) -> bool:
        """Try to take the lock; returns whether this thread holds it now. Release it once for each take."""
        if not self._threads.acquire(blocking=False):
            return False
        if not self._depth:
            held, self._descriptor = _locked()
            if not held and not _is_ancestors(holder()):
                self._threads.release()
                return False
        self._depth += 1
        return True

    def give_back(self) -> None:
        self._depth -= 1
        if not self._depth and self._descriptor is not None:
            import fcntl

            # A process forked meanwhile has the file open too: closing it here would not be enough.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None
        self._threads.release()


MACHINE = MachineLock()


@contextlib.contextmanager
def machine_lock(waits_for: Callable[[str], None]) -> Iterator[None]:
    """Wait until nothing else measures on this machine, and hold the lock. `waits_for` is called once with each process
    waited for."""
    told = ""
    while not MACHINE.take():
        found = described(holder())
        if found != told:
            told = found
            waits_for(found)
        time.sleep(LOOK_SECONDS)
    try:
        yield
    finally:
        MACHINE.give_back()


def lock_file() -> Path:
    return Path(tempfile.gettempdir()) / LOCK_NAME


def _locked() -> tuple[bool, int | None]:
    """Whether the lock is ours, and the descriptor that holds it; None if there is nothing to lock."""
    descriptor = open_lock(lock_file()) if os.name == "posix" else None
    if descriptor is None:
        return True, None
    import fcntl  # there is none on Windows

    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False, None
    except OSError:  # a file system without such locks: no other holder is ever visible, so there is no waiting
        os.close(descriptor)
        return True, None
    return True, descriptor


def open_lock(path: Path) -> int | None:
    """Open a lock file, creating it if missing. Others may have put something else in its place: links are not
    followed, and a pipe does not block."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = None
    # Another user's file in a sticky folder may be opened, but not with O_CREAT (fs.protected_regular).
    for more in (os.O_CREAT, 0):
        with contextlib.suppress(OSError):
            descriptor = os.open(path, flags | more, 0o644)
            break
    if descriptor is None:
        return None
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        return None
    # The umask may have hidden it from other users.
    if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) != 0o644:
        os.fchmod(descriptor, 0o644)
    return descriptor


def holder(root: Path = ROOT) -> int | None:
    """The process that holds the lock, if the kernel shows it to this one."""
    try:
        inode = lock_file().stat().st_ino
    except OSError:
        return None
    pattern = rf"^\d+: FLOCK +\w+ +WRITE +(\d+) [0-9a-f]+:[0-9a-f]+:{inode} "
    match = re.search(pattern, read_text(root / "proc/locks") or "", re.MULTILINE)
    return int(match[1]) if match and int(match[1]) > 0 else None


def described(pid: int | None, root: Path = ROOT) -> str:
    """A process in words: its number and command."""
    if pid is None:
        return "another process that measures"
    if pid == os.getpid():
        return "another thread of this process that measures"
    text = (read_text(root / f"proc/{pid}/cmdline") or "").replace("\0", " ").strip()
    command = "".join(char if char.isprintable() else "?" for char in text)
    if len(command) > LONGEST_COMMAND:
        command = command[: LONGEST_COMMAND - 3] + "..."
    return f"process {pid}" + (f" ({command})" if command else "")


def _is_ancestors(pid: int | None, root: Path = ROOT) -> bool:
    """Whether the lock's holder started this process, and so waits for it."""
    if pid is None:
        return False
    own = os.getppid()
    while own > 1 and own != pid:
        fields = (read_text(root / f"proc/{own}/stat") or "").rpartition(")")[2].split()
        own = int(fields[1]) if len(fields) > 1 else 0
    return own == pid
