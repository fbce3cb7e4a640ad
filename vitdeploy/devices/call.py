"""One command on a device: a child process of ours with untrusted output.

Its output is read with limits, and only after a line that identifies the agent (login shells print greetings); its
standard error is truncated and kept for an error message. Nothing is waited for without end (patience.py).
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import IO, Any

from vitdeploy.devices.agent.beat import BEAT, BEAT_SECONDS
from vitdeploy.devices.agent.stream import BLOCK, StreamError, read_line
from vitdeploy.devices.patience import LOOK_SECONDS, MAX_ERROR_BYTES, MAX_TALK_BYTES, Clock, Patience
from vitdeploy.devices.transport import Unresponsive
from vitdeploy.errors import DeviceResultError

TAIL_BYTES = 4096
GREETING_LINES, GREETING_BYTES = 200, 4096
PREFIX = b"vitdeploy-agent "

Tell = Callable[[str, int, int], None]


class Interrupted(Exception):
    """The user cancelled it."""


def printable(text: str) -> str:
    """Text of a device, fit for a terminal: its lines, but no control characters."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text[-TAIL_BYTES:])


class Call:
    """A started command on the device `name`. `output` is what it answers, once `greeting` was read.

    Whatever reads or writes raises Unresponsive where the device does not keep to `patience`, DeviceResultError where
    it says too much, and Interrupted once `cancelled` is set. `tell` hears of long silences.
    """

    def __init__(
        self, name: str, argv: Sequence[str], patience: Patience, cancelled: threading.Event, tell: Tell
    ) -> None:
        """Start it. A session of its own keeps Ctrl-C from it: what becomes of the job is for us to say.

        Raises:
            OSError: the program is not there.
        """
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._input, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._input.fileno(), False)
        self.output = io.BufferedReader(_Answers(self), BLOCK)
        self._name, self._patience, self._cancelled, self._tell = name, patience, cancelled, tell
        self._clock, self._talk = Clock(patience), 0
        self._words, self._written = b"", 0
        self._listener = threading.Thread(target=self._listen, args=(self._process.stderr,), daemon=True)
        self._listener.start()

    def _listen(self, errors: IO[bytes]) -> None:
        with errors:
            for block in iter(lambda: errors.read1(BLOCK), b""):  # type: ignore[attr-defined]
                self._words = (self._words + block)[-TAIL_BYTES:]
                self._written += len(block)
                if self._written > MAX_ERROR_BYTES:
                    self._kill()
                    return

    def expect(self, within: float) -> None:
        """Begin to wait for an answer, for `within` seconds at most, whatever signs of life there are."""
        self._clock.expect(within)

    def begin(self) -> None:
        """Begin with the next file or array of an answer."""
        self._clock.begin()

    def receive(self, buffer: Any) -> int:
        """What comes next, into `buffer`; the number of its bytes, 0 at the end."""
        self._wait(self._answers.fileno(), select.POLLIN)
        count = os.readv(self._answers.fileno(), [buffer])
        self._clock.passed(count)
        return count

    def send(self, blocks: Iterable[bytes]) -> None:
        """Write to its standard input, as long as it reads. Why it stopped reading is in its answer."""
        self._clock.begin()
        with contextlib.suppress(BrokenPipeError):
            for block in blocks:
                left = memoryview(block)
                while left:
                    self._wait(self._input.fileno(), select.POLLOUT)
                    count = os.write(self._input.fileno(), left[:BLOCK])
                    self._clock.passed(count)
                    left = left[count:]

    def _wait(self, descriptor: int, event: int) -> None:
        """Wait until bytes can pass."""
        poll = select.poll()
        poll.register(descriptor, event)
        while True:
            if self._cancelled.is_set():
                raise Interrupted
            since = time.monotonic()
            ready = bool(poll.poll(1000 * LOOK_SECONDS))
            silent = self._clock.waited(time.monotonic() - since, ready)
            if self._written > MAX_ERROR_BYTES:  # which has ended it, so its output may be ready to end too
                raise self._too_much("standard error without end", MAX_ERROR_BYTES)
            self._require_in_time()
            if ready:
                return
            if silent:
                self._tell(f"no word from {self._name} for {silent:.0f} s", 0, 1)

    def _require_in_time(self) -> None:
        late = self._clock.overdue()
        if late is not None:
            raise Unresponsive(
                f"{self._name} does not answer",
                found=late[0],
                wanted=f"{late[1]}, and a sign of life every {BEAT_SECONDS:g} s",
                fix="look whether it is overloaded or its disk is full, then run the command again",
            )

    def _too_much(self, what: str, limit: int) -> DeviceResultError:
        return DeviceResultError(
            f"{self._name}: {what}",
            found=f"more than {limit:,} bytes",
            fix=f"look what runs as Python there: {self._last_words() or 'it says nothing readable'}",
        )

    def _last_words(self) -> str:
        lines = printable(self._words.decode("utf-8", errors="replace")).split("\n")
        return next((line[:200] for line in reversed(lines) if line.strip()), "")

    def greeting(self) -> str:
        """What the agent's line says, without its prefix; "" if it never came.

        Raises:
            StreamError: something else was printed, and too much of it.
        """
        self.expect(self._patience.greeting)
        for _ in range(GREETING_LINES):
            line = self.output.readline(GREETING_BYTES)
            if not line:
                return ""
            if line.startswith(PREFIX):
                return line[len(PREFIX) :].decode("ascii", errors="replace").strip()
        raise StreamError("the login prints much, and the agent nothing")

    def line(self, limit: int, *, talk: bool = False) -> bytes:
        """The next line of an answer; beats are passed over. `talk`: one of many that say how things are.

        Raises:
            StreamError: it is longer than `limit` bytes, or not ended.
        """
        while True:
            self._clock.begin()
            line = read_line(self.output, limit)
            beat = line == BEAT
            self._talk += len(line) if beat or talk else 0
            if self._talk > MAX_TALK_BYTES:
                raise self._too_much("signs of life without end", MAX_TALK_BYTES)
            if not beat:
                return line

    def end_input(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def end(self) -> tuple[int, str]:
        """Its exit status and the end of what it wrote to standard error, once it has ended; it is given a while."""
        self.end_input()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._patience.end)
        self._kill()
        status = self._process.wait()
        self._listener.join(timeout=5)
        return status, printable(self._words.decode("utf-8", errors="replace").replace("\r\n", "\n").strip())

    def _kill(self) -> None:
        """With whatever it started in its session here, which may hold its output open."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def __enter__(self) -> Call:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.returncode is None:
            self._kill()
            self._process.wait()
        self.end_input()
        self.output.close()
        self._answers.close()
        self._listener.join(timeout=5)


class _Answers(io.RawIOBase):
    """The output of a call, as a stream that ends in an error where it is not in time."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._call.receive(buffer)
