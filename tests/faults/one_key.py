"""Figure: many processes at once on one key, on keys of one store, on one output and in one queue; also where advisory
locks do nothing, as on some file systems of networks and clusters."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.faults.forking import begin, ended
from tests.faults.gate import Row
from tests.faults.plans import NEW, OLD, OURS, entries_whole, fill, held, leftovers, no_exchange, one_of
from vitdeploy.devices.agent.state import turn
from vitdeploy.errors import OutputError
from vitdeploy.publish import replacing
from vitdeploy.store.key import Identity
from vitdeploy.store.store import RECORD_FILE, Store

KEY = "ab" * 32
# In one folder of the store.
KEYS = (KEY, *(f"ab{number:062x}" for number in range(7)))
Act = Callable[[Path, int], Any]


def run(full: bool, work: Path) -> list[Row]:
    work, (processes, rounds) = work.resolve(), (16, 50) if full else (4, 10)
    rows = []
    for locked in (True, False):
        how = "" if locked else ", without locks"
        together = (
            (Row(f"{processes} processes on one key{how}", rounds), processes, _one_key, _entry),
            (Row(f"8 processes on 8 keys{how}", rounds // 5), 8, _eight_keys, _entries),
            (Row(f"{processes} processes on one output{how}", rounds), processes, _one_output, _output),
            (Row(f"8 processes in a device's queue{how}", rounds // 10), 8, _queue, _queued),
        )
        for row, count, act, wrong in together:
            started = time.monotonic()
            for number in range(row.expected):
                _round(row, number, count, act, wrong, locked, work / "round")
            row.seconds = time.monotonic() - started
            rows.append(row)
    return rows


def _round(
    row: Row, number: int, count: int, act: Act, wrong: Callable[[Path, list[Any]], str], locked: bool, home: Path
) -> None:
    """All processes begin at once; each must end right, and what is there then must be."""
    home.mkdir()
    _prepare(home, number)
    started, (gate, barrier) = time.monotonic(), os.pipe()
    begun = [begin(_at_once, gate, barrier, act, home, number, locked) for _ in range(count)]
    os.close(gate)
    os.close(barrier)  # the last writing end: all go
    done = [ended(each) for each in begun]
    seconds, note = time.monotonic() - started, ""
    for each in done:
        if each.status is None:
            row.add(f"round {number}", "hang", seconds)
        elif each.status:
            row.add(f"round {number}", "crash", seconds, note=f"exit status {each.status}: {each.error[-400:]}")
    if not any(each.status != 0 for each in done):
        note = wrong(home, [each.result for each in done])
        left = leftovers(home)
        note = note or (f"left behind: {left}" if left else "")
        row.add(f"round {number}", "wrong" if note else "clean", seconds, note=note)
    shutil.rmtree(home)


def _prepare(home: Path, number: int) -> None:
    """Every third round begins with a damaged entry, every other one with an output that is there."""
    if number % 3 == 1:
        Store(home).make(Identity("export", {}, {}, {}, KEY), lambda work: fill(work, OLD))
        (home / "artifacts" / KEY[:2] / KEY / "model.onnx").write_bytes(b"damaged")
    if number % 2:
        fill(home / "out" / "bundle", OLD)


def _at_once(gate: int, barrier: int, act: Act, home: Path, number: int, locked: bool) -> Any:
    os.close(barrier)
    os.read(gate, 1)
    with pytest.MonkeyPatch.context() as patch:
        if not locked:
            for name in ("flock", "lockf"):
                patch.setattr(fcntl, name, lambda *arguments: None)
        return act(home, number)


def _one_key(home: Path, number: int) -> str:
    """What the process that made the entry found there, or made: its own files, so that entries can be told apart."""
    store = Store(home)
    own = {"model.onnx": f"of {os.getpid()}".encode() * 500, "weights/w.bin": os.urandom(2000)}
    found = store.find(KEY) or store.make(Identity("export", {}, {}, {}, KEY), lambda work: fill(work, own))
    assert held(found.path).keys() == {*own, RECORD_FILE}, sorted(held(found.path))
    return found.digest


def _entry(home: Path, digests: list[str]) -> str:
    found = Store(home).find(KEY)
    if found is None:
        return "no entry"
    strangers = sorted({*digests} - {found.digest})
    return f"{len(strangers)} processes have another entry than is there" if strangers else entries_whole(home)


def _eight_keys(home: Path, number: int) -> list[str]:
    store, digests = Store(home), []
    for place in range(len(KEYS)):
        key = KEYS[(place + os.getpid()) % len(KEYS)]
        found = store.find(key) or store.make(Identity("export", {}, {}, {}, key), lambda work: fill(work, NEW))
        digests.append(found.digest)
    return digests


def _entries(home: Path, digests: list[list[str]]) -> str:
    entries = [Store(home).find(key) for key in KEYS]
    if None in entries:
        return f"{entries.count(None)} entries are not there"
    return "entries differ" if len({digest for each in digests for digest in each}) > 1 else entries_whole(home)


def _one_output(home: Path, number: int) -> str:
    """ "" or what a process that was not the first is told; in half of the rounds folders cannot be exchanged."""
    with no_exchange() if number % 4 > 1 else contextlib.nullcontext():
        try:
            with replacing(home / "out" / "bundle", OURS) as work:
                fill(work, NEW)
        except OutputError as error:
            return error.message
    return ""


def _output(home: Path, told: list[str]) -> str:
    others = [text for text in told if text and "another process created" not in text]
    if others or "" not in told:
        return f"told: {others or told}"
    return one_of(home / "out" / "bundle", NEW)


def _queue(home: Path, number: int) -> float:
    """When its turn came. The lock of the machine, which orders users, is in a folder of its own."""
    os.environ.update(HOME=str(home), TMPDIR=str(home))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vitdeploy.devices.agent.state.LOOK_SECONDS", 0.01)
        patch.setattr("vitdeploy.benchmark.machine.lock_file", lambda: home / "lock")
        with turn("job", lambda other: None):
            began = time.monotonic()
            time.sleep(0.02)
        return began


def _queued(home: Path, began: list[float]) -> str:
    """One after the other, and no ticket is left."""
    began = sorted(began)
    if any(later - earlier < 0.02 for earlier, later in itertools.pairwise(began)):
        return "two had their turn at once"
    left = list((home / ".cache" / "vitdeploy-agent" / "queue").glob("[0-9]*"))
    return f"{len(left)} tickets are left" if left else ""
