"""One measurement per machine at a time, across users: two at once would disturb each other.

The lock is the kernel's (flock) on an empty file in the machine's temporary folder, so it is released when its process
ends, for whatever reason. The kernel also reports the owner: nothing is written that another user could forge. Without
such a lock (Windows), or if the file cannot be opened, there is no waiting; other activity shows in the load. Who
waits has a lock of one byte of a second file, the next one after those of all who wait: the order of arrival.
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
from vitdeploy.errors import CapabilityError

LOCK_NAME, QUEUE_NAME = "vitdeploy-device.lock", "vitdeploy-device.queue"
LOOK_SECONDS = 0.25
# A lock that is free for so many looks is taken although others came before: they may be stopped.
PATIENT_LOOKS = 8
LONGEST_COMMAND = 100


class MachineLock:
    """The lock as this process sees it. It is reentrant for the thread that holds it: a bench contains others.

    `waited`: seconds that this process has waited for it so far; `max_wait`: how many it may at most, None for any.
    """

    def __init__(self) -> None:
        self.waited, self.max_wait = 0.0, None  # type: float, float | None
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
    waited for: which it is, since when it runs, and how many others wait before this one.

    Raises:
        CapabilityError: this process has waited for longer than `MACHINE.max_wait`.
    """
    if (_queue() and holder() is None) or not MACHINE.take():
        with _ticket() as count_before:
            _wait(waits_for, count_before)
    try:
        yield
    finally:
        MACHINE.give_back()


def _wait(waits_for: Callable[[str], None], count_before: Callable[[], int]) -> None:
    """Take the lock when it is this process's turn."""
    reported, free_looks = "", 0
    while True:
        begun, before, pid = time.monotonic(), count_before(), holder()
        free_looks = free_looks + 1 if pid is None else 0
        if (not before or free_looks > PATIENT_LOOKS) and MACHINE.take():
            return
        text = described(pid) + _started(pid)
        if before:
            text += f"; {before} other{'s wait' if before > 1 else ' waits'} before this command"
        if text != reported:
            reported = text
            waits_for(text)
        if MACHINE.max_wait is not None and MACHINE.waited >= MACHINE.max_wait:
            raise CapabilityError(
                "another measurement uses this machine",
                found=f"{text}; waited {MACHINE.waited:.0f} s",
                wanted=f"the machine alone within --max-wait {MACHINE.max_wait:g} s",
                fix="wait for it to end, or allow a longer --max-wait",
            )
        time.sleep(LOOK_SECONDS)
        MACHINE.waited += time.monotonic() - begun


@contextlib.contextmanager
def _ticket() -> Iterator[Callable[[], int]]:
    """A place in the queue; yields a function that counts those before it, 0 where the kernel shows none."""
    descriptor = open_lock(lock_file().with_name(QUEUE_NAME)) if os.name == "posix" else None
    if descriptor is None:
        yield lambda: 0
        return
    import fcntl

    place = max((start for start, _ in _queue()), default=0) + 1, os.getpid()
    try:
        with contextlib.suppress(OSError):  # not every file system has locks
            fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, place[0])
        yield lambda: sum(other < place for other in _queue())
    finally:
        os.close(descriptor)


def _queue(root: Path = ROOT) -> list[tuple[int, int]]:
    """Who waits for the lock, in the order of arrival: the number of the place, and the process."""
    try:
        inode = lock_file().with_name(QUEUE_NAME).stat().st_ino
    except OSError:
        return []
    pattern = rf"^\d+: POSIX +\w+ +READ +(\d+) [0-9a-f]+:[0-9a-f]+:{inode} (\d+) "
    entries = re.findall(pattern, read_text(root / "proc/locks") or "", re.MULTILINE)
    return sorted((int(start), int(pid)) for pid, start in entries)


def _started(pid: int | None, root: Path = ROOT) -> str:
    """Since when a process runs, as ", since 14:03:22"; "" if that is not known."""
    fields = (read_text(root / f"proc/{pid}/stat") or "").rpartition(")")[2].split()
    uptime = (read_text(root / "proc/uptime") or "").split()
    if pid is None or len(fields) < 20 or not uptime:
        return ""
    age = float(uptime[0]) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.strftime(", since %H:%M:%S", time.localtime(time.time() - age))


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
