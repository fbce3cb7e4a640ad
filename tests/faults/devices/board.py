"""A device for the gate: its own home folder, behind a program that takes the place of ssh, with a hostile Python."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.gate import Outcome
from tests.forked import start

ROOT = Path(__file__).parents[3]
HOSTILE = Path(__file__).with_name("hostile.py")
# Run in a forked process: the command line, as impatient as a case wants it.
COMMAND = """
import os, pathlib, resource, signal, sys, tempfile
os.setsid()
signal.signal(signal.SIGINT, signal.default_int_handler)
os.chdir(home)
os.environ.update(environment)
tempfile.tempdir = None
os.dup2(os.open(os.devnull, os.O_RDWR), 0)
os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 1)
os.dup2(1, 2)
sys.stdout, sys.stderr = open(1, "w", buffering=1, closefd=False), open(2, "w", buffering=1, closefd=False)
from tests.command_line import undisturbed
from vitdeploy.cli.main import main
from vitdeploy.devices import client
from vitdeploy.devices.call import DevicePatience
client.PATIENCE = DevicePatience(**patience)
if largest:
    from vitdeploy.devices.client import Client
    fetch = Client._fetch
    def fetch_on_a_full_disk(self, *arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
        return fetch(self, *arguments)
    Client._fetch = fetch_on_a_full_disk
sys.argv = ["vitdeploy", *words]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    with undisturbed(pathlib.Path(home)):
        main()
finally:
    after = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    pathlib.Path(log + ".memory").write_text(str((after - before) / 1024))
"""
SSH = """#!/bin/sh
for last; do :; done
unset PYTHONPATH
HOME={home} TMPDIR={home}/tmp exec sh -c "$last"
"""
# A device is waited for in seconds here. The real agent takes longer than a stand-in.
IMPATIENT = {
    **{"greeting": 3.0, "silence": 2.0, "told": 1.0, "answer": 3.0, "probe": 3.0, "queue": 2.0, "work": 3.0},
    **{"stop": 2.0, "end": 1.0, "lost": 4.0, "mute": 2, "first_retry": 0.1, "last_retry": 0.5},
}
REAL = {"first_retry": 0.1, "end": 2.0}
MOST_GROWTH = 1024.0  # MB


@dataclass(frozen=True)
class Done:
    """A command that has ended, or, with `status` None, had to be ended."""

    status: int | None
    text: str
    seconds: float
    peak_mb: float


@dataclass
class Board:
    """One device of one case: `folder` is new. `case`: see hostile.py."""

    folder: Path
    case: dict[str, Any]
    patience: dict[str, float] = field(default_factory=lambda: dict(IMPATIENT))

    def __post_init__(self) -> None:
        for name in ("bin", "home/tmp", "config/vitdeploy", "tmp"):
            (self.folder / name).mkdir(parents=True)
        self._program("bin/ssh", SSH.format(home=self.folder / "home"))
        python = f'#!/bin/sh\nexec {sys.executable} -IS {HOSTILE} {self.folder} "$@"\n'
        device = {"name": "board", "host": "board", "user": None, "port": None, "labels": [], "ssh_config": None}
        device["python"] = self._program("python", python)
        registry = {"format": 1, "devices": [device]}
        (self.folder / "config/vitdeploy/devices.json").write_text(json.dumps(registry))
        self.behave(self.case)

    def behave(self, case: dict[str, Any]) -> None:
        """What it does from now on."""
        (self.folder / "calls").unlink(missing_ok=True)
        (self.folder / "case.json").write_text(json.dumps({"python": sys.executable, **case}))

    def _program(self, name: str, text: str) -> str:
        path = self.folder / name
        path.write_text(text)
        path.chmod(0o755)
        return str(path)

    @property
    def jobs(self) -> list[Path]:
        return sorted((self.folder / "home/.cache/vitdeploy-agent/jobs").glob("*"))

    def command(
        self, *words: object, limit: float, largest: int = 0, meanwhile: Callable[[int, Path], None] | None = None
    ) -> Done:
        """`vitdeploy WORDS` in `folder`; `meanwhile` is called with its process and its log. `largest`: bytes of a file
        that it may write once it fetches results."""
        log = self.folder / "log"
        environment = {
            "PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(self.folder / "config"),
            "XDG_CACHE_HOME": str(self.folder / "cache"),
            "TMPDIR": str(self.folder / "tmp"),
            "VITDEPLOY_STORE": str(self.folder / "store"),
        }
        log.write_text("")
        (self.folder / "log.memory").unlink(missing_ok=True)
        began = time.monotonic()
        names = {"home": str(self.folder), "log": str(log), "patience": self.patience, "largest": largest}
        process = start(exec, COMMAND, {**names, "environment": environment, "words": [str(word) for word in words]})
        assert process.pid is not None
        if meanwhile is not None:
            meanwhile(process.pid, log)
        process.join(limit)
        status = process.exitcode
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.join()
        memory = self.folder / "log.memory"
        grown = float(memory.read_text()) if memory.exists() else 0.0
        return Done(status, log.read_text(errors="replace"), time.monotonic() - began, grown)

    def left(self) -> list[int]:
        """Processes of this device that still run, once they had time to end."""
        for _ in range(100):
            if not (found := [pid for pid, words in processes() if str(self.folder) in words]):
                return []
            time.sleep(0.1)
        return found

    def end(self) -> None:
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def processes() -> list[tuple[int, str]]:
    """The processes of this machine, with their command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append((int(path.parent.name), path.read_bytes().decode(errors="replace")))
    return found


def wait_for(pattern: str, seconds: float = 60.0) -> Callable[[int, Path], bool]:
    """What waits until a command has written this; whether it has."""

    def wait(process: int, log: Path) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and Path(f"/proc/{process}").exists():
            if re.search(pattern, log.read_text(errors="replace")):
                return True
            time.sleep(0.02)
        return False

    return wait


def judged(done: Done, statuses: Sequence[int], expected: str = "") -> tuple[Outcome, str]:
    """The outcome of a command, which may end with one of `statuses` and must write the pattern `expected`."""
    said = next((line for line in done.text.splitlines() if re.match(r"VD\d{4}", line)), "")
    last = said or (done.text.strip().splitlines() or ["nothing was said"])[-1]
    if done.status is None:
        return "hang", f"no end within {done.seconds:.0f} s; {last}"
    if done.status == 1 or done.status < 0 or "Traceback" in done.text:
        return "crash", f"exit status {done.status}; {last}"
    if done.status not in statuses:
        return "wrong", f"exit status {done.status}; {last}"
    if done.status in (2, 3, 4, 5) and not said:
        return "wrong", f"exit status {done.status} without a code; {last}"
    if not re.search(expected, done.text):
        return "wrong", f"nothing like {expected!r} was said; {last}"
    if done.peak_mb > MOST_GROWTH:
        return "wrong", f"{done.peak_mb:,.0f} MB more memory; {last}"
    return ("accepted" if done.status == 0 else "clean"), last
