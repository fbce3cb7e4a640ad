"""The gate of work past one machine: shards, executors, grids, a history, a fleet.

    python -m tests.scale [--all] [--only ROW ...] [-o build/scale]

Runs every row in a process of its own, two at once, prints one table and writes it as scale.json. Exit status 1 if what
was promised does not hold. A row that lacks something here, such as Ray or a server of ssh, is skipped and says why.
Without --all it is the short form, some two minutes on two cores; --all has the sizes of docs/scale.md.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pkgutil
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.scale.killing import processes_below
from tests.scale.row import Missing, Row, load, save, table

ROOT = Path(__file__).parents[2]
EVALUATION = "tests.scale.evaluation"
# Each a function of (all of it?, an empty folder of its own, the row that it fills). The longest first.
ROWS: dict[str, tuple[str, str]] = {
    "kills": ("workers killed every few seconds, and the command: only the time is another", f"{EVALUATION}:kills"),
    "executors": ("one process, several, and two Ray nodes give the same bytes", f"{EVALUATION}:executors"),
    "calibration": ("INT8 graphs are the same bytes, whoever observed the images", f"{EVALUATION}:calibration"),
    "fleet": ("a good bundle reaches all boards, a bad one stops at the first", "tests.scale.fleet:staged"),
    "memory": ("many images in constant memory, goes on after SIGKILL", f"{EVALUATION}:constant_memory"),
    "grid": ("a grid on two Ray nodes gives the bundles of one process", "tests.scale.grid:two_nodes"),
    "history": ("a slowdown of 5 % is found, none where there is none", "tests.scale.history:slowdown"),
}
AT_ONCE = 2
# In which a row must have ended: far more than it takes, also beside another one.
SHORT_SECONDS, ALL_SECONDS = 1200.0, 4 * 3600.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="the sizes of docs/scale.md")
    parser.add_argument("--only", nargs="+", choices=list(ROWS), metavar="ROW", help=f"of {', '.join(ROWS)}")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "scale")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    output = options.output.absolute()
    if options.one:
        return _one(options.one, options.all, output)
    output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    names = list(dict.fromkeys(options.only or ROWS))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        rows = list(pool.map(lambda name: run_row(name, options.all, output), names))
    save(rows, output / "scale.json")
    text = table(rows)
    (output / "scale.md").write_text(text + "\n", encoding="utf-8")
    wrong = sum(not row.passed for row in rows)
    verdict = f"{wrong} of {len(rows)} rows are not right" if wrong else "all right"
    print(f"{text}\nscale: {verdict}, in {time.monotonic() - started:.0f} s", flush=True)
    return 1 if wrong else 0


def limit_seconds(full: bool) -> float:
    return ALL_SECONDS if full else SHORT_SECONDS


def run_row(name: str, full: bool, output: Path) -> Row:
    """Run one row in a process of its own, with all that it starts; it is wrong where that ends otherwise."""
    file, log, started = output / f"{name}.json", output / f"{name}.log", time.monotonic()
    file.unlink(missing_ok=True)
    words = [sys.executable, "-m", "tests.scale", "--one", name, "-o", str(output), *(["--all"] if full else [])]
    with log.open("wb") as stream:
        process = subprocess.Popen(words, cwd=ROOT, stdout=stream, stderr=stream, start_new_session=True)
        status: int | None = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            try:
                status = process.wait(limit_seconds(full))
            except BaseException:  # it is late, or this command is ended
                _end(process)
                raise
    print(f"{name}: ended after {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    if status == 0 and file.is_file():
        return load(file)[0]
    said = "no end" if status is None else f"exit status {status}"
    return Row(ROWS[name][0], wrong=[f"{said}, see {log}"], seconds=time.monotonic() - started)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that runs, and all that it has started. The number of one that has ended may be another's."""
    for left in (*processes_below(process.pid), process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(left, signal.SIGKILL)
    process.wait()


def _one(name: str, full: bool, output: Path) -> int:
    work = output / f"{name}-work"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    promise, function = ROWS[name]
    row, started = Row(promise), time.monotonic()
    try:
        pkgutil.resolve_name(function)(full, work, row)
    except Missing as missing:
        row.skipped = str(missing)
    row.seconds = time.monotonic() - started
    save([row], output / f"{name}.json")
    if row.passed:
        shutil.rmtree(work, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
