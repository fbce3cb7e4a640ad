"""Commands in processes of their own, forked from one that has loaded all libraries, with limits of time and memory.

A forked process does what a fresh one would: this one has done nothing but imports. What a command wrote outside of its
output, how it ended and what it took is judged here (`judge`), the same way for every figure.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import os
import re
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.faults.gate import Outcome

SECONDS, MEGABYTES = 10.0, 1024.0
# Of a file that a case may write: what goes on for ever ends before the disk is full.
MOST_BYTES = 1 << 30
POLL_SECONDS = 0.05
TEXT = 20_000  # characters of the beginning and of the end of what it prints
DOCUMENTED = (2, 3, 4, 5)
# What users look at when a command was refused: its stable code at the beginning of a line.
CODE = re.compile(r"^VD\d{4}  ", re.MULTILINE)
CONTROL = re.compile("[\\x00-\\x08\\x0b\\x0c\\x0e-\\x1f\\x7f-\\x9f\\u202a-\\u202e\\u2066-\\u2069]")  # of terminals
BUG = "a bug in vitdeploy"
# Where a command may write: its output, and the caches and the store of this case.
OUTPUT, ALLOWED = "out", ("cache", "store")
MARK = "executed"

Words = Sequence[str]
Snapshot = Mapping[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Ended:
    """How a process ended. `status`: its exit status, or minus the signal. `limit`: the one that it broke, or "".
    `peak_mb`: resident memory above that of a process that does nothing."""

    status: int
    text: str
    seconds: float
    peak_mb: float
    limit: str = ""


class Sandbox:
    """Forks this process, which must have no threads of its own."""

    def __init__(self, work: Path) -> None:
        self.work = work
        self.bare_mb = 0.0
        quiet = work / "bare"
        quiet.mkdir(parents=True, exist_ok=True)
        self.bare_mb = self.call(lambda: 0, quiet).peak_mb

    def command(self, words: Words, folder: Path, *, seconds: float = SECONDS, megabytes: float = MEGABYTES) -> Ended:
        """`vitdeploy WORDS`, or a function of `PYTHON`, in `folder`."""
        return self.call(lambda: _status_of(words), folder, seconds=seconds, megabytes=megabytes)

    def call(
        self, function: Callable[[], object], folder: Path, *, seconds: float = SECONDS, megabytes: float = MEGABYTES
    ) -> Ended:
        """The end of a new process that calls `function` in `folder`; what it returns is the exit status."""
        log = self.work / f"log-{os.getpid()}.txt"
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _child(function, folder, log)
        try:
            limit, taken = self._wait(child, seconds, megabytes)
        finally:
            _kill_group(child)  # with all that it has started
        _, status, used = os.wait4(child, 0)
        text = log.read_text(encoding="utf-8", errors="replace") if log.is_file() else ""
        text = text if len(text) < 2 * TEXT else f"{text[:TEXT]}\n...\n{text[-TEXT:]}"
        peak = max(0.0, used.ru_maxrss / 1024 - self.bare_mb)
        if not limit and self.bare_mb and peak > megabytes:
            limit = f"memory: {peak:,.0f} MB"
        return Ended(os.waitstatus_to_exitcode(status), text, taken, peak, limit)

    def _wait(self, child: int, seconds: float, megabytes: float) -> tuple[str, float]:
        """Wait until it ends or breaks a limit: (that limit or "", the seconds that it took).

        Where this process and all others stand still for a while, as on a machine that is suspended, that is not
        counted: no step is longer than a few polls. Where more wants to run than there are cores, each takes longer.
        """
        handle, poll, taken, at = os.pidfd_open(child), select.poll(), 0.0, time.monotonic()
        poll.register(handle, select.POLLIN)
        try:
            while True:
                ended = poll.poll(1000 * POLL_SECONDS)
                taken += min(time.monotonic() - at, 10 * POLL_SECONDS)
                at = time.monotonic()
                if ended:
                    return "", taken
                used = _resident_mb(child) - self.bare_mb
                late = taken > seconds * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))
                if late or (self.bare_mb and used > megabytes):
                    return "time" if late else f"memory: {used:,.0f} MB", taken
        finally:
            os.close(handle)


def preload(modules: Sequence[str]) -> None:
    """Load what commands load, once for all processes that are forked."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    importlib.import_module("tests.loaded")
    for name in modules:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.collect()
    gc.freeze()


def learn(sandbox: Sandbox, words: Words, folder: Path) -> tuple[list[str], Ended]:
    """What this command imports, beyond what is loaded here; and how it ended."""
    names = sandbox.work / "modules.txt"
    before = set(sys.modules)

    def told() -> int:
        try:
            return _status_of(words)
        finally:  # a command that has done all ends in SystemExit, too
            names.write_text("\n".join(sorted(set(sys.modules) - before)), encoding="utf-8")

    names.write_text("", encoding="utf-8")
    ended = sandbox.call(told, folder, seconds=120, megabytes=8 * MEGABYTES)
    # What stands for a submodule only after its package, and what a library makes up as it goes, is no loss.
    return names.read_text(encoding="utf-8").split(), ended


def _child(function: Callable[[], object], folder: Path, log: Path) -> None:
    """The rest of a forked process; it does not return."""
    status = 1
    try:
        os.setsid()
        _set_up(folder, log)
        found = function()
        status = found if isinstance(found, int) else 0
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 0 if left.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            atexit._run_exitfuncs()  # temporary folders of the session go as they do at a process's own end
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _set_up(folder: Path, log: Path) -> None:
    os.chdir(folder)
    output, null = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), os.open(os.devnull, os.O_RDONLY)
    for number, end in ((0, null), (1, output), (2, output)):
        os.dup2(end, number)
    (folder / "tmp").mkdir(exist_ok=True)
    os.environ.update(
        HOME=str(folder / "cache"),
        XDG_CACHE_HOME=str(folder / "cache"),
        VITDEPLOY_STORE=str(folder / "store"),
        TMPDIR=str(folder / "tmp"),
        TORCHINDUCTOR_CACHE_DIR=str(folder / "cache" / "inductor"),
        HF_HUB_OFFLINE="1",
    )
    tempfile.tempdir = None
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)


# --- commands ---------------------------------------------------------------------------------------------------------


def _status_of(words: Words) -> int:
    if words[0] in PYTHON:
        return _documented(lambda: PYTHON[words[0]](*words[1:]))
    from vitdeploy.cli.main import main

    sys.argv = ["vitdeploy", *words]
    main()
    return 0


def _documented(function: Callable[[], object]) -> int:
    """The status and the words that the command line would end with."""
    from vitdeploy.errors import VitdeployError

    try:
        print(function())
    except VitdeployError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return 0


def _model(source: str, checkpoint: str = "", heads: str = "") -> str:
    import vitdeploy

    made = vitdeploy.model(source or None, checkpoint=checkpoint or None, heads=int(heads) if heads else None)
    return "\n".join(map(str, made.lines()))


def _load(bundle: str, image: str = "", target: str = "auto") -> str:
    import vitdeploy

    with vitdeploy.load(bundle, target) as predictor:
        return str(predictor.predict(image).to_dict()) if image else predictor.why


# The Python API, where loading and reading is all that is asked.
PYTHON: dict[str, Callable[..., str]] = {"vitdeploy.model": _model, "vitdeploy.load": _load}


# --- judgement --------------------------------------------------------------------------------------------------------


def snapshot(folder: Path) -> Snapshot:
    """Everything below a case's folder, but where it may write: no link is followed."""
    found = {}
    for place, folders, files in os.walk(folder):
        if Path(place) == folder:
            folders[:] = [name for name in folders if name != OUTPUT and name not in ALLOWED]
        for name in (*folders, *files):
            path = os.path.join(place, name)  # noqa: PTH118 - names that are no text of ours
            facts = os.lstat(path)
            is_folder = os.path.isdir(path) and not os.path.islink(path)  # noqa: PTH112, PTH114
            found[path] = (facts.st_mode, 0, 0) if is_folder else (facts.st_mode, facts.st_size, facts.st_mtime_ns)
    return found


def judge(ended: Ended, before: Snapshot, folder: Path, *, must_refuse: bool = False) -> tuple[Outcome, str]:
    """The outcome of a case, and what is to be known of it."""
    told = next((line for line in ended.text.splitlines() if CODE.match(line)), "")[:160]
    if ended.limit:
        return "hang", f"{ended.limit} after {ended.seconds:.1f} s"
    if (folder / MARK).exists():
        return "wrong", "it executed what stands in the file"
    if ended.status not in (0, *DOCUMENTED) or "Traceback (most recent call last)" in ended.text or BUG in ended.text:
        return "crash", f"exit status {ended.status}: {_last(ended.text)}"
    if ended.status and not told:
        return "crash", f"exit status {ended.status} without a code: {_last(ended.text)}"
    if found := CONTROL.search(ended.text):
        return "wrong", f"it prints the character {found[0]!r}"
    if others := _differences(before, snapshot(folder)):
        return "wrong", f"it left or changed {', '.join(others[:3])}"
    output = folder / OUTPUT
    if ended.status and ended.status != 5 and (output.exists() or output.is_symlink()):
        return "wrong", f"refused ({told}), and yet there is an output"
    if ended.status == 0 and must_refuse:
        return "wrong", "it must be refused"
    return ("clean", told) if ended.status else ("accepted", "")


def _last(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no word")[:200]


def _differences(before: Snapshot, after: Snapshot) -> list[str]:
    return sorted(ascii(path) for path in before.keys() | after.keys() if before.get(path) != after.get(path))


# --- /proc ------------------------------------------------------------------------------------------------------------


def _resident_mb(process: int) -> float:
    """Of a process and all below it, the largest."""
    largest, waiting = 0.0, [process]
    while waiting:
        at = waiting.pop()
        with contextlib.suppress(OSError, ValueError, IndexError):
            pages = int(Path(f"/proc/{at}/statm").read_text(encoding="ascii").split()[1])
            largest = max(largest, pages * resource.getpagesize() / 2**20)
            for task in Path(f"/proc/{at}/task").iterdir():
                waiting += map(int, (task / "children").read_text(encoding="ascii").split())
    return largest


def _kill_group(leader: int) -> None:
    """End a process that is the first of its session, and all that it has started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
