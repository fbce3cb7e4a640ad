"""The agent's client: installs and queries it, sends jobs, follows them through lost connections, fetches results."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from vitdeploy.devices.agent.documents import MAX_RESULT_BYTES, Job, Probe, Result, Status, flat
from vitdeploy.devices.agent.stream import BrokenOff, StreamError, message, read_file
from vitdeploy.devices.call import Call, printable
from vitdeploy.devices.package import agent_package
from vitdeploy.devices.registry import Device
from vitdeploy.devices.results import check_probe, check_result, check_status, parse, refuse
from vitdeploy.devices.transport import SSH_FAILED, ConnectionLost, command, why
from vitdeploy.errors import DeviceError, UnsafeError
from vitdeploy.spec import encode

LEAST_PYTHON = (3, 10)
MAX_ANSWER_BYTES = 1 << 20
# Of one file that a device sends.
MAX_FILE_BYTES = 16 << 30
ANSWER_SECONDS = 60.0
# The waits between two attempts, and how long a device may be out of reach before the job is left alone there.
FIRST_RETRY, LAST_RETRY = 1.0, 30.0
PATIENCE_SECONDS = 600.0
LOST = "{}: connection lost; trying again"

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

Tell = Callable[[str, int, int], None]
T = TypeVar("T")


class Interrupted(Exception):
    """The user cancelled it."""


class Client:
    """One device. `cancelled`, once set, ends every wait with Interrupted; the job is `stop`ped by whoever set it."""

    def __init__(self, device: Device, cancelled: threading.Event | None = None) -> None:
        self.device = device
        self.cancelled = cancelled or threading.Event()
        self.job: str | None = None

    def ask(self, kind: type[T], *arguments: str, send: Iterable[bytes] = (), timeout: float = ANSWER_SECONDS) -> T:
        """The answer of one command of the agent (agent/main.py).

        Raises:
            DeviceError: the device or its Python cannot be reached; ConnectionLost where trying again may help.
            DeviceResultError: the answer is none.
            VitdeployError: the error that it reports.
        """
        with self.started(*arguments, timeout=timeout) as call:
            call.send(self.unless_cancelled(send))
            return parse(self.device.name, self.line(call, MAX_ANSWER_BYTES), kind)

    def unless_cancelled(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        for block in blocks:
            if self.cancelled.is_set():
                raise Interrupted
            yield block

    @contextlib.contextmanager
    def started(self, *arguments: str, timeout: float | None = ANSWER_SECONDS) -> Iterator[Call]:
        """A command of the agent, which has greeted; the agent is brought there first if it is not there."""
        digest = agent_package().digest
        for attempt in (1, 2):
            with self._call(LAUNCH, digest, *arguments, timeout=timeout) as call:
                word, _, version = self._greeting(call).partition(" ")
                if word == "ok":
                    yield call
                    return
            if word != "missing" or attempt == 2:
                raise refuse(self.device.name, "the agent does not greet", word)
            self._check_python(version)
            self._install(digest)

    def _call(self, code: str, *arguments: str, timeout: float | None) -> Call:
        try:
            return Call(command(self.device, ["-c", code, *arguments]), timeout)
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

    def line(self, call: Call, limit: int) -> bytes:
        """The next line of an answer.

        Raises:
            ConnectionLost: the connection ended instead.
            DeviceResultError: it is longer than `limit` bytes.
        """
        try:
            found = call.line(limit)
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

    def _check_python(self, version: str) -> None:
        numbers = tuple(int(part) for part in version.split(".") if part.isdecimal())
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
        with self._call(INSTALL, digest, timeout=ANSWER_SECONDS) as call:
            call.send([agent_package().data])
            with contextlib.suppress(BrokenPipeError):
                call.input.close()
            if call.greeting() != "ok":
                status, words = call.end()
                if status == SSH_FAILED and self.device.host is not None:
                    raise why(self.device, status, words)
                raise DeviceError(
                    f"{self.device.name}: the agent cannot be written to {AGENT}",
                    found=words.splitlines()[-1] if words else f"exit status {status}",
                    wanted=f"{len(agent_package().data):,} bytes in the home folder",
                    fix="free some space there",
                )

    def probe(self) -> Probe:
        return check_probe(self.ask(Probe, "probe", timeout=120))

    def run(self, job: Job, files: Mapping[str, Path], folder: Path, tell: Tell) -> Result:
        """Send the job, or find it there; wait until it is done; bring its result home, with its files in `folder`,
        which is new and empty. Then it is forgotten there.

        Args:
            files: where each of `job.files` lies here.

        Raises:
            DeviceError, DeviceResultError, VitdeployError: as `ask`, and what the job reports.
            Interrupted: `cancelled` was set.
        """
        name = self.device.name
        job = dataclasses.replace(job, device=f"{name}, {self.device.python}")
        status = self.ask_status("status", job.digest)
        if status.state in ("lost", "stopped"):  # of a command that nobody heard the end of
            status = self.ask_status("remove", job.digest)
        if status.state == "absent":
            tell(f"{name}: send", 0, 1)
            self.job = job.digest
            paths = [files[entry.path] for entry in job.files]
            status = self.patiently(lambda: self._send(job, paths), tell)
        else:
            tell(f"{name}: this very job is there already ({status.state}); its result is fetched", 0, 1)
        self.job = job.digest
        status = self._follow(job, tell)
        if status.state != "done":
            with contextlib.suppress(DeviceError):
                self.ask_status("remove", job.digest)
            self.job = None
            how = {"lost": "was lost", "stopped": "was stopped", "absent": "is not there any more"}[status.state]
            raise DeviceError(
                f"{name}: the job {how}",
                found=status.detail or f"the job is {status.state}",
                fix="run the command again",
            )
        keep = False
        try:
            return self.patiently(lambda: self._fetch(job, folder), tell)
        except (ConnectionLost, Interrupted):
            keep = True  # for the next command
            raise
        finally:
            if not keep:
                with contextlib.suppress(DeviceError, UnsafeError):
                    self.ask_status("remove", job.digest)
                self.job = None

    def _send(self, job: Job, paths: list[Path]) -> Status:
        size = sum(entry.bytes for entry in job.files)
        timeout = ANSWER_SECONDS + size / 100e3  # slower than any network that is worth it
        return check_status(self.ask(Status, "submit", send=message(encode(job), paths), timeout=timeout))

    def ask_status(self, verb: str, *arguments: str, timeout: float = ANSWER_SECONDS) -> Status:
        return check_status(self.ask(Status, verb, *arguments, timeout=timeout))

    def _follow(self, job: Job, tell: Tell) -> Status:
        """The status of a job that neither waits nor runs any more."""
        while True:
            status = self.patiently(lambda: self._watch(job, tell), tell)
            if status.state not in ("queued", "running"):
                return status

    def _watch(self, job: Job, tell: Tell) -> Status:
        """The last status that was heard over one connection, which may break before the job ends.

        One connection, since each new one takes the device a process, and time from what it measures.
        """
        name, status = self.device.name, None
        with self.started("watch", job.digest) as call:
            while status is None or status.state in ("queued", "running"):
                if self.cancelled.is_set():
                    raise Interrupted
                try:
                    status = check_status(parse(name, self.line(call, MAX_ANSWER_BYTES), Status))
                except ConnectionLost:
                    if status is None:
                        raise
                    tell(LOST.format(name), 0, 1)
                    return status
                call.extend(ANSWER_SECONDS)
                if status.state == "queued" and status.detail:
                    tell(f"{name}: waits for {status.detail}", 0, 1)
                elif status.progress is not None:
                    _, done, total = status.progress
                    tell(f"{name}: {job.kind}", max(0, min(done, total)), max(1, total))
        return status

    def patiently(self, attempt: Callable[[], T], tell: Tell) -> T:
        """The result of `attempt`, retried while the device is out of reach."""
        wait, since = FIRST_RETRY, time.monotonic()
        while True:
            if self.cancelled.is_set():
                raise Interrupted
            try:
                return attempt()
            except ConnectionLost as error:
                if time.monotonic() - since > PATIENCE_SECONDS:
                    if self.job is not None:
                        error.fix = "its job goes on there; the same command fetches the result later"
                    raise
                tell(LOST.format(self.device.name), 0, 1)
            self.cancelled.wait(wait)
            wait = min(2 * wait, LAST_RETRY)

    def _fetch(self, job: Job, folder: Path) -> Result:
        with (
            tempfile.TemporaryDirectory(dir=folder) as attempt,
            self.started("fetch", job.digest, timeout=None) as call,
        ):
            line = self.line(call, MAX_RESULT_BYTES)
            result = check_result(self.device.name, parse(self.device.name, line, Result), job)
            for entry in result.files:
                if not 0 <= entry.bytes <= MAX_FILE_BYTES:
                    raise refuse(self.device.name, "a file of an impossible size", entry.bytes)
                path = Path(attempt) / flat(entry.path)
                try:
                    read_file(call.output, entry, path)
                except BrokenOff as error:
                    raise self.ended(call, str(error)) from None
                except StreamError as error:
                    raise refuse(self.device.name, "a file that is not what its result says", error) from None
            for entry in result.files:
                (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
                (Path(attempt) / flat(entry.path)).rename(folder / entry.path)
        return result

    def stop(self) -> str:
        """End the job that was begun, if there is one; gives a line on what became of it."""
        digest, name = self.job, self.device.name
        if digest is None:
            return f"{name}: nothing was begun"
        try:
            self.ask_status("stop", digest)
            self.ask_status("remove", digest)
        except (DeviceError, UnsafeError):
            return f"{name}: cannot be reached, so its job goes on; the same command fetches the result later"
        return f"{name}: the job was stopped"
