"""A device's agent, asked over one connection after the other: brought there, greeted, its errors and silences told."""

from __future__ import annotations

import contextlib
import select
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from vitdeploy.devices.agent.stream import BrokenOff, StreamError
from vitdeploy.devices.call import (
    PATIENCE,
    SSH_FAILED,
    Call,
    ConnectionLost,
    DevicePatience,
    Interrupted,
    Tell,
    Unresponsive,
    command,
    printable,
    why,
)
from vitdeploy.devices.registry import Device
from vitdeploy.devices.results import parse, refuse
from vitdeploy.devices.shipment import agent_package
from vitdeploy.errors import DeviceError
from vitdeploy.progress import silent

LEAST_PYTHON = (3, 10)
MAX_ANSWER_BYTES = 1 << 20
LOST = "{}: connection lost; trying again"
MUTE = "{}: its agent has stopped speaking; asking again"
LATER = "its job goes on there; the same command fetches the result later"

AGENT = "~/.cache/vitdeploy-agent/"
# Each is one line that every Python understands, so that an old one can report its version.
LAUNCH = (
    f'import os,sys;a=os.path.expanduser("{AGENT}"+sys.argv[1]+"/agent.pyz");del sys.argv[1];'
    "ok=sys.version_info>=(3,10) and os.path.isfile(a);"
    r'ok or sys.stdout.write("vitdeploy-agent missing %d.%d.%d\n"%tuple(sys.version_info[:3]));'
    'sys.path.insert(0,a);ok and __import__("vitdeploy.devices.agent.main",fromlist=["main"]).main(a)'
)
INSTALL = (
    f'import hashlib,os,sys;b=sys.stdin.buffer.read();d=os.path.expanduser("{AGENT}"+sys.argv[1]);'
    'hashlib.sha256(b).hexdigest()==sys.argv[1] or sys.exit("broken off");os.makedirs(d,exist_ok=True);'
    't=os.path.join(d,"%d"%os.getpid());f=open(t,"wb");f.write(b);f.close();os.replace(t,os.path.join(d,"agent.pyz"));'
    'print("vitdeploy-agent ok")'
)

T = TypeVar("T")


class AgentConnection:
    """The agent of one device. `cancelled`, once set, ends every wait with Interrupted. `tell` hears how far it is, and
    what is waited for."""

    def __init__(
        self,
        device: Device,
        cancelled: threading.Event | None = None,
        tell: Tell = silent,
        patience: DevicePatience | None = None,
    ) -> None:
        self.device, self.tell = device, tell
        self.cancelled = cancelled or threading.Event()
        self.patience = patience or PATIENCE
        self.job: str | None = None
        # When what was asked for was last seen to go on (time.monotonic).
        self.went_on = 0.0

    def ask(self, kind: type[T], *arguments: str, send: Iterable[bytes] = (), within: float | None = None) -> T:
        """The answer of one command of the agent (agent/main.py), `within` so many seconds after all was sent.

        Raises:
            DeviceError: the device or its Python cannot be reached; ConnectionLost where trying again may help.
            DeviceResultError: the answer is none.
            VitdeployError: the error that it reports.
        """
        with self.started(*arguments) as call:
            call.send(send)
            line = self.line(call, MAX_ANSWER_BYTES, within=within or self.patience.answer)
            return parse(self.device.name, line, kind)

    @contextlib.contextmanager
    def started(self, *arguments: str) -> Iterator[Call]:
        """A command of the agent, which has greeted; the agent is brought there first if it is not there."""
        digest = agent_package().digest
        for attempt in (1, 2):
            with self._call(LAUNCH, digest, *arguments) as call:
                word, _, version = self._greeting(call).partition(" ")
                if word == "ok":
                    yield call
                    return
            if word != "missing" or attempt == 2:
                raise refuse(self.device.name, "the agent does not greet", word)
            self._check_python(version)
            self._install(digest)

    def _call(self, code: str, *arguments: str) -> Call:
        if not hasattr(select, "poll"):
            raise DeviceError(
                "devices are reached from Linux and macOS only",
                found=sys.platform,
                wanted="pipes that can be waited for",
                fix="run vitdeploy in the Windows Subsystem for Linux",
            )
        argv = command(self.device, ["-c", code, *arguments])
        try:
            return Call(self.device.name, argv, self.patience, self.cancelled, self.tell)
        except OSError as error:
            raise DeviceError(
                f"{self.device.name} cannot be reached", found=str(error), fix="install OpenSSH's client"
            ) from None

    def _greeting(self, call: Call) -> str:
        try:
            greeting = call.greeting()
        except StreamError as error:
            raise refuse(self.device.name, "no agent answers", error) from None
        if not greeting:
            raise why(self.device, *call.end())
        return greeting

    def line(self, call: Call, limit: int, *, within: float, talk: bool = False) -> bytes:
        """The next line of an answer that is no beat, waited for `within` seconds. `talk`: one of many that say how
        things are.

        Raises:
            ConnectionLost: the connection ended instead.
            DeviceResultError: it is longer than `limit` bytes.
        """
        call.expect(within)
        try:
            found = call.line(limit, talk=talk)
        except BrokenOff as error:
            raise self.ended(call, str(error)) from None
        except StreamError as error:
            raise refuse(self.device.name, "an answer that is too long", error) from None
        if not found:
            raise self.ended(call, "no answer")
        return found

    def ended(self, call: Call, how: str) -> DeviceError:
        """The error for an incomplete answer."""
        status, words = call.end()
        last = words.splitlines()[-1] if words else how
        if status == 0 or (status > 0 and status != SSH_FAILED):
            return DeviceError(f"{self.device.name}: the agent ended without an answer", found=last)
        return ConnectionLost(f"the connection to {self.device.name} broke", found=last)

    def patiently(self, attempt: Callable[[], T]) -> T:
        """The result of `attempt`, retried while the device is out of reach, or its agent does not speak."""
        patience, name = self.patience, self.device.name
        wait, mute = patience.first_retry, 0
        lost: float | None = None  # since when
        while True:
            if self.cancelled.is_set():
                raise Interrupted
            try:
                return attempt()
            except ConnectionLost as error:
                if lost is None or self.went_on > lost:
                    wait, lost, mute = patience.first_retry, time.monotonic(), 0
                mute += isinstance(error, Unresponsive)
                if mute >= patience.mute or time.monotonic() - lost > patience.lost:
                    if self.job is not None:
                        error.fix = LATER
                    raise
                self.tell((MUTE if isinstance(error, Unresponsive) else LOST).format(name), 0, 1)
            self.cancelled.wait(wait)
            wait = min(2 * wait, patience.last_retry)

    def _check_python(self, version: str) -> None:
        numbers = tuple(int(part) for part in version[:20].split(".") if part.isdecimal())
        if numbers[:2] < LEAST_PYTHON:
            raise DeviceError(
                f"{self.device.name} has a Python that is too old",
                found=f"Python {printable(version[:20])} at {self.device.python}",
                wanted="Python 3.10 or newer",
                fix="install one there (uv python install 3.12, or the system's package), then: vitdeploy devices add "
                f"{self.device.name} {self.device.address} --python PATH; a Jetson's TensorRT is for the Python of its "
                "system alone, which is new enough from JetPack 6 on",
            )

    def _install(self, digest: str) -> None:
        with self._call(INSTALL, digest) as call:
            call.send([agent_package().data])
            call.end_input()
            try:
                greeting = call.greeting()
            except StreamError as error:
                raise refuse(self.device.name, "no agent answers", error) from None
            if greeting != "ok":
                status, words = call.end()
                if status == SSH_FAILED and self.device.host is not None:
                    raise why(self.device, status, words)
                raise DeviceError(
                    f"{self.device.name}: the agent cannot be written to {AGENT}",
                    found=words.splitlines()[-1] if words else f"exit status {status}",
                    wanted=f"{len(agent_package().data):,} bytes in the home folder",
                    fix="free some space there",
                )
