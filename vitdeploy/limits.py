"""Time and memory limits for work on files of unknown origin, and the current activity of the command.

Both are for the process that watches the `vitdeploy` command (`cli/watched.py`), which reads them in memory that it
shares with the command. Nothing is limited when `vitdeploy` is used as a library: the limits of a user's process are
not ours to set. `setting` reads the user's value of these and other limits.
"""

import contextlib
import json
import mmap
import os
import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from vitdeploy.errors import CapabilityError, InputError, LimitError

# Limits for reading and rewriting a small file, and the addition per gigabyte: far more than needed.
SECONDS, SECONDS_A_GB = 300.0, 300.0
MEMORY, MEMORY_A_BYTE = 4 << 30, 8
# Memory for the stacks of threads on each core.
MEMORY_A_CORE = 64 << 20
SECONDS_SETTING, MEMORY_SETTING = "VITDEPLOY_MAX_SECONDS", "VITDEPLOY_MAX_GIB"
SIZE = 4096
# Maximum bytes and lines of the last output of a process.
TAIL_BYTES, TAIL_LINES = 4096, 8
_HEADER = struct.Struct("<QI")


@dataclass(frozen=True)
class Doing:
    """The current activity of the command, `what` in words; with limits: its `number`, from 1, and the limits."""

    what: str = ""
    number: int = 0
    seconds: float = 0.0
    memory: int = 0

    @property
    def bound(self) -> str:
        seconds = f"{self.seconds:,.0f}" if self.seconds >= 10 else f"{self.seconds:.2g}"
        return f"{seconds} s and {self.memory / (1 << 30):.2g} GiB"

    def crashed(self, signal: str) -> LimitError:
        return LimitError(
            f"the command crashed ({signal}) while trying to {self.what}",
            found="a crash in a native library",
            expected="a file that can be read and run",
            fix="check the source of the file, and get it again; if you made it, please report the crash with the "
            "output of -vv",
        )

    def exceeded(self, found: str) -> LimitError:
        return LimitError(
            f"a resource limit was exceeded while trying to {self.what}",
            found=found,
            expected=f"at most {self.bound}",
            fix=f"check the source of the file; if you trust it, set a larger {SECONDS_SETTING} or {MEMORY_SETTING}",
        )


class Board:
    """Shared memory with one `Doing`, written by one process and read by its parent."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SIZE)
        self._count = 0

    def write(self, doing: Doing) -> None:
        text = json.dumps(asdict(doing)).encode("ascii")
        if len(text) > SIZE - _HEADER.size:
            text = json.dumps({**asdict(doing), "what": doing.what[:200]}).encode("ascii")
        self._memory[: _HEADER.size] = _HEADER.pack(self._count + 1, 0)  # odd: incomplete
        self._memory[_HEADER.size : _HEADER.size + len(text)] = text
        self._count += 2
        self._memory[: _HEADER.size] = _HEADER.pack(self._count, len(text))

    def read(self) -> Doing | None:
        """The last value; None while it is incomplete."""
        count, length = _HEADER.unpack(self._memory[: _HEADER.size])
        text = self._memory[_HEADER.size : _HEADER.size + length]
        if count % 2 or (count, length) != _HEADER.unpack(self._memory[: _HEADER.size]):
            return None
        return Doing(**json.loads(text)) if length else Doing()


@dataclass
class _Watched:
    """The watched process: only it writes, not the processes that it forks."""

    board: Board
    process: int
    doing: Doing
    bounds: int = 0


_watched: _Watched | None = None
_unlimited = False


def be_watched(board: Board) -> None:
    """Report the activity of this process to its parent by `board` from now on."""
    global _watched
    _watched = _Watched(board, os.getpid(), Doing())


def run_unlimited() -> None:
    """Warn at the first foreign file, as this system cannot watch this process."""
    global _unlimited
    _unlimited = True


def phase(what: str) -> None:
    """Set the activity of this process, such as "calibrate"; if it dies, its parent reports it."""
    watched = _mine()
    if watched is not None and watched.doing.what != what and not watched.doing.number:
        _tell(watched, Doing(what))


@contextlib.contextmanager
def bounded(what: str, size: int = 0) -> Iterator[None]:
    """Limit the time and memory of a block that works on a file of unknown origin. When nested, the outer limit holds.

    Args:
        what: the activity as an infinitive: "read model.onnx".
        size: bytes of the file, with its weights.

    Raises:
        LimitError: the memory limit is exceeded. At the time limit, the parent ends this process and reports it.
        InputError: as in `setting`.
        CapabilityError: the user set a limit, and this system cannot keep it.
    """
    watched = _mine()
    if _unlimited:
        _warn_of_no_limit(what)
    if watched is None or watched.doing.number:
        yield
        return
    before = watched.doing
    watched.bounds += 1
    seconds, memory = _seconds(size), _memory(size)
    now = Doing(what, watched.bounds, seconds, memory)
    _tell(watched, now)
    try:
        with _little_memory(memory):
            yield
    except Exception as error:
        if _is_of_memory(error):
            raise now.exceeded("no memory left") from error
        raise
    finally:
        _tell(watched, before)


def _warn_of_no_limit(what: str) -> None:
    global _unlimited
    elsewhere = "vitdeploy in a Linux container, a virtual machine or the Windows Subsystem for Linux"
    if name := next(filter(setting, (SECONDS_SETTING, MEMORY_SETTING)), ""):
        raise CapabilityError(
            f"{name} cannot be kept on this system",
            found=sys.platform,
            expected="Linux, where a second process watches the command",
            fix=f"unset {name} if you trust the files; or run {elsewhere}",
        )
    limit = f"{sys.platform} sets no limit of time and memory to {what}"
    print(f"warning: {limit}; if you do not trust it, run {elsewhere}", file=sys.stderr)
    _unlimited = False


def size_of(*files: Path) -> int:
    """Total bytes of these files; missing files and impossible names count 0."""
    total = 0
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            total += file.stat().st_size
    return total


def setting(name: str) -> float | None:
    """The number in an environment variable that sets a limit; None if it is unset or empty.

    Raises:
        InputError: anything but a number above zero.
    """
    text = os.environ.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) or not float(text):
        raise InputError(
            f"{name} must be a number above zero",
            found=text[:40],
            expected="digits, such as 4 or 0.5",
            fix=f"correct or unset {name}",
        )
    return float(text)


def _mine() -> _Watched | None:
    return _watched if _watched is not None and _watched.process == os.getpid() else None


def _tell(watched: _Watched, doing: Doing) -> None:
    watched.doing = doing
    watched.board.write(doing)


def _seconds(size: int) -> float:
    return setting(SECONDS_SETTING) or SECONDS + SECONDS_A_GB * size / 1e9


def _memory(size: int) -> int:
    asked = setting(MEMORY_SETTING)
    return int(asked * (1 << 30)) if asked else MEMORY + MEMORY_A_BYTE * size + MEMORY_A_CORE * (os.cpu_count() or 1)


@contextlib.contextmanager
def _little_memory(memory: int) -> Iterator[None]:
    """Limit this process to `memory` bytes of further writable memory (RLIMIT_DATA): mapped files and reserved address
    space, as for every thread of glibc, do not count. Linux only."""
    import resource

    used = _data_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = used + memory if used is not None else None
    if limit is None or any(each != resource.RLIM_INFINITY and each <= limit for each in (soft, hard)):
        yield
        return
    resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


def _data_bytes() -> int | None:
    with contextlib.suppress(OSError):
        found = re.search(r"^VmData:\s+(\d+) kB", Path("/proc/self/status").read_text("ascii"), re.MULTILINE)
        return int(found[1]) * 1024 if found else None
    return None


def _is_of_memory(error: BaseException | None) -> bool:
    """Whether an allocation failed, possibly as the cause of an error that reports a damaged file."""
    while error is not None:
        if ran_out_of_memory(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether this error is a failed allocation: from Python, from the system, or from native libraries, which are
    recognised by their texts."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in ("bad_alloc", "allocate memory"))


def last_words(output: IO[bytes]) -> list[str]:
    """The last lines that a process wrote to a file, indented for the `found` field of an error."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
    text = output.read().decode("utf-8", errors="replace")
    return [f"{'':16}| {line}" for line in text.splitlines()[-TAIL_LINES:]]
