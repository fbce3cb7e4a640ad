"""The agent's commands. Each prints the line "vitdeploy-agent ok" and then its answer, which may be an error. While it
works, it first sends beats (stream.py).

probe                  describe this device
status DIGEST          return the status of a job
submit                 receive a job and its files over standard input, and start it
watch DIGEST           return the status of a job, and every change, until it neither waits nor runs
fetch DIGEST           return the result and files of a job
stop DIGEST            stop a job
remove DIGEST          delete a job
deployed               list the deployments here
missing NAME           of a release's files, listed on standard input, return those that no release of NAME has
serve                  run one engine over this connection
run DIGEST             (started by submit) perform a job
"""

import contextlib
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from vitdeploy.devices.agent.documents import (
    FORMAT,
    MAX_JOB_BYTES,
    DeviceJob,
    JobResult,
    State,
    Status,
    explained,
    failure,
    flat,
)
from vitdeploy.devices.agent.probe import probe, read_memory
from vitdeploy.devices.agent.state import (
    JOB_FILE,
    LOG_FILE,
    RESULT_FILE,
    RESULT_FOLDER,
    STATUS_FILE,
    Process,
    end,
    home,
    job_folder,
    read_job,
    read_status,
    scratch,
    turn,
    write_status,
)
from vitdeploy.devices.agent.stream import (
    BEAT_SECONDS,
    Beats,
    StreamError,
    blocks_of,
    message,
    read_file,
    read_json,
    read_line,
)
from vitdeploy.errors import HostError, StorageError, VitdeployError
from vitdeploy.progress import Progress
from vitdeploy.spec import FileEntry, decode, encode

READY = "vitdeploy-agent ok"
DIGEST = re.compile(r"[0-9a-f]{64}")
PATH = re.compile(r"(?!\.)[A-Za-z0-9._-]+(/(?!\.)[A-Za-z0-9._-]+)*")
# The number of finished jobs that a device keeps.
KEPT_JOBS = 8
# Spare disk space, in addition to the files and the copies that compilers make.
SPARE_BYTES = 16 << 20
LOOK_SECONDS = 0.2
TELL_SECONDS = 0.5
PRODUCTS = "engines"
STOP_SECONDS = 5.0


def main(agent: str) -> None:
    """Run the command in the arguments; `agent`: the path of agent.pyz."""
    sys.path[:] = [path for path in sys.path if path]  # do not import from the login folder
    # For measuring and building processes, also if another vitdeploy is installed.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [agent, os.environ.get("PYTHONPATH")]))
    command, *arguments = sys.argv[1:]
    if command == "run":
        _run(_folder(arguments[0]))
        return
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of runtimes must not mix with answers
    answers.write(f"{READY}\n".encode())
    answers.flush()
    try:
        with explained():
            with Beats(answers.fileno(), ends=command == "serve") as beats:
                blocks = _answer(command, arguments, agent, answers, beats)
            for block in blocks:
                answers.write(block)
                answers.flush()
    except VitdeployError as error:
        with contextlib.suppress(BrokenPipeError):
            answers.write(b"".join(message({"failure": encode(failure("", error))})))
            answers.flush()
    except BrokenPipeError:
        pass  # the client is gone


def _answer(command: str, arguments: list[str], agent: str, answers: BinaryIO, beats: Beats) -> Iterable[bytes]:
    """Return the blocks to write after the beats."""
    if command == "probe":
        return message(encode(probe()))
    if command in ("deployed", "missing"):
        from vitdeploy.devices.agent.releases import DeploymentFolder, deployments

        if command == "deployed":
            return message(encode(deployments()))
        listed = read_json(read_line(sys.stdin.buffer, MAX_JOB_BYTES))
        return message(DeploymentFolder(arguments[0]).missing(decode(list[FileEntry], listed)))
    if command in ("submit", "serve"):
        _require_64_bits()
    if command == "submit":
        return message(asdict(_submit(agent)))
    if command == "serve":
        from vitdeploy.devices.agent.serve import serve

        signal.signal(signal.SIGTERM, _stopped)  # the host is gone (stream.py): delete the session's files
        serve(sys.stdin.buffer, answers, beats)
        return ()
    folder = _folder(arguments[0])
    if command == "fetch":
        return _fetch(folder)
    if command == "watch":
        return _watch(folder)
    simple: dict[str, Callable[[], Status]] = {
        "status": lambda: read_status(folder),
        "stop": lambda: _stop(folder),
        "remove": lambda: _remove(folder),
    }
    return message(asdict(simple[command]()))


def _require_64_bits() -> None:
    """Refuse a 32-bit Python explicitly: on a 64-bit kernel its machine is "aarch64", but no wheel works.

    Raises:
        HostError: the Python has 32 bits.
    """
    if sys.maxsize < 2**32:
        raise HostError(
            "vitdeploy does not support 32-bit Python",
            found=f"{sys.executable}, Python {platform.python_version()}, 32 bits on a kernel for {platform.machine()}",
            expected="a 64-bit system: no runtime has 32-bit wheels on PyPI or piwheels",
            fix="install a 64-bit system, such as Raspberry Pi OS (64-bit)",
        )


def _folder(digest: str) -> Path:
    if not DIGEST.fullmatch(digest):
        raise VitdeployError(f"{digest!r} is not a job")
    return job_folder(digest)


def _submit(agent: str) -> Status:
    """Receive a complete job, and start it in its own session, which outlives the connection."""
    line = read_line(sys.stdin.buffer, MAX_JOB_BYTES)
    job = decode(DeviceJob, read_json(line))
    folder = job_folder(job.digest)
    if read_status(folder).state != "absent":
        return read_status(folder)
    _require_memory(job)
    _forget_old(folder.parent)
    try:
        with scratch() as incoming:
            _make_room(job)
            _receive(job, line, incoming)
            folder.parent.mkdir(exist_ok=True, mode=0o700)
            incoming.rename(folder)
    except OSError as error:
        if folder.is_dir():  # the same job arrived over another connection
            return read_status(folder)
        why = error.strerror or str(error)
        raise StorageError(f"{home()} cannot be written", found=why, fix="free disk space on the device") from None
    except StreamError as error:
        raise VitdeployError(f"the job arrived incomplete: {error}") from None
    with (folder / LOG_FILE).open("wb") as log:
        subprocess.Popen(
            [sys.executable, agent, "run", job.digest],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=folder,
            start_new_session=True,
        )
    deadline = time.monotonic() + STOP_SECONDS
    while not (folder / STATUS_FILE).exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    return read_status(folder)


def _make_room(job: DeviceJob) -> None:
    needed, free = 2 * sum(entry.bytes for entry in job.files) + SPARE_BYTES, shutil.disk_usage(home()).free
    if free < needed:
        raise StorageError(
            f"not enough disk space for the job in {home()}",
            found=f"{free:,} bytes free",
            expected=f"{needed:,} bytes",
            fix="free disk space on the device",
        )


def _require_memory(job: DeviceJob) -> None:
    """Refuse a job if one model's weights alone exceed the free memory and swap: the kernel would kill it.

    Raises:
        HostError: there is not enough memory.
    """
    memory = read_memory()
    if "MemAvailable" not in memory:
        return
    free = memory["MemAvailable"] + memory.get("SwapFree", 0)
    for placed in job.artifacts:
        graphs = tuple(graph.file for graph in placed.graphs)
        needed = sum(entry.bytes for entry in job.files if entry.path.startswith(graphs))
        if needed > free:
            raise HostError(
                f"not enough memory for {placed.name}",
                found=f"{free:,} bytes of memory and swap free",
                expected=f"{needed:,} bytes for its weights; a compiler needs several times that",
                fix="stop other processes there, or add swap: vitdeploy devices doctor shows how",
            )


def _receive(job: DeviceJob, line: bytes, folder: Path) -> None:
    (folder / JOB_FILE).write_bytes(line)
    for entry in job.files:
        if not PATH.fullmatch(entry.path) or entry.path == JOB_FILE:
            raise StreamError(f"{entry.path!r} is not a valid path in a job")
        path = folder / entry.path
        path.parent.mkdir(parents=True, exist_ok=True)
        read_file(sys.stdin.buffer, entry, path)


def _forget_old(jobs: Path) -> None:
    """Remove all except the newest finished jobs. By number, not age: a clock that jumps would make all of them old."""
    if not jobs.is_dir():
        return
    ended = [folder for folder in jobs.iterdir() if read_status(folder).state in ("done", "lost", "stopped")]
    newest = sorted(ended, key=lambda folder: folder.stat().st_mtime_ns, reverse=True)
    for folder in newest[KEPT_JOBS:]:
        shutil.rmtree(folder, ignore_errors=True)


def _stopped(number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + number)


def _watch(folder: Path) -> Iterator[bytes]:
    """Yield the status whenever its state or detail changes, and its progress at each beat, which costs the device
    almost no time.

    Writing to a closed connection ends this process.
    """
    sent, when = None, 0.0
    while True:
        status = read_status(folder)
        now, ended = time.monotonic(), status.state not in ("queued", "running")
        if (status.state, status.detail) != sent or now - when >= BEAT_SECONDS:
            yield from message(asdict(status))
            sent, when = (status.state, status.detail), now
        if ended:
            return
        time.sleep(LOOK_SECONDS)


def _stop(folder: Path) -> Status:
    """Stop the job's process and its children, by SIGKILL if necessary."""
    if end(folder):
        deadline = time.monotonic() + STOP_SECONDS
        while time.monotonic() < deadline and read_status(folder).state in ("queued", "running"):
            time.sleep(LOOK_SECONDS)
        end(folder, signal.SIGKILL)
    return read_status(folder)


def _remove(folder: Path) -> Status:
    if read_status(folder).state not in ("queued", "running"):
        shutil.rmtree(folder, ignore_errors=True)
    return read_status(folder)


def _fetch(folder: Path) -> Iterator[bytes]:
    """Yield the stored result and the files that it lists."""
    result = folder / RESULT_FOLDER
    try:
        line = (result / RESULT_FILE).read_bytes()
    except OSError:
        raise VitdeployError("the result of the job no longer exists", fix="run the command again") from None
    entries = [decode(FileEntry, each) for each in json.loads(line)["files"]]
    yield line + b"\n"
    for entry in entries:
        yield from blocks_of(result / flat(entry.path))


# --- Run a job in its own process, independent of connections ---------------------------------------------------------
# Heavy imports come late, so that missing packages can be reported to the host.


def _run(folder: Path) -> None:
    """Wait for the device, perform the job in `folder`, and store its result or failure there."""
    signal.signal(signal.SIGTERM, _stopped)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    me = Process.current()

    def tell(state: State, detail: str = "", progress: tuple[str, int, int] | None = None) -> None:
        write_status(folder, Status(state, detail, progress), me)

    tell("queued")
    job = read_job(folder / JOB_FILE)
    try:
        with turn(f"{job.kind} of {job.sender}", lambda other: tell("queued", other)):
            tell("running")
            result = _result(job, folder, _seldom(lambda *progress: tell("running", "", progress)))
            _publish(result, folder)
    except SystemExit:
        tell("stopped")
        raise


def _publish(result: JobResult, folder: Path) -> None:
    """Publish the result's folder atomically, with all files that it lists."""
    out = folder / f".{RESULT_FOLDER}"
    out.mkdir()
    for entry in result.files:
        (folder / PRODUCTS / entry.path).rename(out / flat(entry.path))
    with (out / RESULT_FILE).open("w", encoding="utf-8") as file:
        json.dump(encode(result), file, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    out.rename(folder / RESULT_FOLDER)


def _seldom(tell: Progress) -> Progress:
    """Limit the rate of progress reports, so that they do not disturb measurements."""
    last = -TELL_SECONDS

    def progress(text: str, done: int, total: int) -> None:
        nonlocal last
        if time.monotonic() - last >= TELL_SECONDS:
            last = time.monotonic()
            tell(text, done, total)

    return progress


def _result(job: DeviceJob, folder: Path, progress: Progress) -> JobResult:
    try:
        with explained():
            from vitdeploy.devices.agent.tasks import perform

            return perform(job, folder, folder / PRODUCTS, progress)
    except VitdeployError as error:
        return JobResult(FORMAT, job.digest, {}, failure=failure("", error))
