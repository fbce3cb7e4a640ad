"""Figure: a disk that is full or fails: at every write call of small plans, by limits on the size of files, and a real
one of 64 MiB."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.faults.broken_disk import ERRORS, BrokenDisk
from tests.faults.forking import in_child
from tests.faults.gate import Row, timed
from tests.faults.killing import ALWAYS_EQUAL, Child, make_checkpoint, write_recipe
from tests.faults.plans import PLANS, Plan, held, in_memory, leftovers
from vitdeploy.errors import StorageError

SEED = 13
DIGITS = Path(__file__).parents[2] / "calibration" / "digits"
DISK_BYTES = 64 << 20
LIMIT_SECONDS = 10.0
# How often each command is started, under a limit of file sizes and on a disk with too little space.
SHORT = {"pack": 1, "compile": 1, "quantize": 0, "run": 0}, {"pack": 1, "compile": 1, "quantize": 1, "run": 0}
FULL = ({"pack": 10, "compile": 20, "quantize": 25, "run": 25},) * 2


def run(full: bool, work: Path) -> list[Row]:
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    with in_memory(work) as memory:
        swept = timed(sweep, full, memory)
    work = work.resolve()
    (under_limits, on_disk), drawn = FULL if full else SHORT, random.Random(SEED)
    commands = list(_commands(work / "home", [name for name in under_limits if on_disk[name]]))
    limited = timed(_limited, commands, under_limits, drawn)
    return [swept, limited, timed(_mounted, commands, on_disk, drawn, work / "disk")]


# --- every write call of small plans ----------------------------------------------------------------------------------


def sweep(full: bool, work: Path) -> Row:
    """Each call fails once, or with all after it; in the short form each second one, one of both, with the three errors
    in turn."""
    row = Row("full or failing disk at every write call", 0)
    for plan in PLANS:
        calls = in_child(_count, plan, work / "counted").result
        shutil.rmtree(work / "counted")
        assert calls, plan.name
        for place in range(1, calls + 1, 1 if full else 2):
            errors = ERRORS if full else (ERRORS[place % 3],)
            for number in errors:
                for lasting in (False, True) if full else (place % 4 == 1,):
                    row.expected += 1
                    _strike(row, plan, work / "struck", place, number, lasting)
    return row


def _count(plan: Plan, home: Path) -> int:
    return _write(plan, home, 0, 0, False)[1]


def _write(plan: Plan, home: Path, place: int, number: int, lasting: bool) -> tuple[str, int]:
    """What the plan ends with on such a disk: "", or its StorageError; and what it was at, or the number of calls."""
    home.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        plan.before(home)
        with BrokenDisk(home, place, number, lasting) as disk:
            try:
                plan.run(home)
            except StorageError as error:
                return f"{error.code} {error.message}", disk.calls
        return "", disk.calls


def _strike(row: Row, plan: Plan, home: Path, place: int, number: int, lasting: bool) -> None:
    name = f"{plan.name}, call {place}{' and all after it' if lasting else ''}: {os.strerror(number)}"
    started = time.monotonic()
    done = in_child(_write, plan, home, place, number, lasting, seconds=LIMIT_SECONDS)
    seconds = time.monotonic() - started
    if done.status is None:
        row.add(name, "hang", seconds)
    elif done.status:
        row.add(name, "crash", seconds, note=done.error[-400:])
    else:
        told = done.result[0]
        note = plan.wrong(home) if told else plan.made(home)
        # Only a folder moved aside stays until the disk lets it back.
        left = [each for each in leftovers(home) if "/.old-" not in f"/{each}"]
        note = note or (f"left behind: {left}" if left else "") or _again(plan, home)
        row.add(name, "wrong" if note else "clean" if told else "accepted", seconds, note=note)
    shutil.rmtree(home)


def _again(plan: Plan, home: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        try:
            plan.run(home)
        except Exception as error:
            return f"the same command again: {error!r}"
    return plan.done(home)


# --- commands ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Command:
    """`words` but for the output, which is `out`/`output`; `home` is its working folder. `bytes`: of each file that it
    writes when nothing is in its way."""

    name: str
    home: Path
    words: Sequence[object]
    output: str
    bytes: tuple[int, ...]

    def start(self, out: Path, file_bytes: int = 0, disk: Path | None = None) -> Child:
        words = (*self.words, "-o", out / self.output)
        return Child(self.home, short=True, words=words, file_bytes=file_bytes, disk=disk)


def _commands(home: Path, names: Sequence[str]) -> Iterator[Command]:
    """The commands with what each one needs, made by the one before; but `run`, which needs nothing, if it is named."""
    home.mkdir()
    write_recipe(home, make_checkpoint(home / "small.safetensors"), DIGITS)
    made = home / "made"
    words: dict[str, tuple[Sequence[object], str]] = {
        "export": (("export", "recipe.yaml"), "exported"),
        "quantize": (
            (
                *("quantize", made / "exported", "--data", DIGITS / "calibration", "--target", "openvino-cpu"),
                *("--num-samples", "8", "--high-precision", "0"),
            ),
            "quantized",
        ),
        "compile": (("compile", made / "quantized", "--target", "openvino-cpu", "--split-rows", "none"), "compiled"),
        "pack": (("bundle", "pack", made / "compiled"), "x.vitb"),
        "run": (("run", "recipe.yaml", "-v"), "bundle"),
    }
    for name, (arguments, output) in words.items():
        if name == "run" and name not in names:
            continue
        command = Command(name, home, arguments, output, ())
        child = command.start(made)
        status = child.end()
        assert status == 0, child.lines
        found = made / output
        sizes = [path.stat().st_size for path in found.rglob("*")] if found.is_dir() else [found.stat().st_size]
        shutil.rmtree(home / "store", ignore_errors=True)
        if name in names:
            yield Command(name, home, arguments, output, tuple(sorted(sizes)))


def _judge(row: Row, command: Command, name: str, child: Child, out: Path, disk: Path) -> bool:
    """Add a case for a command on a disk that is too small; True where it says so."""
    started = time.monotonic()
    status = child.end()
    seconds, text = time.monotonic() - started, "\n".join(child.lines)
    final = out / command.output
    if status not in (0, 4) or "Traceback" in text or (status == 4 and "VD4101" not in text):
        row.add(name, "hang" if status is None else "crash", seconds, note=f"exit status {status}: {text[-400:]}")
        return False
    left = [path for place in (out, disk / "store") if place.exists() for path in leftovers(place)]
    note = f"left behind: {left}" if left else ""
    if status == 0 and not final.exists():
        note = "it said nothing, and nothing is there"
    if status == 4 and final.exists():
        note = "it failed, and something is there"
    row.add(name, "wrong" if note else "clean" if status else "accepted", seconds, note=note)
    return status == 4


def _again_on(row: Row, command: Command, out: Path, disk: Path | None) -> None:
    """The same command, with enough space: it makes what it always makes."""
    child = command.start(out, disk=disk)
    status = child.end()
    wrong = _other_bytes(command, out) if status == 0 else f"exit status {status}: {child.lines[-5:]}"
    row.add(f"{command.name}, again", "wrong" if wrong else "clean", note=wrong)


def _other_bytes(command: Command, out: Path) -> str:
    """Graphs and engines that differ from those that were made undisturbed."""
    if (out / command.output).is_file():
        made = command.home / "made" / command.output
        return "" if made.read_bytes() == (out / command.output).read_bytes() else "other bytes"
    one, other = held(out / command.output), held(command.home / "made" / command.output)
    names = [name for name in one.keys() & other.keys() if name.endswith((".onnx", ".bin", ".npz", ".txt"))]
    if command.name == "run":  # which engines it ships is measured
        names = [name for name in names if name in ALWAYS_EQUAL]
    differing = [name for name in names if one[name] != other[name]]
    return f"other bytes in {differing}" if differing or not names else ""


def _limited(commands: Sequence[Command], counts: dict[str, int], drawn: random.Random) -> Row:
    """RLIMIT_FSIZE, which native writers meet too: no file may become larger than some part of the largest one."""
    row = Row("commands whose files may not grow", sum(counts.values()))
    for command in commands:
        for _ in range(counts[command.name]):
            largest = command.bytes[-1]
            # Above what it writes on standard error, which is a file too.
            limits = [drawn.randrange(4096, max(8192, largest)), *(size - 1 for size in command.bytes if size > 4096)]
            limit = drawn.choice(limits)
            out = command.home / "limited"
            child = command.start(out, file_bytes=limit)
            name = f"{command.name}, files of at most {limit:,} of {largest:,} bytes"
            if _judge(row, command, name, child, out, command.home):
                row.expected += 1
                _again_on(row, command, out, None)
            for place in (out, command.home / "store"):
                shutil.rmtree(place, ignore_errors=True)
    return row


def _mounted(commands: Sequence[Command], counts: dict[str, int], drawn: random.Random, disk: Path) -> Row:
    """A tmpfs of 64 MiB that holds the output, the store and temporary files, with less free space than is needed."""
    row = Row("commands on a full disk of 64 MiB", sum(counts.values()))
    with _tmpfs(disk) as why:
        if why:
            row.missing = why
            return row
        for command in commands:
            for _ in range(counts[command.name]):
                free = drawn.randrange(4096, max(8192, sum(command.bytes)))
                with _filled(disk, free):
                    name = f"{command.name}, {free:,} bytes free of {sum(command.bytes):,} that it writes"
                    child = command.start(disk / "out", disk=disk)
                    full = _judge(row, command, name, child, disk / "out", disk)
                if full:
                    row.expected += 1
                    _again_on(row, command, disk / "out", disk)
                for place in disk.iterdir():
                    shutil.rmtree(place)
    return row


@contextlib.contextmanager
def _tmpfs(disk: Path) -> Iterator[str]:
    """Mounted while it is entered; or why it cannot be."""
    if sys.platform != "linux":
        yield "a tmpfs is mounted on Linux only"
        return
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(disk)], capture_output=True, check=False
    )
    if mounted.returncode:
        yield "mounting a tmpfs needs root: run it as root, or in a container with CAP_SYS_ADMIN"
        return
    try:
        yield ""
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


@contextlib.contextmanager
def _filled(disk: Path, free: int) -> Iterator[None]:
    """A file that leaves so many bytes."""
    (disk / "tmp").mkdir(exist_ok=True)
    filler = disk / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, shutil.disk_usage(disk).free - free))
    try:
        yield
    finally:
        filler.unlink()
