"""Run one command on a device: a local child process with untrusted output.

Its output is read with limits, and only after a line that identifies the agent (login shells print greetings). Its
standard error is truncated and kept for error messages. Every wait has a time limit.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import IO, Any

from vitdeploy.devices.agent.stream import BEAT, BEAT_SECONDS, BLOCK, StreamError, read_line
from vitdeploy.devices.registry import Device
from vitdeploy.errors import DeviceError, DeviceResultError
from vitdeploy.progress import Progress

TAIL_BYTES = 4096
GREETING_LINES, GREETING_BYTES = 200, 4096
PREFIX = b"vitdeploy-agent "


class Interrupted(Exception):
    """The user cancelled the command."""


def printable(text: str) -> str:
    """Return a device's text without control characters except newlines."""
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text[-TAIL_BYTES:])


class Call:
    """A started command on the device `name`. `output`: its answer, after `greeting` was read.

    Reading and writing raise Unresponsive if the device exceeds the time limits in `patience`, DeviceResultError if it
    sends too much, and Interrupted once `cancelled` is set. `tell` is called on long silences.
    """

    def __init__(
        self, name: str, argv: Sequence[str], patience: DevicePatience, cancelled: threading.Event, tell: Progress
    ) -> None:
        """Start the command in its own session, so that Ctrl-C does not reach it: the caller decides about the job.

        Raises:
            OSError: the program does not exist.
        """
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._input, self._answers = self._process.stdin, self._process.stdout
        os.set_blocking(self._input.fileno(), False)
        self.output = io.BufferedReader(_Answers(self), BLOCK)
        self._name, self._patience, self._cancelled, self._tell = name, patience, cancelled, tell
        self._clock, self._talk = _Clock(patience), 0
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
        """Begin to wait for an answer, at most `within` seconds, regardless of beats."""
        self._clock.expect(within)

    def begin(self) -> None:
        """Begin to read the next file or array of an answer."""
        self._clock.begin()

    def receive(self, buffer: Any) -> int:
        """Read the next bytes into `buffer`; return their number, 0 at the end."""
        self._wait(self._answers.fileno(), select.POLLIN)
        count = os.readv(self._answers.fileno(), [buffer])
        self._clock.passed(count)
        return count

    def send(self, blocks: Iterable[bytes]) -> None:
        """Write to its standard input, as long as it reads. Its answer contains the reason if it stopped reading."""
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
        """Wait until the descriptor is ready."""
        poll = select.poll()
        poll.register(descriptor, event)
        while True:
            if self._cancelled.is_set():
                raise Interrupted
            since = time.monotonic()
            ready = bool(poll.poll(1000 * LOOK_SECONDS))
            silent = self._clock.waited(time.monotonic() - since, ready)
            if self._written > MAX_ERROR_BYTES:  # this killed it, so its output may also be at its end
                raise self._too_much("too much output on standard error", MAX_ERROR_BYTES)
            self._require_in_time()
            if ready:
                return
            if silent:
                self._tell(f"no response from {self._name} for {silent:.0f} s", 0, 1)

    def _require_in_time(self) -> None:
        late = self._clock.overdue()
        if late is not None:
            raise Unresponsive(
                f"{self._name} does not answer",
                found=late[0],
                expected=f"{late[1]}, and a heartbeat every {BEAT_SECONDS:g} s",
                fix="check whether it is overloaded or its disk is full, then run the command again",
            )

    def _too_much(self, what: str, limit: int) -> DeviceResultError:
        return DeviceResultError(
            f"{self._name}: {what}",
            found=f"more than {limit:,} bytes",
            fix=f"check the Python on the device; its last output: {self._last_words() or 'nothing readable'}",
        )

    def _last_words(self) -> str:
        lines = printable(self._words.decode("utf-8", errors="replace")).split("\n")
        return next((line[:200] for line in reversed(lines) if line.strip()), "")

    def greeting(self) -> str:
        """Return the agent's greeting without its prefix; "" if the output ended without it.

        Raises:
            StreamError: too much other output.
        """
        self.expect(self._patience.greeting)
        for _ in range(GREETING_LINES):
            line = self.output.readline(GREETING_BYTES)
            if not line:
                return ""
            if line.startswith(PREFIX):
                return line[len(PREFIX) :].decode("ascii", errors="replace").strip()
        raise StreamError("much login output, but no greeting from the agent")

    def line(self, limit: int, *, talk: bool = False) -> bytes:
        """Return the next line of an answer, skipping beats. `talk`: the line is one of many status lines.

        Raises:
            StreamError: the line is longer than `limit` bytes, or incomplete.
        """
        while True:
            self._clock.begin()
            line = read_line(self.output, limit)
            beat = line == BEAT
            self._talk += len(line) if beat or talk else 0
            if self._talk > MAX_TALK_BYTES:
                raise self._too_much("too many heartbeats and status lines", MAX_TALK_BYTES)
            if not beat:
                return line

    def end_input(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._input.close()

    def end(self) -> tuple[int, str]:
        """Wait a while for its end, then kill it; return the exit status and the end of its standard error."""
        self.end_input()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(self._patience.end)
        self._kill()
        status = self._process.wait()
        self._listener.join(timeout=5)
        return status, printable(self._words.decode("utf-8", errors="replace").replace("\r\n", "\n").strip())

    def _kill(self) -> None:
        """Kill it and all processes of its session, which may keep its output open."""
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
    """The output of a call as a stream, which raises if a time limit is exceeded."""

    def __init__(self, call: Call) -> None:
        self._call = call

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        return self._call.receive(buffer)


# --- Limits of time and size for a device's answers -------------------------------------------------------------------
# Every conversation ends with its answer or at a limit. The agent beats while it works or waits (agent/stream.py), so
# long work is not silent.


# The most bytes per conversation on standard error, and of beats and status lines.
MAX_ERROR_BYTES = 64 << 20
MAX_TALK_BYTES = 64 << 20
# Seconds between checks of a wait; a cancelled wait ends within this time.
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class DevicePatience:
    """The limits for a device, in seconds except `rate` and `mute`.

    greeting: for the login, the start of Python on a slow board, and the agent's greeting.
    silence: without a byte in or out. told: the user is informed after this much silence, and each time it repeats.
    rate: the least bytes per second of a message in either direction, counted from `silence` seconds after its start.
    answer, probe: for an answer of a beating agent; a probe loads every runtime.
    queue: to wait for the device. work: for a job, or for an engine to be built or to answer.
    stop: for each message to a device after an interrupt, or after a finished job.
    end: for the local process to exit after its last output.
    lost: how long a device may be unreachable after a broken connection.
    mute: the number of consecutive times that its agent may stop responding.
    first_retry, last_retry: the first and the longest delay between attempts, doubled each time.
    """

    greeting: float = 60.0
    silence: float = 60.0
    told: float = 30.0
    rate: float = 20e3  # a bad mobile link
    answer: float = 120.0
    probe: float = 300.0
    queue: float = 3600.0
    work: float = 36 * 3600.0  # a bench may sustain a load for 24 hours
    stop: float = 20.0
    end: float = 10.0
    lost: float = 600.0
    mute: int = 3
    first_retry: float = 1.0
    last_retry: float = 30.0


PATIENCE = DevicePatience()


class _Clock:
    """The elapsed time of a wait for bytes. Only actual waiting counts, not time in which this process was busy,
    stopped or suspended."""

    def __init__(self, patience: DevicePatience) -> None:
        self._patience = patience
        self._within = patience.greeting
        self._answer = self._message = self._silence = 0.0
        self._bytes = 0

    def expect(self, within: float) -> None:
        """Begin to wait for an answer, at most `within` seconds."""
        self._within, self._answer = within, 0.0
        self.begin()

    def begin(self) -> None:
        """Begin the next message of an answer: a line or a file."""
        self._message, self._bytes = 0.0, 0

    def passed(self, count: int) -> None:
        """Count bytes that were received or sent."""
        self._bytes += count

    def waited(self, seconds: float, ready: bool) -> float:
        """Add the time since the last check, capped because a longer time was not spent waiting. Return the seconds of
        silence to report now, 0 for none."""
        seconds = min(seconds, 2 * LOOK_SECONDS)
        self._message += seconds
        if self._bytes <= len(BEAT) + 1:  # more bytes are not a beat; then the rate counts
            self._answer += seconds
        before = self._silence
        self._silence = 0.0 if ready else before + seconds
        told = self._patience.told
        return self._silence if self._silence // told > before // told else 0.0

    def overdue(self) -> tuple[str, str] | None:
        """Return (found, expected) if a limit is exceeded, otherwise None."""
        patience = self._patience
        if self._silence >= patience.silence:
            return f"no response for {self._silence:,.0f} s", f"a response within {patience.silence:,.0f} s"
        if self._bytes < patience.rate * (self._message - patience.silence):
            return f"{self._bytes:,} bytes in {self._message:,.0f} s", f"at least {patience.rate:,.0f} bytes per second"
        if self._answer >= self._within:
            return f"heartbeats for {self._answer:,.0f} s, but no answer", f"an answer within {self._within:,.0f} s"
        return None


def spelled(seconds: float) -> str:
    """Return a time limit as text: "20 s", "10 min", "36 h"."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit and seconds % unit == 0:
            return f"{seconds / unit:,.0f} {name}"
    return f"{seconds:,.3g} s"


# --- Run a command on a device: as a local child process, or through the system's ssh ---------------------------------
# Files are sent over standard input and output, so that boards without sftp work too. ssh uses the user's
# configuration, keys, agent, jump hosts and known_hosts; our options do not change host-key checking.


CONNECT_SECONDS = 10
SSH_FAILED = 255
# Without BatchMode, ssh would wait for a password; without ServerAlive*, forever on a lost connection (now 45 s).
OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"),
)


class ConnectionLost(DeviceError):
    """ssh could not connect, or its connection broke; a retry may help."""


class Unresponsive(ConnectionLost):
    """The connection works, but the agent does not respond, or too slowly."""


def command(device: Device, arguments: Sequence[str]) -> list[str]:
    """Return the local command that runs `device.python ARGUMENTS` on the device."""
    if device.host is None:
        return [device.python, *arguments]
    # Every login shell accepts words in single quotes, but expands "~" only outside of them.
    home, name = ('"$HOME"/', device.python[2:]) if device.python.startswith("~/") else ("", device.python)
    line = f"{home}{shlex.quote(name)} {shlex.join(arguments)}"
    return [*ssh(device), line]


def shell(device: Device) -> str:
    """Return the command for a user to run the device's Python."""
    return shlex.join([*(("ssh", *_where(device)) if device.host is not None else ()), device.python])


def typed(device: Device, line: str, *, expand: bool = False) -> str:
    """Return the command for a user to run a shell line on the device, with a terminal for sudo's password prompt.

    `expand`: the local shell expands `$(...)` in the line.
    """
    if device.host is None:
        return line
    quoted = f'"{line}"' if expand else shlex.quote(line)
    return f"{shlex.join(['ssh', '-t', *_where(device)])} {quoted}"


def ssh(device: Device) -> list[str]:
    """Return ssh with its options and the host."""
    return ["ssh", *OPTIONS, *_where(device, "--")]


def _where(device: Device, *end: str) -> list[str]:
    return [
        *(("-F", device.ssh_config) if device.ssh_config else ()),
        *(("-p", str(device.port)) if device.port else ()),
        *(("-l", device.user) if device.user else ()),
        *end,
        str(device.host),
    ]


def why(device: Device, status: int, words: str) -> DeviceError:
    """Return the error for a command that ended without a greeting, from the output of ssh or the device's shell."""
    last = words.splitlines()[-1] if words else f"exit status {status}, no output"
    login = shlex.join(["ssh", *_where(device)])
    if status == SSH_FAILED and device.host is not None:
        return _refused(device, words, last, login)
    if status in (126, 127):
        return DeviceError(
            f"{device.name} has no Python at {device.python}",
            found=last,
            expected="Python 3.10 or newer, with numpy, Pillow and one runtime",
            fix=f"vitdeploy devices add {device.name} {device.address} --python PATH",
        )
    return DeviceError(f"{device.name}: the agent does not start", found=last, expected="Python 3.10 or newer on Linux")


def _refused(device: Device, words: str, last: str, login: str) -> DeviceError:
    where = f"{device.name} ({device.address})"
    if "IDENTIFICATION HAS CHANGED" in words:
        return DeviceError(
            f"the host key of {where} has changed: the device was reinstalled, or the connection is intercepted",
            found=last,
            expected="the host key in known_hosts",
            fix="ask its administrator; if the new key is correct: ssh-keygen -R HOST, then log in once manually",
        )
    if "Host key verification failed" in words:
        return DeviceError(
            f"the host key of {where} is unknown",
            found=last,
            fix=f"log in once manually and check the key: {login}",
        )
    if "Permission denied" in words or "Too many authentication failures" in words:
        return DeviceError(
            f"{where} accepts none of your keys",
            found=last,
            expected="a key that works without a password prompt",
            fix="ssh-copy-id, or ssh-add",
        )
    if "Could not resolve hostname" in words or "Bad configuration option" in words or "terminating," in words:
        return DeviceError(f"{where} cannot be reached", found=last, fix=f"check: {login}")
    return ConnectionLost(f"{where} cannot be reached", found=last, fix=f"is it on? check: {login}")
