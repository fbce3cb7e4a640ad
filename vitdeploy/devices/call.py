"""One command on a device: a child process of ours with untrusted output.

Its output is read with limits, and only after a line that identifies the agent (login shells print greetings); its
standard error is truncated and kept for an error message.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import IO, BinaryIO, cast

from vitdeploy.devices.agent.stream import StreamError, read_line

TAIL_BYTES = 4096
GREETING_LINES, GREETING_BYTES = 200, 4096
PREFIX = b"vitdeploy-agent "


def printable(text: str) -> str:
    """Text of a device, fit for a terminal: its lines, but no control characters."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text[-TAIL_BYTES:])


class Call:
    """A started command. `output` is what it answers, once `greeting` was read."""

    def __init__(self, argv: Sequence[str], timeout: float | None) -> None:
        """Start it. After `timeout` seconds it is ended, which reads as the end of its output.

        A session of its own keeps Ctrl-C from it: what becomes of the job is for us to say.

        Raises:
            OSError: the program is not there.
        """
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self.input: IO[bytes] = self._process.stdin
        self.output = cast(BinaryIO, self._process.stdout)
        self._words = b""
        self._listener = threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True)
        self._listener.start()
        self._timer: threading.Timer | None = None
        if timeout is not None:
            self.extend(timeout)

    def extend(self, timeout: float) -> None:
        """Restart its time limit with this many seconds."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(timeout, self._process.kill)
        self._timer.daemon = True
        self._timer.start()

    def _listen(self, errors: IO[bytes]) -> None:
        with errors:
            for block in iter(lambda: errors.read1(TAIL_BYTES), b""):  # type: ignore[attr-defined]
                self._words = (self._words + block)[-TAIL_BYTES:]

    def send(self, blocks: Iterable[bytes]) -> None:
        """Write to its standard input, as long as it reads. Why it stopped reading is in its answer."""
        with contextlib.suppress(BrokenPipeError):
            for block in blocks:
                self.input.write(block)
            self.input.flush()

    def greeting(self) -> str:
        """What the agent's line says, without its prefix; "" if it never came.

        Raises:
            StreamError: something else was printed, and too much of it.
        """
        for _ in range(GREETING_LINES):
            line = self.output.readline(GREETING_BYTES)
            if not line:
                return ""
            if line.startswith(PREFIX):
                return line[len(PREFIX) :].decode("ascii", errors="replace").strip()
        raise StreamError("the login prints much, and the agent nothing")

    def line(self, limit: int) -> bytes:
        return read_line(self.output, limit)

    def end(self) -> tuple[int, str]:
        """Its exit status and the end of what it wrote to standard error, once it has ended by itself."""
        with contextlib.suppress(BrokenPipeError):
            self.input.close()
        status = self._process.wait()
        self._listener.join(timeout=5)
        return status, printable(self._words.decode("utf-8", errors="replace").replace("\r\n", "\n").strip())

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self.input.close()
        self.output.close()
        self._listener.join(timeout=5)
