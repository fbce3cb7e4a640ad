"""The client of a device's agent: it installs the agent, sends jobs, follows them across lost connections, and fetches
their results."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import io
import select
import shutil
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import vitdeploy
from vitdeploy.devices.agent.documents import MAX_JOB_BYTES, MAX_RESULT_BYTES, DeviceJob, JobResult, Status, flat
from vitdeploy.devices.agent.probe import DeviceProbe
from vitdeploy.devices.agent.stream import BrokenOff, StreamError, message, read_file
from vitdeploy.devices.call import (
    PATIENCE,
    SSH_FAILED,
    Call,
    ConnectionLost,
    DevicePatience,
    Interrupted,
    Unresponsive,
    command,
    printable,
    spelled,
    why,
)
from vitdeploy.devices.registry import Device
from vitdeploy.devices.results import check_result, clean, parse, refuse
from vitdeploy.errors import DeviceError, StorageError, VitdeployError
from vitdeploy.progress import Progress, silent
from vitdeploy.spec import encode

# The states of unfinished jobs.
OPEN = ("queued", "running")
LEAST_PYTHON = (3, 10)
MAX_ANSWER_BYTES = 1 << 20
LOST = "{}: connection lost; reconnecting"
MUTE = "{}: no response from the agent; retrying"
LATER = "the job continues on the device; run the same command later to fetch the result"

AGENT = "~/.cache/vitdeploy-agent/"
# Each is one line that works in every Python, so that an old one can report its version.
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


class _NoRoom(StorageError):
    """A result cannot be written here, and stays on its device."""


class Client:
    """The client of one device's agent. `cancelled`: setting it ends every wait with Interrupted; the caller must then
    `stop` the job. `tell`: receives progress and the reasons for waiting."""

    def __init__(
        self,
        device: Device,
        cancelled: threading.Event | None = None,
        tell: Progress = silent,
        patience: DevicePatience | None = None,
    ) -> None:
        self.device, self.tell = device, tell
        self.cancelled = cancelled or threading.Event()
        self.patience = patience or PATIENCE
        self.job: str | None = None
        # The time of the last progress of the present request (time.monotonic).
        self.went_on = 0.0

    def ask(self, kind: type[T], *arguments: str, send: Iterable[bytes] = (), within: float | None = None) -> T:
        """Run one command of the agent (agent/main.py) and return its answer, `within` seconds after sending.

        Raises:
            DeviceError: the device or its Python cannot be reached; ConnectionLost if a retry may help.
            DeviceResultError: the answer is invalid.
            VitdeployError: the error that the agent reports.
        """
        with self.started(*arguments) as call:
            call.send(send)
            line = self.line(call, MAX_ANSWER_BYTES, within=within or self.patience.answer)
            return parse(self.device.name, line, kind)

    @contextlib.contextmanager
    def started(self, *arguments: str) -> Iterator[Call]:
        """Start a command of the agent and read its greeting; install the agent first if it is missing."""
        digest = agent_package().digest
        for attempt in (1, 2):
            with self._call(LAUNCH, digest, *arguments) as call:
                word, _, version = self._greeting(call).partition(" ")
                if word == "ok":
                    yield call
                    return
            if word != "missing" or attempt == 2:
                raise refuse(self.device.name, "invalid greeting from the agent", word)
            self._check_python(version)
            self._install(digest)

    def _call(self, code: str, *arguments: str) -> Call:
        if not hasattr(select, "poll"):
            raise DeviceError(
                "commands on devices work from Linux and macOS only",
                found=sys.platform,
                expected="Linux or macOS",
                fix="run vitdeploy in the Windows Subsystem for Linux",
            )
        argv = command(self.device, ["-c", code, *arguments])
        try:
            return Call(self.device.name, argv, self.patience, self.cancelled, self.tell)
        except OSError as error:
            raise DeviceError(
                f"{self.device.name} cannot be reached", found=str(error), fix="install the OpenSSH client"
            ) from None

    def _greeting(self, call: Call) -> str:
        try:
            greeting = call.greeting()
        except StreamError as error:
            raise refuse(self.device.name, "no greeting from the agent", error) from None
        if not greeting:
            raise why(self.device, *call.end())
        return greeting

    def line(self, call: Call, limit: int, *, within: float, talk: bool = False) -> bytes:
        """Return the next line of an answer, except beats, `within` seconds. `talk`: the line is one of many status
        lines.

        Raises:
            ConnectionLost: the connection ended.
            DeviceResultError: the line is longer than `limit` bytes.
        """
        call.expect(within)
        try:
            found = call.line(limit, talk=talk)
        except BrokenOff as error:
            raise self.ended(call, str(error)) from None
        except StreamError as error:
            raise refuse(self.device.name, "the answer is too long", error) from None
        if not found:
            raise self.ended(call, "no answer")
        return found

    def ended(self, call: Call, how: str) -> DeviceError:
        """Return the error for an incomplete answer."""
        status, words = call.end()
        last = words.splitlines()[-1] if words else how
        if status == 0 or (status > 0 and status != SSH_FAILED):
            return DeviceError(f"{self.device.name}: the agent ended without an answer", found=last)
        return ConnectionLost(f"the connection to {self.device.name} broke", found=last)

    def patiently(self, attempt: Callable[[], T]) -> T:
        """Return the result of `attempt`, retried while the device is unreachable or its agent does not respond."""
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
                f"the Python of {self.device.name} is too old",
                found=f"Python {printable(version[:20])} at {self.device.python}",
                expected="Python 3.10 or newer",
                fix="install one there (uv python install 3.12, or the system's package), then: vitdeploy devices add "
                f"{self.device.name} {self.device.address} --python PATH; a Jetson's TensorRT works only with the "
                "system's Python, which is new enough from JetPack 6",
            )

    def _install(self, digest: str) -> None:
        with self._call(INSTALL, digest) as call:
            call.send([agent_package().data])
            call.end_input()
            try:
                greeting = call.greeting()
            except StreamError as error:
                raise refuse(self.device.name, "no greeting from the agent", error) from None
            if greeting != "ok":
                status, words = call.end()
                if status == SSH_FAILED and self.device.host is not None:
                    raise why(self.device, status, words)
                raise DeviceError(
                    f"{self.device.name}: the agent cannot be written to {AGENT}",
                    found=words.splitlines()[-1] if words else f"exit status {status}",
                    expected=f"{len(agent_package().data):,} bytes in the home folder",
                    fix="free disk space on the device",
                )

    # --- jobs ---------------------------------------------------------------------------------------------------------

    def probe(self) -> DeviceProbe:
        return clean(self.ask(DeviceProbe, "probe", within=self.patience.probe))

    def ask_status(self, verb: str, *arguments: str) -> Status:
        return clean(self.ask(Status, verb, *arguments))

    def run(self, job: DeviceJob, files: Mapping[str, Path], folder: Path) -> JobResult:
        """Send the job, or find it on the device; wait for it; fetch its result, with its files in the new, empty
        `folder`; then delete it on the device.

        Args:
            files: the local paths of `job.files`.

        Raises:
            DeviceError, DeviceResultError, VitdeployError: as `ask`, and errors that the job reports.
            StorageError: not enough space here; the result stays on the device.
            Interrupted: `cancelled` was set.
        """
        name = self.device.name
        job = dataclasses.replace(job, device=f"{name}, {self.device.python}")
        status = self.ask_status("status", job.digest)
        if status.state in ("lost", "stopped"):  # left by an earlier command
            status = self.ask_status("remove", job.digest)
        if status.state == "absent":
            self.job = job.digest
            paths = [files[entry.path] for entry in job.files]
            status = self.patiently(lambda: self._send(job, paths))
        else:
            self.tell(f"{name}: the same job is already there ({status.state}); fetching its result", 0, 1)
        self.job = job.digest
        begun: dict[str, float] = {}
        status = self.patiently(lambda: self._watch(job, begun))
        if status.state != "done":
            self._forget(job)
            how = {"lost": "was lost", "stopped": "was stopped", "absent": "no longer exists"}[status.state]
            raise DeviceError(
                f"{name}: the job {how}",
                found=status.detail or f"the job is {status.state}",
                fix="run the command again",
            )
        keep = False
        try:
            return self.patiently(lambda: self._fetch(job, folder))
        except (ConnectionLost, _NoRoom, Interrupted):
            keep = True  # for the next command
            raise
        finally:
            if not keep:
                self._forget(job)

    def _send(self, job: DeviceJob, paths: list[Path]) -> Status:
        size = sum(entry.bytes for entry in job.files)
        sent = self._counted(message(encode(job), paths), size)
        return clean(self.ask(Status, "submit", send=sent))

    def _counted(self, blocks: Iterable[bytes], size: int) -> Iterator[bytes]:
        done, text = 0, f"{self.device.name}: send"
        for block in blocks:
            self.tell(text, min(done, size), max(1, size))
            yield block
            done += len(block)
        self.tell(text, 1, 1)

    def _watch(self, job: DeviceJob, begun: dict[str, float]) -> Status:
        """Wait until the job neither waits nor runs, over one connection (which may break); return its status.

        Each new connection would cost the device a process, and disturb measurements. `begun`: when each state was
        first reported, over any connection.
        """
        name, last = self.device.name, None
        with self.started("watch", job.digest) as call:
            while True:
                line = self.line(call, MAX_ANSWER_BYTES, within=self.patience.answer, talk=True)
                status = clean(parse(name, line, Status))
                if status.state not in OPEN:
                    return status
                now = time.monotonic()
                if last is not None or status.state not in begun:
                    self.went_on = now
                last = status
                self._require_patience(job, status, now - begun.setdefault(status.state, now))
                if status.state == "queued" and status.detail:
                    most = spelled(self.patience.queue)
                    self.tell(f"{name}: waiting for {status.detail} (at most {most})", 0, 1)
                elif status.progress is not None:
                    _, done, total = status.progress
                    self.tell(f"{name}: {job.kind}", min(done, total), max(1, total))

    def _require_patience(self, job: DeviceJob, status: Status, seconds: float) -> None:
        """Raise DeviceError if a job has been in its state for longer than the limit. It stays on the device."""
        queued = status.state == "queued"
        most = self.patience.queue if queued else self.patience.work
        if seconds > most:
            raise DeviceError(
                f"{self.device.name}: the {job.kind} has {'waited' if queued else 'run'} for {spelled(most)}",
                found=f"it is waiting for {status.detail or 'its turn'}" if queued else "it is still running",
                expected="its turn" if queued else "its result",
                fix=f"{LATER}, or run it and press Ctrl-C to stop the job",
            )

    def _fetch(self, job: DeviceJob, folder: Path) -> JobResult:
        name, limit = self.device.name, MAX_JOB_BYTES if job.kind == "compile" else MAX_RESULT_BYTES
        try:
            with tempfile.TemporaryDirectory(dir=folder) as attempt, self.started("fetch", job.digest) as call:
                line = self.line(call, limit, within=self.patience.answer)
                result = check_result(name, parse(name, line, JobResult), job)
                self._require_room(result, folder)
                for index, entry in enumerate(result.files):
                    self.tell(f"{name}: fetch {entry.path}", index, len(result.files))
                    call.begin()
                    try:
                        read_file(call.output, entry, Path(attempt) / flat(entry.path))
                    except BrokenOff as error:
                        raise self.ended(call, str(error)) from None
                    except StreamError as error:
                        raise refuse(name, "a file does not match the result", error) from None
                for entry in result.files:
                    (folder / entry.path).parent.mkdir(parents=True, exist_ok=True)
                    (Path(attempt) / flat(entry.path)).rename(folder / entry.path)
        except OSError as error:
            raise self._no_room(folder, error.strerror or str(error), "a writable folder") from None
        return result

    def _require_room(self, result: JobResult, folder: Path) -> None:
        needed, free = sum(entry.bytes for entry in result.files), shutil.disk_usage(folder).free
        if free < needed:
            raise self._no_room(folder, f"{free:,} bytes free", f"{needed:,} bytes")

    def _no_room(self, folder: Path, found: str, expected: str) -> _NoRoom:
        return _NoRoom(
            f"the result of {self.device.name} cannot be written to {folder.parent}",
            found=found,
            expected=expected,
            fix="free disk space, or set TMPDIR to a folder with more; then run the same command to fetch the result",
        )

    def _forget(self, job: DeviceJob) -> None:
        """Remove a finished job; if that fails, the device removes it later as one of the oldest."""
        with contextlib.suppress(VitdeployError):
            self._hurried().ask_status("remove", job.digest)
        self.job = None

    def stop(self) -> str:
        """Stop the started job, if any; return a line on the outcome."""
        digest, name = self.job, self.device.name
        if digest is None:
            return f"{name}: no job was started"
        self.tell(f"{name}: stopping the job", 0, 1)
        hurried = self._hurried()
        try:
            hurried.ask_status("stop", digest)
            hurried.ask_status("remove", digest)
        except VitdeployError as error:
            why = "the device cannot be reached" if isinstance(error, ConnectionLost) else error.message
            return f"{name}: the job was not stopped ({why}); {LATER}"
        return f"{name}: the job was stopped"

    def _hurried(self) -> Client:
        """Return a client with short time limits for final messages, which cannot be cancelled."""
        seconds = self.patience.stop
        hurry = dataclasses.replace(self.patience, greeting=seconds, silence=seconds, answer=seconds)
        return Client(self.device, tell=self.tell, patience=hurry)


# --- The agent as one file: the device zone in a reproducible zipapp --------------------------------------------------
# Beyond the standard library, its modules import only numpy, Pillow and one runtime, and only where needed.
# tests/devices/test_package.py imports all of them in an environment with only these packages.


# Folders include all their contents.
ZONE = (
    *("__init__.py", "backends.py", "errors.py", "extensions.py", "limits.py", "paths.py", "zip_members.py"),
    *("progress.py", "publish.py", "spec", "runtime", "compilation", "benchmark"),
    *(f"bundle/{name}.py" for name in ("__init__", "checked", "layout", "read", "sign")),
    *("devices/__init__.py", "devices/agent"),
)
MAIN = "import sys\nfrom vitdeploy.devices.agent.main import main\n\nmain(sys.argv[0])\n"
EPOCH = (1980, 1, 1, 0, 0, 0)


@dataclass(frozen=True)
class Package:
    """The packed agent. `data`: agent.pyz; `digest`: its SHA-256."""

    data: bytes
    digest: str


@functools.cache
def agent_package() -> Package:
    """Pack the agent. Files are stored, not deflated, because zlib's output depends on its version."""
    home = Path(vitdeploy.__file__).parent
    files = sorted(file for name in ZONE for file in _files(home / name))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in [
            ("__main__.py", MAIN.encode()),
            *((f"vitdeploy/{file.relative_to(home).as_posix()}", file.read_bytes()) for file in files),
        ]:
            entry = zipfile.ZipInfo(name, EPOCH)
            entry.create_system = 3
            entry.external_attr = 0o100644 << 16
            archive.writestr(entry, data)
    return Package(buffer.getvalue(), hashlib.sha256(buffer.getvalue()).hexdigest())


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else list(path.rglob("*.py"))
