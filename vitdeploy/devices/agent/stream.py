"""Messages over a pipe: a line of JSON, then the raw bytes of the files that it lists, in order."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NoReturn

from vitdeploy.spec import FileEntry

BLOCK = 1 << 20


class StreamError(Exception):
    """The message does not match its header."""


class BrokenOff(StreamError):
    """The message ends early, for example because the connection broke."""


def message(document: Any, files: Iterable[Path] = ()) -> Iterator[bytes]:
    """Yield the bytes of a message, block by block."""
    yield json.dumps(document, allow_nan=False).encode() + b"\n"
    for path in files:
        yield from blocks_of(path)


def blocks_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from iter(lambda: file.read(BLOCK), b"")


def read_line(stream: BinaryIO, limit: int) -> bytes:
    """Return the next line without its newline; b"" at the end of the stream.

    Raises:
        StreamError: the line is longer than `limit` bytes. BrokenOff: the stream ends within it.
    """
    line = stream.readline(limit + 1)
    if len(line) > limit:
        raise StreamError(f"a line is longer than {limit:,} bytes")
    if line and not line.endswith(b"\n"):
        raise BrokenOff("the stream ended within a line")
    return line[:-1]


def read_json(line: bytes) -> Any:
    """Parse a line of JSON with finite numbers and unique keys.

    Raises:
        StreamError: the line is invalid.
    """
    try:
        return json.loads(line, parse_constant=_no_constant, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise StreamError(f"not JSON: {str(error)[:100]}") from None


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON value")


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("duplicate key")
    return found


def read_file(stream: BinaryIO, entry: FileEntry, path: Path) -> None:
    """Write the next `entry.bytes` of the stream to the new file `path`.

    Raises:
        StreamError: the bytes have the wrong SHA-256. BrokenOff: the stream ends early.
        OSError: the disk is full or not writable.
    """
    digest, left = hashlib.sha256(), entry.bytes
    with path.open("xb") as file:
        while left:
            block = stream.read(min(BLOCK, left))
            if not block:
                raise BrokenOff(f"the stream ended in {entry.path}, {left:,} bytes before its end")
            digest.update(block)
            file.write(block)
            left -= len(block)
    if digest.hexdigest() != entry.sha256:
        raise StreamError(f"the SHA-256 of {entry.path} does not match its message")


# --- Beats: signs of life ---------------------------------------------------------------------------------------------
# While the agent works, it regularly sends an empty message to the host, so that long work does not look like a
# failure. A separate process writes them: a runtime may hold the interpreter's lock while it loads a model (ONNX
# Runtime does, microsoft/onnxruntime#27063), which blocks all threads of the agent. A beat is one short, atomic write
# to a pipe (pipe(7), PIPE_BUF).


BEAT = b'{"alive": true}'
BEAT_SECONDS = 5.0
PAUSE, GO_ON = b"-", b"+"


class Beats:
    """Context manager that sends beats to `descriptor`, a pipe to the host; write to it otherwise only while `paused`.

    It forks: enter it before heavy modules are loaded. `ends`: this process gets SIGTERM when a beat finds the pipe
    closed.
    """

    def __init__(self, descriptor: int, *, ends: bool = False) -> None:
        self._descriptor, self._ends = descriptor, ends
        self._orders, self._child = socket.socketpair()
        self._process = 0

    def __enter__(self) -> Beats:
        agent = os.getpid()
        self._process = os.fork()
        if not self._process:
            self._orders.close()
            _beat(self._child, self._descriptor, agent if self._ends else 0)
        self._child.close()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._orders.close()
        os.waitpid(self._process, 0)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        with contextlib.suppress(ConnectionError):  # the beating process has ended, because the pipe is closed
            self._orders.send(PAUSE)
            self._orders.recv(1)
        yield
        with contextlib.suppress(ConnectionError):
            self._orders.send(GO_ON)


def _beat(orders: socket.socket, descriptor: int, ends: int) -> NoReturn:
    """Beat until the agent's process ends or the pipe is closed; `ends`: the process to stop then, 0 for none."""
    seconds: float | None = BEAT_SECONDS
    try:
        while True:
            if not select.select([orders], [], [], seconds)[0]:
                os.write(descriptor, BEAT + b"\n")
                continue
            order = orders.recv(1)
            if not order:
                break
            seconds = BEAT_SECONDS if order == GO_ON else None
            if order == PAUSE:
                orders.send(PAUSE)
    except BrokenPipeError:
        if ends == os.getppid():  # otherwise the agent is gone, and its number may be reused
            os.kill(ends, signal.SIGTERM)
    finally:
        os._exit(0)
