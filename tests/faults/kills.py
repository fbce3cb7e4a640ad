"""Figures: SIGKILL in every stage of `vitdeploy run`, while a folder is replaced, and at any moment of a run; then
the same command each time."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.faults.forking import begin, ended
from tests.faults.gate import Outcome, Row, timed
from tests.faults.killing import (
    ALWAYS_EQUAL,
    STAGES,
    UNINTERRUPTED,
    Child,
    digests,
    forked,
    make_checkpoint,
    published,
    unfinished,
    write_recipe,
)
from tests.faults.plans import KEY, NEW, OLD, OURS, entry, fill, leftovers, no_exchange, one_of
from vitdeploy.bundle.read import read_bundle, verify_files
from vitdeploy.errors import VitdeployError
from vitdeploy.publish import remove_abandoned, replacing, restore
from vitdeploy.store.key import Identity
from vitdeploy.store.store import RECORD_FILE, Store

SEED = 11
DIGITS = Path(__file__).parents[2] / "calibration" / "digits"
# Of the full form: kills in each stage, and at any moment of a run, of which so many follow each other.
POINTS, WHOLE_RUN, IN_A_ROW = 25, 200, 5
REPLACED, REPLACED_FULL = 20, 400
# Kinds of entries in the order in which a run makes them, and after which the stage is killed.
ORDER = ("reference", "export", "optimize", "calibrate", "high_precision", "place", "compile", "verify", "attention")
ALL_STAGES = (*STAGES, "bundle")
# Outcome, seconds, megabytes, note: what a row adds to the name of a case.
Judged = tuple[Outcome, float, float, str]


def run(full: bool, work: Path) -> list[Row]:
    work, drawn = work.resolve(), random.Random(SEED)
    return [timed(while_replaced, full, work, drawn), timed(in_stages, full, work, drawn)]


def run_whole(full: bool, work: Path) -> list[Row]:
    """The kills at any moment of a whole run: of the full form alone."""
    row = Row("SIGKILL at any moment of a run, then the same", WHOLE_RUN + WHOLE_RUN // IN_A_ROW if full else 0)
    if not full:
        row.missing = "in the full form"
        return [row]
    home = home_in(work.resolve())
    expected, seconds = undisturbed(home)
    drawn = random.Random(SEED + 1)
    for _ in range(WHOLE_RUN // IN_A_ROW):
        shutil.rmtree(home / "store", ignore_errors=True)
        if drawn.random() < 0.5:  # the other half replaces the bundle that is there
            shutil.rmtree(home / "out", ignore_errors=True)
        for _ in range(IN_A_ROW):
            there = (home / "out" / "bundle").exists()
            child = Child(home, short=True)
            time.sleep(drawn.uniform(0, seconds))
            status = child.kill()
            row.add(f"after {child.lines[-1:]}", *judged(home, status, there))
        row.add("the same command", *after(home, expected))
    return [row]


def home_in(work: Path) -> Path:
    """A folder with the recipe, and caches beside it."""
    os.environ["XDG_CACHE_HOME"] = str(work / "cache")
    home = work / "home"
    home.mkdir()
    write_recipe(home, make_checkpoint(work / "small.safetensors"), DIGITS)
    return home


def in_stages(full: bool, work: Path, drawn: random.Random) -> Row:
    row = Row("SIGKILL in each stage, then the same", 2 * POINTS * len(ALL_STAGES) if full else 0)
    if not full:
        row.missing = "in the full form; tests/faults/test_kill.py does it once in each stage"
        return row
    home = home_in(work)
    expected, _ = undisturbed(home)
    whole = work / "whole-store"
    shutil.copytree(home / "store", whole)
    for stage in ALL_STAGES:
        for _ in range(POINTS):
            _store_before(stage, whole, home / "store")
            shutil.rmtree(home / "out", ignore_errors=True)
            row.add(stage, *_killed_in(home, stage, drawn))
            row.add(f"{stage}, the same command", *after(home, expected))
    return row


def _killed_in(home: Path, stage: str, drawn: random.Random) -> Judged:
    child = Child(home, short=stage == "bundle")
    try:
        if stage == "bundle":
            child.wait_for_bundle()
        else:
            line, longest = STAGES[stage]
            child.wait_for(line)
            time.sleep(drawn.uniform(0, longest))
    except AssertionError as error:
        return "crash", 0.0, 0.0, str(error)[-300:]
    return judged(home, child.kill(group=stage != "bench"), there=False)


def judged(home: Path, status: int | None, there: bool) -> Judged:
    """What a run has left that was killed, or had just ended: no bundle, if none was `there`, or a whole one."""
    if status not in (0, -signal.SIGKILL):
        return "hang" if status is None else "crash", 0.0, 0.0, f"exit status {status}"
    names = published(home)
    if not names and status and not there:
        return "clean", 0.0, 0.0, ""
    if names != ["bundle"]:
        return "wrong", 0.0, 0.0, f"{names} in the output, exit status {status}"
    return ("clean", 0.0, 0.0, "") if _whole(home) else ("wrong", 0.0, 0.0, "a bundle in pieces")


def _whole(home: Path) -> bool:
    with contextlib.suppress(VitdeployError):
        verify_files(home / "out" / "bundle", read_bundle(home / "out" / "bundle"))
        return True
    return False


def undisturbed(home: Path, record: Path | None = None) -> tuple[dict[str, str], float]:
    """What a run that nothing disturbs makes, in a store of its own, and its seconds. `record`: as of `Child`."""
    started = time.monotonic()
    status = Child(home, short=True, record=record).end()
    assert status == 0, (home / "log.txt").read_text(encoding="utf-8")
    seconds, calm = time.monotonic() - started, _calm(home)
    return {name: calm[name] for name in ALWAYS_EQUAL}, seconds


def _calm(home: Path) -> dict[str, str]:
    calm = forked(UNINTERRUPTED, home=str(home))
    calm.join(timeout=120)
    assert calm.exitcode == 0
    return digests(home / "calm")


def after(home: Path, expected: dict[str, str]) -> Judged:
    """Give the same command again, and judge what it makes: `expected`, of `undisturbed`."""
    started = time.monotonic()
    child = Child(home, short=True)
    status = child.end()
    wrong = _differs(home, expected) if status == 0 else f"exit status {status}: {child.lines[-3:]}"
    outcome: Outcome = "hang" if status is None else "wrong" if wrong else "clean"
    return outcome, time.monotonic() - started, 0.0, wrong


def _differs(home: Path, expected: dict[str, str]) -> str:
    left = [str(path.relative_to(home)) for path in unfinished(home)]
    if (home / "store" / "quarantine").exists():
        left.append("store/quarantine")
    if left:
        return f"left behind: {left}"
    made = digests(home / "out" / "bundle")
    differing = sorted(name for name in expected if made.get(name) != expected[name])
    return f"other bytes in {differing}" if differing or not _whole(home) else ""


def _store_before(stage: str, whole: Path, store: Path) -> None:
    """A store in which this stage, and all after it, is still to be done."""
    shutil.rmtree(store, ignore_errors=True)
    shutil.copytree(whole, store)
    later = ORDER[ORDER.index(stage) :] if stage in ORDER else ()
    for record in store.glob(f"artifacts/*/*/{RECORD_FILE}"):
        if json.loads(record.read_text(encoding="utf-8"))["kind"] in later:
            shutil.rmtree(record.parent)


# --- a folder that is replaced, and an entry that is made, again and again --------------------------------------------


def while_replaced(full: bool, work: Path, drawn: random.Random) -> Row:
    """Processes that publish the old and the new in turn, each killed after a random time."""
    count = REPLACED_FULL if full else REPLACED
    row = Row("SIGKILL while a folder is replaced", 3 * count)
    kinds: tuple[tuple[str, Callable[[Path], None], Callable[[Path], str]], ...] = (
        ("exchanged", _replace_for_ever, _bundle_is_whole),
        ("in two steps", _replace_without_exchange, _bundle_is_whole),
        ("an entry", _make_for_ever, _entry_is_whole),
    )
    for name, act, wrong in kinds:
        home = work / name.replace(" ", "-")
        fill(home / "out" / "bundle", OLD)
        for number in range(count):
            begun = begin(act, home)
            time.sleep(drawn.uniform(0.002, 0.03))
            os.kill(begun[0], signal.SIGKILL)
            status = ended(begun).status
            note = wrong(home) if status is None else f"exit status {status}"
            row.add(f"{name}, kill {number}", "wrong" if note else "clean", note=note)
    return row


def _replace_for_ever(home: Path) -> None:
    while True:
        for files in (NEW, OLD):
            with replacing(home / "out" / "bundle", OURS) as work:
                fill(work, files)


def _replace_without_exchange(home: Path) -> None:
    with no_exchange():
        _replace_for_ever(home)


def _make_for_ever(home: Path) -> None:
    store = Store(home / "store")
    while True:
        store.remove(KEY)
        store.make(Identity("export", {}, {}, {}, KEY), lambda work: fill(work, NEW))


def _bundle_is_whole(home: Path) -> str:
    restore(home / "out" / "bundle")
    wrong = one_of(home / "out" / "bundle", OLD, NEW)
    remove_abandoned(home / "out")
    left = leftovers(home)
    return wrong or (f"left behind: {left}" if left else "")


def _entry_is_whole(home: Path) -> str:
    found = entry(home / "store", KEY)
    if found is not None and (found != dict(NEW) or Store(home / "store").find(KEY) is None):
        return f"the entry holds {sorted(found)}"
    remove_abandoned(home / "store" / "artifacts" / KEY[:2])
    left = leftovers(home)
    return f"left behind: {left}" if left else ""
