"""The figure "malformed files": each kind's cases through the commands that read them, a process a case."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from tests.faults.gate import Outcome, Row
from tests.faults.malformed import (
    bundle_files,
    configs,
    engine_blobs,
    external_data,
    image_files,
    ir_files,
    onnx_files,
    pt_files,
    recipes,
    safetensors_files,
)
from tests.faults.malformed.kinds import Attempt, Kind
from tests.faults.sandbox import MEGABYTES, SECONDS, Ended, Sandbox, Words, judge, learn, preload, snapshot
from tests.faults.seeds import Seeds, make_apart

KINDS: tuple[Kind, ...] = (
    onnx_files.KIND,
    external_data.KIND,
    safetensors_files.KIND,
    pt_files.KIND,
    configs.KIND,
    bundle_files.KIND,
    image_files.KIND,
    recipes.KIND,
    ir_files.KIND,
    engine_blobs.KIND,
)


def run(full: bool, work: Path) -> list[Row]:
    """`tests.faults` calls this."""
    preload(())
    seeds = make_apart(work)
    rows = [Row(f"malformed: {kind.name}", len(kind.numbers(full))) for kind in KINDS]
    teacher = Sandbox(work / "learn")
    for row, kind in zip(rows, KINDS, strict=True):
        for words in kind.commands:
            names, ended = learn(teacher, *_whole(kind, words, seeds, work / "learn"))
            preload(names)
            if ended.status or ended.limit:  # what no whole file passes says nothing of damaged ones
                row.add(
                    f"a whole file, {' '.join(words)}", "wrong", ended.seconds, note=f"refused: {ended.text[-300:]}"
                )
    sandbox = Sandbox(work / "sandbox")
    for row, kind in zip(rows, KINDS, strict=True):
        started = time.monotonic()
        add_cases(row, kind, full, sandbox, seeds)
        row.seconds = time.monotonic() - started
        print(f"{row.figure}: {len(row.cases)} cases, {row.seconds:.0f} s, bad: {len(row.bad)}", flush=True)
    for name in ("learn", "sandbox", "seeds"):
        shutil.rmtree(work / name, ignore_errors=True)
    return rows


def add_cases(row: Row, kind: Kind, full: bool, sandbox: Sandbox, seeds: Seeds) -> None:
    for number in kind.numbers(full):
        name, outcome, ended, note = one(kind, number, sandbox, seeds)
        row.add(name, outcome, ended.seconds, ended.peak_mb, note)
        if note and outcome not in ("clean", "accepted"):
            print(f"{outcome.upper()}  {name}: {note}\n{ended.text[-2000:]}", file=sys.stderr, flush=True)


def one(kind: Kind, number: int, sandbox: Sandbox, seeds: Seeds) -> tuple[str, Outcome, Ended, str]:
    """Make a case and run it; what seems to have no end is run once more, as this machine may have stood still."""
    damage, home = kind.damage(number), sandbox.work / "cases"
    for last in (False, True):
        attempt = kind.attempt(number, home / f"{number}", seeds)
        damage.make(attempt)
        (attempt.folder / "tmp").mkdir()
        before = snapshot(attempt.folder)
        megabytes = MEGABYTES + _size_mb(attempt.given)
        ended = sandbox.command(attempt.words, attempt.folder, seconds=SECONDS, megabytes=megabytes)
        outcome, note = judge(ended, before, attempt.folder, must_refuse=damage.must_refuse)
        if others := {path.name for path in home.iterdir()} - {attempt.folder.name}:
            outcome, note = "wrong", f"it wrote {', '.join(map(ascii, sorted(others)))} beside its folder"
        shutil.rmtree(home, ignore_errors=True)
        if ended.limit != "time" or last:
            break
    told = f"{damage.name} [{kind.name} {number}: {' '.join(map(str, attempt.words))}]"
    return told, outcome, ended, note


def _whole(kind: Kind, words: Words, seeds: Seeds, home: Path) -> tuple[Words, Path]:
    """A valid case of its own for a command: the words, and its folder."""
    folder = home / f"whole-{kind.name.replace(' ', '-')}-{kind.commands.index(words)}"
    attempt: Attempt = kind.attempt(0, folder, seeds)
    kind.whole(attempt)
    return words, folder


def _size_mb(folder: Path) -> float:
    """What the files of a case take on the disk: a file with holes may declare more."""
    found = 0
    for path in folder.rglob("*"):
        facts = path.lstat()
        found += facts.st_blocks * 512
    return found / 2**20
