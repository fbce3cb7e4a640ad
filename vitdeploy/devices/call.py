"""One command on a device: a child process of ours with untrusted output.

Its output is read with limits, and only after a line that identifies the agent (login shells print greetings); its
standard error is truncated and kept for an error message. Nothing is waited for without end.
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
        self, name: str, argv: Sequence[str], patience: DevicePatience, cancelled: threading.Event, tell: Progress
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
                expected=f"{late[1]}, and a sign of life every {BEAT_SECONDS:g} s",
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


# --- How long a device is waited for, and how much it may say ---------------------------------------------------------
# Every conversation ends, by its answer or by one of these. The agent beats while it works or waits (agent/stream.py),
# so long work is no silence.


# What one conversation may write to standard error, and say besides its answers: beats, statuses, whom it waits for.
MAX_ERROR_BYTES = 64 << 20
MAX_TALK_BYTES = 64 << 20
# How often a wait is looked at: a cancelled one ends after so many seconds.
LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class DevicePatience:
    """Seconds, but for `rate` and `mute`.

    greeting: until the agent has greeted: the login, and the start of a Python on a slow board.
    silence: without a byte in or out. told: after so long a silence, and again after as much, the user hears of it.
    rate: the least bytes a second of a message or of what is sent, counted from `silence` seconds after it began.
    answer, probe: until an answer, of an agent that beats; a probe loads every runtime.
    queue: until it is this one's turn. work: of a job, or until an engine has been built or has answered.
    stop: of each word with a device after an interrupt, or with one that has done its work.
    end: until the process here has ended that has said all.
    lost: how long a device may be out of reach, from when a connection broke.
    mute: how often in a row its agent may stop speaking.
    first_retry, last_retry: between two attempts, doubled each time.
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
    """What one wait for bytes has taken so far. Only time in which nothing could be done but wait counts: not that in
    which this process was busy, stopped or suspended."""

    def __init__(self, patience: DevicePatience) -> None:
        self._patience = patience
        self._within = patience.greeting
        self._answer = self._message = self._silence = 0.0
        self._bytes = 0

    def expect(self, within: float) -> None:
        """Begin to wait for an answer, for `within` seconds at most."""
        self._within, self._answer = within, 0.0
        self.begin()

    def begin(self) -> None:
        """Begin with the next message of an answer: a line, or a file."""
        self._message, self._bytes = 0.0, 0

    def passed(self, count: int) -> None:
        """So many bytes came, or were taken."""
        self._bytes += count

    def waited(self, seconds: float, ready: bool) -> float:
        """So much more time passed until bytes could pass, or was looked at: a longer one was no wait. Gives the
        seconds of silence to tell of now, 0 for nothing new."""
        seconds = min(seconds, 2 * LOOK_SECONDS)
        self._message += seconds
        if self._bytes <= len(BEAT) + 1:  # then something comes that is no beat, whose rate counts
            self._answer += seconds
        before = self._silence
        self._silence = 0.0 if ready else before + seconds
        told = self._patience.told
        return self._silence if self._silence // told > before // told else 0.0

    def overdue(self) -> tuple[str, str] | None:
        """What was found and what is expected, where the wait is over."""
        patience = self._patience
        if self._silence >= patience.silence:
            return f"no word for {self._silence:,.0f} s", f"one within {patience.silence:,.0f} s"
        if self._bytes < patience.rate * (self._message - patience.silence):
            return f"{self._bytes:,} bytes in {self._message:,.0f} s", f"at least {patience.rate:,.0f} bytes a second"
        if self._answer >= self._within:
            return f"signs of life for {self._answer:,.0f} s, and no answer", f"one within {self._within:,.0f} s"
        return None


def spelled(seconds: float) -> str:
    """ "20 s", "10 min", "36 h": a limit, for a person."""
    for unit, name in ((3600, "h"), (60, "min")):
        if seconds >= unit and seconds % unit == 0:
            return f"{seconds / unit:,.0f} {name}"
    return f"{seconds:,.3g} s"


# --- How a command gets to a device: as a child process here, or through the system's own ssh -------------------------
# Nothing else is ever needed: files go over standard input and output, so that a board without sftp works too. ssh
# reads the user's configuration, keys, agent, jump hosts and known_hosts; no option of ours touches host-key checking.


CONNECT_SECONDS = 10
SSH_FAILED = 255
# A password would be waited for; an answer to a lost connection too, without the last two (45 s).
OPTIONS = (
    *("-T", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={CONNECT_SECONDS}"),
    *("-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=3"),
)


class ConnectionLost(DeviceError):
    """ssh could not connect, or its connection broke: trying again may help."""


class Unresponsive(ConnectionLost):
    """The connection stands, but the agent does not speak, or too slowly."""


def command(device: Device, arguments: Sequence[str]) -> list[str]:
    """The program here that runs `device.python ARGUMENTS` on the device."""
    if device.host is None:
        return [device.python, *arguments]
    # Every login shell takes words in single quotes; "~" is only a home folder outside of them.
    home, name = ('"$HOME"/', device.python[2:]) if device.python.startswith("~/") else ("", device.python)
    line = f"{home}{shlex.quote(name)} {shlex.join(arguments)}"
    return [*ssh(device), line]


def shell(device: Device) -> str:
    """What a person types to run its Python."""
    return shlex.join([*(("ssh", *_where(device)) if device.host is not None else ()), device.python])


def typed(device: Device, line: str, *, expand: bool = False) -> str:
    """What a person types to run a shell's line there, with a terminal, which sudo may ask for a password.

    `expand`: what the line has in `$(...)` is run here.
    """
    if device.host is None:
        return line
    quoted = f'"{line}"' if expand else shlex.quote(line)
    return f"{shlex.join(['ssh', '-t', *_where(device)])} {quoted}"


def ssh(device: Device) -> list[str]:
    """ssh and its options, up to and with the host."""
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
    """Why a command that ended with `status` never spoke, from what ssh or the device's shell wrote."""
    last = words.splitlines()[-1] if words else f"exit status {status}, and nothing was said"
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
            f"{where} has another host key than the one known: it was installed again, or somebody is in between",
            found=last,
            expected="the key in known_hosts",
            fix="ask whoever runs it; if the change is right: ssh-keygen -R HOST, then log in once by hand",
        )
    if "Host key verification failed" in words:
        return DeviceError(
            f"the host key of {where} is not known here",
            found=last,
            fix=f"log in once by hand, and look at it: {login}",
        )
    if "Permission denied" in words or "Too many authentication failures" in words:
        return DeviceError(
            f"{where} takes none of your keys",
            found=last,
            expected="a key that needs no password to be typed",
            fix="ssh-copy-id, or ssh-add",
        )
    if "Could not resolve hostname" in words or "Bad configuration option" in words or "terminating," in words:
        return DeviceError(f"{where} cannot be reached", found=last, fix=f"check: {login}")
    return ConnectionLost(f"{where} cannot be reached", found=last, fix=f"is it on? check: {login}")
