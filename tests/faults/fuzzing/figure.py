"""The figure "fuzzing": seven readers, each fuzzed in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.faults.fuzzing.targets import TARGETS
from tests.faults.gate import Row
from tests.faults.sandbox import preload
from tests.faults.seeds import make_apart

ROOT = Path(__file__).parents[3]
# Of each reader; and so many readers at once.
SHORT_SECONDS, FULL_SECONDS = 2.0, 600.0
AT_ONCE = 2
# To load what a reader needs takes longer than that: in the short form it is one.
SHORT = ("ONNX admission",)
# To load what a reader needs, and to make smaller what it fails at.
OVERHEAD_SECONDS = 120.0
ENDLESS = -99


def engine() -> str:
    return "atheris" if importlib.util.find_spec("atheris") else "hypothesis"


def run(full: bool, work: Path) -> list[Row]:
    """`tests.faults` calls this."""
    preload(())
    seeds = make_apart(work)
    seconds, names = (FULL_SECONDS, tuple(TARGETS)) if full else (SHORT_SECONDS, SHORT)
    row = Row(f"fuzzing by {engine()}, {seconds:.0f} s a reader", len(names))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda name: _one(row, name, seconds, seeds.folder, work / name.replace(" ", "-")), names))
    return [row]


def _one(row: Row, name: str, seconds: float, seeds: Path, work: Path) -> None:
    work.mkdir(parents=True)
    failures, log, started = work / "failures", work / "log.txt", time.monotonic()
    status = _session(name, seconds, seeds, work, log)
    if _found(failures)["failures"]:
        _session(name, 0, seeds, work, log)
    found = _found(failures)
    told = f"{name}: {found['inputs']:,} inputs by {engine()}, {found['accepted']:,} of them taken"
    taken = time.monotonic() - started
    print(f"{told}, {taken:.0f} s, failures: {len(found['failures'])}, exit status {status}", flush=True)
    for each in found["failures"]:
        outcome = "hang" if each["failure"].startswith(("no end", "memory")) else "crash"
        row.add(f"{name}: {each['failure']}", outcome, note=f"{failures / each['file']}")
    if status or not found["inputs"]:
        outcome = "hang" if status == ENDLESS else "crash"
        row.add(f"{name}: the fuzzer ended", outcome, note=f"exit status {status}, {failures / 'last.bin'}, {log}")
    elif not found["failures"]:
        row.add(told, "clean", found["slowest"])


def _session(name: str, seconds: float, seeds: Path, work: Path, log: Path) -> int:
    """The exit status of one session; ENDLESS where it was broken off."""
    words = [sys.executable, "-m", "tests.faults.fuzzing.session", name, "--engine", engine()]
    words += ["--seconds", str(seconds), "--seeds", str(seeds), "--work", str(work)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(work / "cache")}
    with log.open("ab") as stream:
        try:
            limit = seconds + OVERHEAD_SECONDS
            return subprocess.run(
                words, cwd=ROOT, env=environment, stdout=stream, stderr=stream, timeout=limit, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            return ENDLESS


def _found(failures: Path) -> dict[str, Any]:
    result = failures / "result.json"
    if not result.is_file():
        return {"inputs": 0, "accepted": 0, "slowest": 0.0, "failures": []}
    found: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return found
