"""The reliability gate: malformed files, kills, full disks, contention, flipped bits, long runs, hostile devices.

    python -m tests.faults [--all] [--only FIGURE ...] [-o build/faults]

Runs every figure in a process of its own, two at once; prints one table, and writes it with every case as faults.json.
Exit status 1 if anything is outside of what is allowed. Without --all it is the short form, at most five minutes on
two cores.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.faults.gate import Row, load, save, table

ROOT = Path(__file__).parents[2]
# Each module has `run(full: bool, work: Path) -> list[Row]`; `work` is an empty folder of its own. The longest first.
FIGURES: dict[str, str] = {
    "devices": "tests.faults.devices.figure",
    "kills": "tests.faults.kills",
    "full-disk": "tests.faults.full_disk",
    "crash-points": "tests.faults.crash_points",
    "one-key": "tests.faults.one_key",
    "kills-whole-run": "tests.faults.kills_whole_run",
    "server": "tests.faults.server",
    "predictions": "tests.faults.predictions",
    "malformed": "tests.faults.malformed.figure",
    "fuzzing": "tests.faults.fuzzing.figure",
    "flipped-bits": "tests.faults.flipped_bits",
}
AT_ONCE = 2
# Seconds in which a figure must have ended: far more than any takes.
SHORT_LIMIT, FULL_LIMIT = 600, 7200


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="the full form, some hours")
    parser.add_argument("--only", nargs="+", choices=list(FIGURES), metavar="FIGURE", help=f"of {', '.join(FIGURES)}")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "build" / "faults")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        return _one(options.one, options.all, options.output)
    options.output.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found = pool.map(lambda name: _figure(name, options.all, options.output), options.only or list(FIGURES))
        rows = [row for each in found for row in each]
    save(rows, options.output / "faults.json")
    text = table(rows)
    (options.output / "faults.md").write_text(text + "\n", encoding="utf-8")
    wrong = [row for row in rows if not row.passed]
    verdict = f"{len(wrong)} of {len(rows)} rows are not right" if wrong else "all right"
    print(f"{text}\nfaults: {verdict}, in {time.monotonic() - started:.0f} s", flush=True)
    return 1 if wrong else 0


def _figure(name: str, full: bool, output: Path) -> list[Row]:
    """The rows of one figure, from a process of its own, which may die without the others."""
    limit, log, file = FULL_LIMIT if full else SHORT_LIMIT, output / f"{name}.log", output / f"{name}.json"
    file.unlink(missing_ok=True)
    words = [sys.executable, "-m", "tests.faults", "--one", name, "-o", str(output), *(["--all"] if full else [])]
    started = time.monotonic()
    with log.open("w", encoding="utf-8") as stream:
        try:
            done = subprocess.run(words, cwd=ROOT, stdout=stream, stderr=stream, timeout=limit, check=False)
            status = done.returncode
        except subprocess.TimeoutExpired:
            status = -1
    print(f"{name}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    if file.is_file() and status == 0:
        return load(file)
    row = Row(name, 1)
    row.add("the figure itself", "hang" if status == -1 else "crash", note=f"exit status {status}, see {log}")
    return [row]


def _one(name: str, full: bool, output: Path) -> int:
    work = output / f"{name}-{os.getpid()}"
    work.mkdir(parents=True)
    started = time.monotonic()
    rows: list[Row] = importlib.import_module(FIGURES[name]).run(full, work)
    for row in rows:
        row.seconds = row.seconds or time.monotonic() - started
    save(rows, output / f"{name}.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
