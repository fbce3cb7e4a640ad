"""What is lost of a job when its device, its connection or this machine dies: the same command afterwards finishes it.

The agent is the real one, and so is the engine that it builds.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.devices.board import REAL, Board, Done, judged, wait_for
from tests.faults.devices.conversations import QUICK
from tests.faults.devices.model import Small
from tests.faults.gate import Outcome, Row
from tests.held import held

LIMIT = 120.0
AT_ONCE = 2
SEED = 21
TARGET = "openvino-cpu"  # whose engine has files of its own
# Where the connection is cut, by verb of the agent: after so many lines that it said, and bytes more; after so many
# bytes that it heard. The greeting is its first line.
CUTS: dict[str, tuple[dict[str, int], ...]] = {
    "status": ({}, {"lines": 1}, {"lines": 1, "bytes": 10}, {"lines": 2}),
    "submit": ({"heard": 0}, {"heard": 1000}, {"heard": 100_000}, {"lines": 1}, {"lines": 1, "bytes": 5}, {"lines": 2}),
    "watch": ({}, {"lines": 1}, {"lines": 1, "bytes": 5}, {"lines": 2}, {"lines": 3}),
    "fetch": ({}, {"lines": 1}, {"lines": 1, "bytes": 50}, {"lines": 2}, {"lines": 2, "bytes": 1000}),
    "remove": ({}, {"lines": 1}),
    "deployed": ({}, {"lines": 1}, {"lines": 1, "bytes": 5}),
    "missing": ({}, {"heard": 0}, {"heard": 100}, {"lines": 1}, {"lines": 1, "bytes": 5}),
    "serve": ({}, {"heard": 1000}, {"lines": 1}, {"lines": 2}, {"lines": 2, "bytes": 50}, {"lines": 3}, {"lines": 4}),
}
SHORT_CUTS = (("fetch", 4),)
# What says each verb; others are said by `compile`. A roll-out has two jobs, and so says all of them twice.
SAID_BY = {"serve": ("verify",), "deployed": ("deploy",), "missing": ("deploy",)}
SAID_BY |= dict.fromkeys(("submit", "watch", "fetch"), ("compile", "deploy"))


@dataclass(frozen=True)
class Loss:
    """One case: how the device behaves, what happens meanwhile, how the first command may end. `waits`: while somebody
    else has the device."""

    name: str
    case: dict[str, Any]
    command: str = "compile"
    statuses: tuple[int, ...] = (0, 4)
    expected: str = ""
    meanwhile: Callable[[Board, int, Path], None] | None = None
    largest: int = 0
    waits: bool = False


def lost_row(full: bool, work: Path, small: Small) -> Row:
    losses = [*_cuts(full), *_deaths(full)]
    row = Row("devices: connection cut, host or device dies, disk full", len(losses))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for found in pool.map(lambda each: _lose(each[1], work / f"lost-{each[0]}", small), enumerate(losses)):
            row.add(*found)
    return row


def _cuts(full: bool) -> list[Loss]:
    chosen = [(verb, CUTS[verb][number]) for verb, number in SHORT_CUTS]
    if full:
        chosen = [(verb, where) for verb, each in CUTS.items() for where in each]
    said = [", ".join(f"{count} {what}" for what, count in where.items()) or "nothing" for _, where in chosen]
    return [
        Loss(
            f"{command}, {verb}: cut after {after}",
            {"verb": verb, "times": 1, "real": True, **where},
            command,
        )
        for (verb, where), after in zip(chosen, said, strict=True)
        for command in SAID_BY.get(verb, ("compile",))[: None if full else 1]
    ]


def _deaths(full: bool) -> list[Loss]:
    real, chance = {"verb": "none", "real": True}, random.Random(SEED)
    mute = {"verb": "remove", "act": "greets and hangs", "times": 1, "real": True}
    small_disk = {"verb": "submit", "times": 1, "largest": 20_000, "real": True}
    delays = [chance.uniform(0.2, 4.0) for _ in range(20 if full else 1)]
    killed = [
        Loss(f"host killed after {delay:.1f} s", real, "compile", (-9, 0), meanwhile=_kill(delay)) for delay in delays
    ]
    small_files = {"verb": "submit", "times": 1, "largest": 20_000, "real": True}
    short = [*killed, Loss("disk full there", small_disk, "compile", (4,), "VD4101")]
    if not full:
        return short
    bench_cut = {"verb": "watch", "times": 1, "real": True, "lines": 2}
    return [
        *short,
        Loss("deploy: killed while it switches", real, "deploy", (4,), "the job was lost", meanwhile=_kill_switch),
        Loss("deploy: disk full there", small_files, "deploy", (4,), "VD4101"),
        Loss("job killed there", real, "compile", (4,), "the job was lost", meanwhile=_kill_job, waits=True),
        Loss("disk full here", real, "compile", (4,), "VD4101.*cannot be written", largest=20_000),
        Loss("the last word is never answered", mute, "compile", (0,)),
        Loss("bench: cut while it is watched", bench_cut, "bench"),
        Loss("bench: host killed", real, "bench", (-9, 0), meanwhile=_kill(4.0)),
        Loss("its folder there is emptied while it waits", real, "compile", (4,), meanwhile=_empty, waits=True),
    ]


def _words(command: str, small: Small, out: Path) -> tuple[object, ...]:
    on = ("--on", "board")
    return {
        "compile": ("compile", small.graph, "--target", TARGET, "-o", out, *on),
        "bench": ("bench", small.graph, "--target", TARGET, *QUICK, *on),
        "verify": ("verify", small.graph, "--target", TARGET, "--against", small.graph, "--data", small.images, *on),
        "deploy": ("devices", "deploy", small.bundle, "--duration", "0.5", *on),
    }[command]


def _lose(loss: Loss, folder: Path, small: Small) -> tuple[Any, ...]:
    board, out = Board(folder, loss.case, dict(REAL)), folder / "out"
    words = _words(loss.command, small, out)
    happens = loss.meanwhile

    def meanwhile(process: int, log: Path) -> None:
        if happens is not None:
            happens(board, process, log)

    with held(folder / "home/tmp") if loss.waits else contextlib.nullcontext():
        first = board.command(*words, limit=LIMIT, largest=loss.largest, meanwhile=meanwhile)
    outcome, note = _first(first, loss)
    seconds = first.seconds
    if outcome == "clean":
        again = board.command(*words, limit=LIMIT)
        seconds = max(seconds, again.seconds)
        outcome, note = judged(again, (0,))
        note = f"the same command: {note}"
        outcome = "clean" if outcome == "accepted" else outcome
    if outcome == "clean" and (left := _left(board, loss, out)):
        outcome, note = "wrong", left
    board.end()
    return loss.name, outcome, seconds, first.peak_mb, note


def _first(done: Done, loss: Loss) -> tuple[Outcome, str]:
    """Whether the first command ended as it may."""
    if done.status == -9 and -9 in loss.statuses:
        return "clean", "killed"
    outcome, note = judged(done, loss.statuses, loss.expected)
    return ("clean" if outcome == "accepted" else outcome), note


def _left(board: Board, loss: Loss, out: Path) -> str:
    """What is wrong afterwards: a job that is still there, an engine that is not whole."""
    from vitdeploy.bundle.read import read_bundle, verify_files

    if loss.command == "compile":
        verify_files(out, read_bundle(out))
    if loss.command == "deploy":
        link = board.folder / "home/.local/share/vitdeploy/deployed/small/current"
        verify_files(link, read_bundle(link))
    found = board.left()
    if board.jobs or found:
        return f"left there: {', '.join(job.name[:8] for job in board.jobs)} {found}"
    return ""


# --- what happens meanwhile -------------------------------------------------------------------------------------------


def _kill(delay: float) -> Callable[[Board, int, Path], None]:
    def kill(board: Board, process: int, log: Path) -> None:
        time.sleep(delay)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)

    return kill


def _waits(board: Board, process: int, log: Path) -> Path:
    """The status of the job, once it waits for the device."""
    wait_for("board: waiting for")(process, log)
    return board.jobs[0] / "status.json"


def _kill_job(board: Board, process: int, log: Path) -> None:
    status = json.loads(_waits(board, process, log).read_text())
    os.kill(status["process"]["pid"], signal.SIGKILL)


def _kill_switch(board: Board, process: int, log: Path) -> None:
    """The device loses its power while the link is at a release that nobody has found good."""
    wait_for("board: switch")(process, log)
    record = board.folder / "home/.local/share/vitdeploy/deployed/small/record.json"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError, ValueError, TypeError):
            os.killpg(json.loads(record.read_text())["move"]["process"]["pid"], signal.SIGKILL)
            return
        time.sleep(0.02)


def _empty(board: Board, process: int, log: Path) -> None:
    status = json.loads(_waits(board, process, log).read_text())
    shutil.rmtree(board.jobs[0])
    os.kill(status["process"]["pid"], signal.SIGKILL)
