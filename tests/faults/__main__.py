"""The reliability gate: malformed files, kills, full disks, contention, flipped bits, long runs, hostile devices.

    python -m tests.faults [--all] [--only FIGURE ...] [-o build/faults]

Runs every figure in a process of its own, some at once, and tells each minute how far they are. Prints one table, and
writes it with every case as faults.json. Exit status 1 if anything in it is outside of what is allowed. Without --all
it is the short form, a minute and a half on two cores.

With --only, the rows of the other figures stay as they were run last in the same form, each with its date and machine:
so the full form can be collected in pieces.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pkgutil
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.faults.gate import TOLD, Row, asked_seconds, load, save, table
from tests.forked import start

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Figure:
    """`run`: a function of (the full form?, an empty folder of its own) that gives rows. `minutes` that the full form
    takes on two cores beside another figure, by its counts: a killed run and the same command again take some 15 s."""

    run: str
    minutes: int


# The longest of the short form first. The full form has an order of its own, by `minutes`.
FIGURES: dict[str, Figure] = {
    "malformed": Figure("tests.faults.malformed.figure:run", 8),
    "devices": Figure("tests.faults.devices.figure:run", 9),
    "kills": Figure("tests.faults.kills:run", 80),
    "full-disk": Figure("tests.faults.full_disk:run", 16),
    "crash-points": Figure("tests.faults.crash_points:run", 1),
    "one-key": Figure("tests.faults.one_key:run", 1),
    "kills-whole-run": Figure("tests.faults.kills:run_whole", 60),
    "crash-points-whole-run": Figure("tests.faults.crash_points_whole_run:run", 40),
    "server": Figure("tests.faults.server:run", 13),
    "predictions": Figure("tests.faults.predictions:run", 4),
    "fuzzing": Figure("tests.faults.fuzzing.figure:run", 40),
    "flipped-bits": Figure("tests.faults.flipped_bits:run", 3),
}
# In the short form too many for two cores: many of its cases wait, for a disk or a time limit.
AT_ONCE, AT_ONCE_SHORT = 2, 4
TELL_SECONDS = 60.0
# For a figure that is broken off, to end what it has started.
END_SECONDS = 30.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="the full form, some hours")
    parser.add_argument("--only", nargs="+", choices=list(FIGURES), metavar="FIGURE", help=f"of {', '.join(FIGURES)}")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "faults")
    options = parser.parse_args()
    full, output = options.all, options.output.absolute()
    os.environ.update({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", **os.environ})  # of all that is started
    output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE if full else AT_ONCE_SHORT) as pool:
        list(pool.map(lambda name: run_figure(name, full, output), in_order(options.only or FIGURES, full)))
    rows, absent = collected(output, full)
    save(rows, output / "faults.json")
    text = table(rows) + (f"\nnot run in this form: {', '.join(absent)}" if absent else "")
    (output / "faults.md").write_text(text + "\n", encoding="utf-8")
    wrong = [row for row in rows if not row.passed]
    verdict = f"{len(wrong)} of {len(rows)} rows are not right" if wrong else "all right"
    print(f"{text}\nfaults: {verdict}, in {time.monotonic() - started:.0f} s", flush=True)
    return 1 if wrong else 0


def in_order(names: Iterable[str], full: bool) -> list[str]:
    """Each once; the longest first, so that the last one does not run on alone."""
    once = list(dict.fromkeys(names))
    return sorted(once, key=lambda name: -FIGURES[name].minutes) if full else once


def collected(output: Path, full: bool) -> tuple[list[Row], list[str]]:
    """The rows of this form, each figure's as it was run last; and the figures that have none."""
    files = {name: rows_file(output, name, full) for name in FIGURES}
    rows = [row for file in files.values() if file.is_file() for row in load(file)]
    return rows, [name for name, file in files.items() if not file.is_file()]


def rows_file(output: Path, name: str, full: bool) -> Path:
    return output / ("full" if full else "short") / f"{name}.json"


def limit_seconds(name: str, full: bool) -> float:
    """In which a figure must have ended: far more than it takes, also beside another one."""
    return 600 + (4 * 60 * FIGURES[name].minutes if full else 0) + asked_seconds()


def run_figure(name: str, full: bool, output: Path) -> None:
    """Run one figure in a process of its own, which may die without the others; its rows are in its file then."""
    file, log = rows_file(output, name, full), output / f"{name}.log"
    file.unlink(missing_ok=True)
    log.write_bytes(b"")
    started = time.monotonic()
    process = start(pkgutil.resolve_name("tests.faults.__main__:one"), name, FIGURES[name].run, full, output, log)
    status = _watched(process, name, log, started + limit_seconds(name, full))
    print(f"{name}: ended after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    if status != 0 or not file.is_file():
        row = Row(name, 1, seconds=time.monotonic() - started)
        row.add("the figure itself", "hang" if status is None else "crash", note=f"exit status {status}, see {log}")
        save([row], file)


def _watched(process: BaseProcess, name: str, log: Path, deadline: float) -> int | None:
    """Its exit status; None where it was broken off. Each minute its cases are told."""
    started = time.monotonic()
    while (left := deadline - time.monotonic()) > 0:
        process.join(min(TELL_SECONDS, left))
        if process.exitcode is not None:
            return process.exitcode
        minutes = (time.monotonic() - started) / 60
        print(f"{name}: {cases_in(log)} cases after {minutes:.0f} minutes", file=sys.stderr, flush=True)
    assert process.pid is not None
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, signal.SIGINT)  # as Ctrl-C: servers, mounts and children go with it
    process.join(END_SECONDS)
    process.kill()
    process.join()
    return None


def cases_in(log: Path) -> int:
    """How many cases a figure has told so far."""
    with log.open("rb") as lines:
        return sum(line.startswith(TOLD.encode()) for line in lines)


def one(name: str, function: str, full: bool, output: Path, log: Path) -> None:
    """A figure, in its process: by what makes its rows."""
    os.chdir(ROOT)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), 1)
    os.dup2(1, 2)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where this gate runs in the background
    for earlier in output.glob(f"{name}-[0-9]*"):
        shutil.rmtree(earlier, ignore_errors=True)
    work = output / f"{name}-{os.getpid()}"
    work.mkdir(parents=True)
    started = time.monotonic()
    rows: list[Row] = pkgutil.resolve_name(function)(full, work)
    for row in rows:
        row.seconds = row.seconds or time.monotonic() - started
    save(rows, rows_file(output, name, full))


if __name__ == "__main__":
    sys.exit(main())
