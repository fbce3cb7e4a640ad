"""Every conversation with a device that misbehaves in every way: an end in time, an error that says what was found, no
process left, no output."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.faults.devices.board import IMPATIENT, Board, judged, wait_for
from tests.faults.devices.hostile import ACTS
from tests.faults.devices.model import TARGET, Small
from tests.faults.gate import Row

# Seconds: each case waits for its device twice, at most 4 s, and most of the time for a core.
LIMIT = 60.0
AT_ONCE = 4
QUICK = ("--duration", "0.01", "--warmup", "0", "--scenario", "single")
# The verbs of the agent that each command says, but for the last ones with a job that is over.
VERBS = {
    "doctor": ("install", "probe"),
    "compile": ("status", "submit", "watch", "fetch"),
    "bench": ("status", "submit", "watch", "fetch"),
    "verify": ("serve",),
    "deploy": ("deployed", "missing", "submit", "watch", "fetch"),
    "status": ("deployed",),
}
# What says of a device that it could not be asked, and ends well.
TOLD = ("status",)
WAITS = ("queues for ever", "runs for ever")
# One of each way, spread over commands and verbs.
SHORT = (
    ("doctor", "install", "mute"),
    ("doctor", "probe", "drips"),
    ("doctor", "probe", "floods errors"),
    ("compile", "status", "noise"),
    ("compile", "submit", "greets and hangs"),
    ("compile", "watch", "queues for ever"),
    ("compile", "fetch", "endless line"),
    ("bench", "status", "drips its greeting"),
    ("bench", "watch", "runs for ever"),
    ("bench", "fetch", "beats for ever"),
    ("bench", "submit", "shuts its output"),
    ("verify", "serve", "mute"),
    ("verify", "serve", "queues for ever"),
    ("verify", "serve", "flood of beats"),
    ("deploy", "deployed", "endless line"),
    ("deploy", "missing", "drips"),
    ("status", "deployed", "mute"),
)
# What a device says as its result before a stream without end, and as what it is refused.
ABSURD: dict[str, tuple[dict[str, Any], str]] = {
    "a size of -1": ({"files": [{"path": "model.bin", "bytes": -1, "sha256": "0" * 64}]}, "exceeds the limits"),
    "a size of 10^30": ({"files": [{"path": "model.bin", "bytes": 10**30, "sha256": "0" * 64}]}, "exceeds the limits"),
    "a list of a million": ({"left_out": [1] * 1_000_000}, "exceeds the limits"),
    "a text of two million": ({"host": {"cpu": "x" * 2_000_000}}, "exceeds the limits"),
    "a job of another": ({}, "a result of another job"),
}


@dataclass(frozen=True)
class Conversation:
    """What is typed, the verb that misbehaves, and what its device does (hostile.py)."""

    name: str
    command: str
    case: dict[str, Any]
    expected: str = ""


def conversations(full: bool) -> list[Conversation]:
    every = [
        (command, verb, act)
        for command, verbs in VERBS.items()
        for verb in verbs
        for act in ACTS
        if act not in WAITS or verb in ("watch", "serve")
    ]
    chosen = every if full else SHORT
    found = [Conversation(f"{a}, {verb}: {act}", a, {"verb": verb, "act": act}) for a, verb, act in chosen]
    result = {"format": 1, "job": "0" * 64, "host": {}}
    for name, (changes, refused) in ABSURD.items() if full else list(ABSURD.items())[:2]:
        said = json.dumps({**result, **changes}).encode() + b"\n"
        case, expected = {"verb": "fetch", "say": said.hex(), "then": "endless"}, f"VD3106.*{refused}"
        found.append(Conversation(f"compile, fetch: {name}, then an endless stream", "compile", case, expected))
    return found


def words_of(command: str, small: Small, out: Path) -> Sequence[object]:
    graph, on = small.graph, ("--on", "board")
    return {
        "doctor": ("devices", "doctor", "board"),
        "compile": ("compile", graph, "--target", TARGET, "-o", out, *on),
        "bench": ("bench", graph, "--target", TARGET, *QUICK, *on),
        "verify": ("verify", graph, "--target", TARGET, "--against", graph, "--data", small.images, *on),
        "deploy": ("devices", "deploy", small.bundle, *on, "--duration", "0.03"),
        "status": ("devices", "status"),
    }[command]


def conversations_row(full: bool, work: Path, small: Small) -> Row:
    cases = conversations(full)
    row = Row("devices: silence, drips, floods, queues", len(cases) + 2)
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for found in pool.map(
            lambda each: _converse(each[1], work / f"conversation-{each[0]}", small), enumerate(cases)
        ):
            row.add(*found)
        for found in pool.map(lambda mute: _interrupted(mute, work / f"interrupt-{mute}", small), (False, True)):
            row.add(*found)
    return row


def _converse(each: Conversation, folder: Path, small: Small) -> tuple[Any, ...]:
    board, out = Board(folder, each.case), folder / "out"
    done = board.command(*words_of(each.command, small, out), limit=LIMIT)
    told = each.command in TOLD
    outcome, note = judged(done, (0,) if told else (3, 4), "not reachable: board" if told else each.expected)
    outcome = "clean" if told and outcome == "accepted" else outcome
    if outcome == "clean" and (left := board.left()):
        outcome, note = "wrong", f"left running: {left}"
    if outcome == "clean" and out.exists():
        outcome, note = "wrong", "left an output"
    board.end()
    return each.name, outcome, done.seconds, done.peak_mb, note


def _interrupted(mute: bool, folder: Path, small: Small) -> tuple[Any, ...]:
    """Ctrl-C while a job is queued: the device stops it, or the user is told how to fetch its result."""
    waits = {"verb": "watch", "act": "queues for ever"}
    board, out = Board(folder, waits, {**IMPATIENT, "queue": 3600.0}), folder / "out"
    behaved = {"verb": "stop", "act": "greets and hangs"} if mute else waits

    def interrupt(process: int, log: Path) -> None:
        wait_for("waiting for bench of somebody")(process, log)
        board.behave(behaved)
        os.kill(process, signal.SIGINT)

    done = board.command(*words_of("compile", small, out), limit=LIMIT, meanwhile=interrupt)
    said = (
        "the job continues on the device; run the same command later to fetch the result"
        if mute
        else "the job was stopped"
    )
    outcome, note = judged(done, (130,), said)
    if board.left() or out.exists():
        outcome, note = "wrong", "left a process or an output"
    board.end()
    name = f"Ctrl-C, and the device {'does not answer' if mute else 'answers'}"
    return name, outcome, done.seconds, done.peak_mb, note
