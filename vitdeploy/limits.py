"""Bounds of time and memory for work on files of unknown origin, and what the command is doing at the moment.

Both are for the process that watches over the `vitdeploy` command (`cli/watched.py`), which reads them in memory that
it shares with the command. In a process of the user's own, `vitdeploy` as a library, nothing is bounded: no limit of
such a process is ours to set. `setting` reads what a user changes, of other limits too.
"""

import contextlib
import json
import mmap
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from vitdeploy.errors import InputError, LimitError

# What reading and rewriting a file of few bytes may take, and what each of its gigabytes adds: far more than it needs.
SECONDS, SECONDS_A_GB = 300.0, 300.0
MEMORY, MEMORY_A_BYTE = 4 << 30, 8
# Each core may have threads with stacks of their own.
MEMORY_A_CORE = 64 << 20
SECONDS_SETTING, MEMORY_SETTING = "VITDEPLOY_MAX_SECONDS", "VITDEPLOY_MAX_GIB"
SIZE = 4096
# The last words of a process: so many bytes at most, and lines.
TAIL_BYTES, TAIL_LINES = 4096, 8
_HEADER = struct.Struct("<QI")


@dataclass(frozen=True)
class Doing:
    """What the command does: `what` in words. With a bound: its `number`, from 1, and what it may take."""

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
            f"to {self.what} ended the command by {signal}",
            found="a crash in a native library",
            expected="a file that can be read and run",
            fix="check where the file is from, and get it again; where you made it, please report it: -vv shows where "
            "the crash is",
        )

    def exceeded(self, found: str) -> LimitError:
        return LimitError(
            f"to {self.what} takes more than it may",
            found=found,
            expected=f"at most {self.bound}",
            fix=f"check where the file is from; a larger {SECONDS_SETTING} or {MEMORY_SETTING} allows more",
        )


class Board:
    """Shared memory with one `Doing` in it, which one process writes and its parent reads."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, SIZE)
        self._count = 0

    def write(self, doing: Doing) -> None:
        text = json.dumps(asdict(doing)).encode("ascii")
        if len(text) > SIZE - _HEADER.size:
            text = json.dumps({**asdict(doing), "what": doing.what[:200]}).encode("ascii")
        self._memory[: _HEADER.size] = _HEADER.pack(self._count + 1, 0)  # odd: not whole yet
        self._memory[_HEADER.size : _HEADER.size + len(text)] = text
        self._count += 2
        self._memory[: _HEADER.size] = _HEADER.pack(self._count, len(text))

    def read(self) -> Doing | None:
        """What was written last; None while it is not whole."""
        count, length = _HEADER.unpack(self._memory[: _HEADER.size])
        text = self._memory[_HEADER.size : _HEADER.size + length]
        if count % 2 or (count, length) != _HEADER.unpack(self._memory[: _HEADER.size]):
            return None
        return Doing(**json.loads(text)) if length else Doing()


@dataclass
class _Watched:
    """The process that is watched: it alone writes, and no process that it forks."""

    board: Board
    process: int
    doing: Doing
    bounds: int = 0


_watched: _Watched | None = None


def be_watched(board: Board) -> None:
    """Tell a parent process, by `board`, what this process does from now on."""
    global _watched
    _watched = _Watched(board, os.getpid(), Doing())


def phase(what: str) -> None:
    """Say what this process does from now on, such as "calibrate": should it die, its parent says so."""
    watched = _mine()
    if watched is not None and watched.doing.what != what and not watched.doing.number:
        _tell(watched, Doing(what))


@contextlib.contextmanager
def bounded(what: str, size: int = 0) -> Iterator[None]:
    """Bound what a block may take that works on a file of unknown origin. Inside another one, the outer bound holds.

    Args:
        what: in words, behind "to": "read model.onnx".
        size: bytes of the file, with its weights.

    Raises:
        LimitError: memory. Where time ends, the parent process ends this one, and says the same.
        InputError: as `setting`.
    """
    watched = _mine()
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


def size_of(*files: Path) -> int:
    """Bytes of these files together; what is not there, or has a name that no file can have, is none."""
    total = 0
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            total += file.stat().st_size
    return total


def setting(name: str) -> float | None:
    """The number in an environment variable by which a user changes a limit; None where it is not set, or empty.

    Raises:
        InputError: anything but a number above zero.
    """
    text = os.environ.get(name, "")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) or not float(text):
        raise InputError(
            f"{name} is no number above zero",
            found=text[:40],
            expected="digits, such as 4 or 0.5",
            fix=f"set it to such a number, or unset {name}",
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
    """Let this process have `memory` bytes more than it has now, of what it writes to (RLIMIT_DATA): mapped files and
    address space that is only reserved, as every thread of glibc has some, cost nothing. Linux alone."""
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
    """Whether an allocation failed, maybe behind an error of ours that takes it for a damaged file."""
    while error is not None:
        if ran_out_of_memory(error):
            return True
        error = error.__cause__ or error.__context__
    return False


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether this error is of an allocation: Python's, the system's, and the texts of native libraries, which have no
    type for it."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in ("bad_alloc", "allocate memory"))


def last_words(output: IO[bytes]) -> list[str]:
    """The last lines that a process wrote to a file, indented for the `found` field of an error."""
    output.seek(max(0, output.seek(0, os.SEEK_END) - TAIL_BYTES))
    text = output.read().decode("utf-8", errors="replace")
    return [f"{'':16}| {line}" for line in text.splitlines()[-TAIL_LINES:]]
