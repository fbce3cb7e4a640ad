"""The jobs on a device and their states, which outlive connections; restarts of the device are detected.

    ~/.cache/vitdeploy-agent/<sha256>/agent.pyz      the agent itself
    ~/.cache/vitdeploy-agent/jobs/<digest>/          job.json, the files, status.json, log.txt, result/
    ~/.cache/vitdeploy-agent/queue/                  a ticket for each running or waiting job

The clock is not used: boards without a battery start in 1970, and their clock jumps.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vitdeploy.benchmark.machine import MACHINE, described, holder, take_lock
from vitdeploy.devices.agent.documents import DeviceJob, Status
from vitdeploy.limits import last_words
from vitdeploy.publish import alive
from vitdeploy.spec import decode

JOB_FILE, STATUS_FILE, LOG_FILE, RESULT_FOLDER, RESULT_FILE = (
    *("job.json", "status.json", "log.txt"),
    *("result", "result.json"),
)


def home() -> Path:
    return Path("~/.cache/vitdeploy-agent").expanduser()


def job_folder(digest: str) -> Path:
    return home() / "jobs" / digest


def read_job(file: Path) -> DeviceJob:
    return decode(DeviceJob, json.loads(file.read_text(encoding="utf-8")))


@dataclass(frozen=True)
class Process:
    """A process, identified by its number, boot and start time, since numbers are reused."""

    pid: int
    boot: str
    started: int

    @classmethod
    def current(cls) -> Process:
        return cls(os.getpid(), boot_id(), _started(os.getpid()))

    def alive(self) -> bool:
        if self.boot != boot_id():
            return False
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
        return _started(self.pid) == self.started

    def signal_group(self, number: int) -> None:
        """Signal the process and its children, which form a session."""
        if self.alive():
            os.killpg(self.pid, number)


def boot_id() -> str:
    """An id that changes with every boot; "" if the system does not report one."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def _started(pid: int) -> int:
    """Return the start time of a process in ticks since boot (proc(5), field 22 of stat); -1 if it has ended.

    It is read from the first thread: under QEMU, a process sees another time in its own /proc/<pid>/stat than other
    processes do.
    """
    try:
        file = Path(f"/proc/{pid}/task/{pid}/stat")
        fields = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return -1 if Path("/proc/self").exists() else 0
    return -1 if fields[0] in "ZX" else int(fields[19])


def write_status(folder: Path, status: Status, process: Process) -> None:
    """Replace the job's status. Not flushed to disk: after a power cut, the new boot's id shows the loss."""
    temporary = folder / f".{STATUS_FILE}.{os.getpid()}"
    temporary.write_text(json.dumps({**asdict(status), "process": asdict(process)}), encoding="utf-8")
    temporary.replace(folder / STATUS_FILE)


def read_status(folder: Path) -> Status:
    if (folder / RESULT_FOLDER).is_dir():
        return Status("done")
    written = _written(folder)
    if written is None:
        # Jobs that are still being received are elsewhere, so this one lost its process before it wrote a status.
        return Status("lost", "its process did not start") if folder.is_dir() else Status("absent")
    status, process = written
    if status.state == "stopped" or process.alive():
        return status
    if (folder / RESULT_FOLDER).is_dir():  # finished meanwhile
        return Status("done")
    if process.boot != boot_id():
        return Status("lost", "the device was restarted")
    return Status("lost", f"its process was killed, often because memory ran out{_job_words(folder)}")


def _written(folder: Path) -> tuple[Status, Process] | None:
    try:
        found: dict[str, Any] = json.loads((folder / STATUS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    progress = tuple(found["progress"]) if found["progress"] else None
    return Status(found["state"], found["detail"], progress), Process(**found["process"])


def _job_words(folder: Path) -> str:
    """Return the last lines of the job's log, for the `found` field of an error."""
    with contextlib.suppress(OSError), (folder / LOG_FILE).open("rb") as log:
        return "".join(f"\n{line}" for line in last_words(log))
    return ""


def end(folder: Path, number: int = signal.SIGTERM) -> bool:
    """Signal the job's process; return False if it does not run."""
    written = _written(folder)
    if written is None or not written[1].alive():
        return False
    written[1].signal_group(number)
    return True


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """Create a temporary folder for this process; also remove those of killed processes."""
    parent = home() / "scratch"
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for folder in parent.iterdir():
        if folder.name == str(os.getpid()) or not alive(int(folder.name)):
            shutil.rmtree(folder, ignore_errors=True)
    mine = parent / str(os.getpid())
    mine.mkdir()
    try:
        yield mine
    finally:
        shutil.rmtree(mine, ignore_errors=True)


# --- One running job per device: tickets keep the order of arrival, a machine-wide lock grants the right to measure ---
# The lock is shared by all measurements (`benchmark.machine_lock`), so a job also waits for other users' jobs and for
# measurements without an agent; tickets order one user's jobs. A ticket whose process is gone is void.


LOOK_SECONDS = 0.25


@contextlib.contextmanager
def turn(what: str, waits_for: Callable[[str], None]) -> Iterator[None]:
    """Wait until this process may use the device. `what`: this job's name for other waiting jobs; `waits_for`: called
    with the name of the job before."""
    ticket = _take(what)
    ours = False
    try:
        reported = ""
        while True:
            before = [other for path, other in tickets() if path < ticket]
            if before:
                more = f" ({len(before)} jobs before this one)" if len(before) > 1 else ""
                found = f"{before[0]['what']}{more}"
            else:
                ours = MACHINE.take()
                if ours:
                    break
                found = described(holder())
            if found != reported:
                reported = found
                waits_for(found)
            time.sleep(LOOK_SECONDS)
        yield
    finally:
        if ours:
            MACHINE.give_back()
        ticket.unlink(missing_ok=True)


def tickets() -> list[tuple[Path, dict[str, Any]]]:
    """Return the tickets of running processes in order of arrival, with their contents."""
    found = []
    for path in sorted((home() / "queue").glob("[0-9]*")):
        try:
            ticket = json.loads(path.read_text(encoding="utf-8"))
            living = Process(**ticket["process"]).alive()
        except (OSError, ValueError, KeyError, TypeError):
            living = False
        if living:
            found.append((path, ticket))
        else:
            path.unlink(missing_ok=True)
    return found


def _take(what: str) -> Path:
    queue = home() / "queue"
    queue.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = queue / f".{os.getpid()}"
    temporary.write_text(json.dumps({"what": what, "process": asdict(Process.current())}), encoding="utf-8")
    with (queue / ".lock").open("w") as lock:
        with contextlib.suppress(OSError):  # some file systems have no locks
            take_lock(lock.fileno())
        number = max((int(path.name) for path, _ in tickets()), default=0) + 1
        while not _claim(temporary, queue / f"{number:09d}"):
            number += 1
    temporary.unlink(missing_ok=True)
    return queue / f"{number:09d}"


def _claim(temporary: Path, ticket: Path) -> bool:
    """Claim a ticket and return whether it succeeded: exclusive even on file systems without locks."""
    try:
        os.link(temporary, ticket)
    except FileExistsError:
        return False
    except OSError:  # some file systems have no links
        temporary.replace(ticket)
    return True
