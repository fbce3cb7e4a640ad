"""One target fuzzed for a while, in a process of its own: python -m tests.faults.fuzzing.session TARGET ...

Guided by coverage: atheris (libFuzzer) where it is installed, which is optional; otherwise hypothesis, whose `target()`
is given the lines of vitdeploy that an input reaches, and to whose seeds each input is added that reaches a new one.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import vitdeploy
from tests.faults.fuzzing.minimise import minimised
from tests.faults.fuzzing.targets import TARGETS, Read, Target, documented
from tests.faults.seeds import Seeds

PACKAGE = str(Path(vitdeploy.__file__).parent)
INPUT_SECONDS, INPUT_MEGABYTES = 10.0, 1024
MINIMISE_SECONDS = 20.0
# Of libFuzzer: an input may be as long as this. What is long is mostly numbers.
LONGEST = 1 << 16


class TooSlow(BaseException):
    """An input that has no end within INPUT_SECONDS. No reader's `except Exception` catches it."""


class Session:
    """Runs inputs, counts them, and keeps one of each failure. `folder` gets them, and `result.json`."""

    read: Read

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.folder = target, folder
        self.inputs = self.accepted = 0
        self.slowest = 0.0
        self.failures: dict[str, bytes] = {}
        self.saved = time.monotonic()
        folder.mkdir(parents=True, exist_ok=True)

    def open(self, work: Path, seeds: Seeds) -> None:
        """Load what the reader needs."""
        self.read = self.target.open(work, seeds)

    def __call__(self, data: bytes) -> None:
        """Never raises, so that one failure does not hide the next."""
        (self.folder / "last.bin").write_bytes(data)  # the one that ends this process
        started, before = time.monotonic(), _peak_mb()
        failure = self.failure_of(data)
        self.inputs += 1
        self.slowest = max(self.slowest, time.monotonic() - started)
        if not failure and _peak_mb() - before > INPUT_MEGABYTES:
            failure = f"memory: {_peak_mb() - before:,.0f} MB"
        if failure and failure not in self.failures:
            self.failures[failure] = data
            (self.folder / f"{_digest(data)}.bin").write_bytes(data)
        if failure or time.monotonic() - self.saved > 0.5:
            self.save()

    def failure_of(self, data: bytes) -> str:
        """What was raised that is not documented, and where; "" if nothing was."""
        before = signal.signal(signal.SIGALRM, _too_slow)
        signal.setitimer(signal.ITIMER_REAL, INPUT_SECONDS)
        try:
            self.accepted += documented(self.read, data)
        except TooSlow:
            return f"no end within {INPUT_SECONDS:.0f} s"
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            return _where(error)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before or signal.SIG_DFL)
        return ""

    def save(self) -> None:
        self.saved = time.monotonic()
        found = [{"failure": each, "file": f"{_digest(data)}.bin"} for each, data in self.failures.items()]
        facts = {"inputs": self.inputs, "accepted": self.accepted, "slowest": self.slowest, "failures": found}
        (self.folder / "result.tmp").write_text(json.dumps({**facts, "peak_mb": _peak_mb()}), encoding="utf-8")
        (self.folder / "result.tmp").replace(self.folder / "result.json")

    def minimise(self) -> None:
        """Smaller inputs that fail in the same way, in the place of those that an earlier process found."""
        found = json.loads((self.folder / "result.json").read_text(encoding="utf-8"))
        self.inputs, self.accepted, self.slowest = found["inputs"], found["accepted"], found["slowest"]
        self.failures = {each["failure"]: (self.folder / each["file"]).read_bytes() for each in found["failures"]}
        deadline = time.monotonic() + MINIMISE_SECONDS
        for failure, data in list(self.failures.items()):
            if failure.startswith(("no end", "memory")):  # each try would take as long
                continue
            small = minimised(data, lambda each, failure=failure: self.failure_of(each) == failure, deadline)
            self.failures[failure] = small
            (self.folder / f"{_digest(small)}.bin").write_bytes(small)
        self.save()


def _too_slow(number: int, frame: FrameType | None) -> None:
    raise TooSlow


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:12]


def _where(error: BaseException) -> str:
    """The type, and the innermost line of ours: two inputs with the same are one failure."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(PACKAGE)]
    place = f"{Path(frames[-1].filename).relative_to(PACKAGE)}:{frames[-1].lineno}" if frames else "outside"
    return f"{type(error).__name__} at {place}" + ("" if frames else f": {ascii(str(error))[:200]}")


# --- engines ----------------------------------------------------------------------------------------------------------


def with_atheris(target: Target, session: Session, work: Path, seeds: Seeds, seconds: float) -> None:
    """It does not return: libFuzzer ends the process when the time is over."""
    import atheris

    with atheris.instrument_imports(include=["vitdeploy"]):
        for name in target.modules:
            importlib.import_module(name)
        session.open(work, seeds)
        for each in target.seeds(seeds):  # what is imported at the first use is instrumented too
            session(each)
    corpus = work / "corpus"
    corpus.mkdir()
    for number, each in enumerate(target.seeds(seeds)):
        (corpus / str(number)).write_bytes(each)
    words = [f"-max_total_time={max(1, round(seconds))}", f"-artifact_prefix={work}/failures/", f"-max_len={LONGEST}"]
    atheris.Setup([sys.argv[0], *words, "-rss_limit_mb=6000", "-verbosity=0", "-seed=1", str(corpus)], session)
    atheris.Fuzz()


def with_hypothesis(target: Target, session: Session, work: Path, seeds: Seeds, seconds: float) -> None:
    from hypothesis import HealthCheck, Phase, given, settings
    from hypothesis import seed as seeded
    from hypothesis import strategies as st
    from hypothesis import target as aim

    session.open(work, seeds)
    lines, corpus = Lines(), list(target.seeds(seeds))
    for each in corpus:
        lines.of(lambda each=each: session(each))
    edit = st.tuples(
        st.sampled_from(EDITS),
        st.integers(0, 1 << 16),
        st.one_of(st.binary(min_size=1, max_size=12), st.sampled_from(TOKENS)),
    )
    started, number = time.monotonic(), 0
    while time.monotonic() - started < seconds:
        number += 1

        @seeded(number)
        @settings(
            max_examples=150,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.target),
            suppress_health_check=list(HealthCheck),
        )
        @given(st.sampled_from(list(corpus)), st.lists(edit, min_size=1, max_size=6))
        def attack(whole: bytes, edits: list[tuple[Any, int, bytes]]) -> None:
            if time.monotonic() - started > seconds:
                return
            data = whole
            for change, at, text in edits:
                data = change(data, at % (len(data) + 1), text)[: 4 * LONGEST]
            reached, new = lines.of(lambda: session(data))
            aim(float(reached + 10 * new))
            if new and len(corpus) < 2000:
                corpus.append(data)

        attack()


class Lines:
    """Which lines of vitdeploy have been reached."""

    def __init__(self) -> None:
        self.all: set[tuple[int, int]] = set()

    def of(self, function: Callable[[], None]) -> tuple[int, int]:
        """How many lines a call reaches, and how many of them nothing has reached before."""
        found: set[tuple[int, int]] = set()

        def local(frame: FrameType, event: str, argument: object) -> Any:
            if event == "line":
                found.add((id(frame.f_code), frame.f_lineno))
            return local

        def trace(frame: FrameType, event: str, argument: object) -> Any:
            return local if frame.f_code.co_filename.startswith(PACKAGE) else None

        sys.settrace(trace)
        try:
            function()
        finally:
            sys.settrace(None)
        new = found - self.all
        self.all |= new
        return len(found), len(new)


def _replace(data: bytes, at: int, text: bytes) -> bytes:
    return data[:at] + text + data[at + len(text) :]


def _insert(data: bytes, at: int, text: bytes) -> bytes:
    return data[:at] + text + data[at:]


def _delete(data: bytes, at: int, text: bytes) -> bytes:
    return data[:at] + data[at + 4 * len(text) :]


def _repeat(data: bytes, at: int, text: bytes) -> bytes:
    return data[:at] + data[at : at + 8 * len(text)] * (1 + text[0] % 8) + data[at:]


def _flip(data: bytes, at: int, text: bytes) -> bytes:
    return data[:at] + bytes([data[at] ^ 1 << text[0] % 8]) + data[at + 1 :] if at < len(data) else data


def _cut(data: bytes, at: int, text: bytes) -> bytes:
    return data[:at]


EDITS = (_replace, _insert, _delete, _repeat, _flip, _cut)
TOKENS = (
    *(b"\0", b"\xff" * 4, b"\xff" * 8, b"\x7f\xff\xff\xff", b"\x80\0\0\0", b"\0\0\0\x80", b"\xff" * 9 + b"\x01"),
    *(
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b",",
        b": ",
        b"null",
        b"-1",
        b"1e999",
        b"NaN",
        b"9" * 12,
        b"&a",
        b"*a",
        b"!!",
        b"\r\n",
    ),
    *(
        b"PK\x01\x02",
        b"PK\x03\x04",
        b"PK\x05\x06",
        b"../",
        b"%00",
        b"chunked",
        b"\\ud800",
        b"\xed\xa0\x80",
        b"c",
        b"R.",
    ),
)


ENGINES = {"atheris": with_atheris, "hypothesis": with_hypothesis}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", choices=list(TARGETS))
    parser.add_argument("--engine", choices=list(ENGINES), required=True)
    parser.add_argument("--seconds", type=float, required=True, help="0: make smaller what an earlier call found")
    parser.add_argument("--seeds", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    options = parser.parse_args()
    target, seeds = TARGETS[options.target], Seeds(options.seeds)
    session = Session(target, options.work / "failures")
    if options.seconds:
        ENGINES[options.engine](target, session, options.work, seeds, options.seconds)
        session.save()
    else:
        session.open(options.work, seeds)
        session.minimise()
    sys.stdout.flush()
    os._exit(0)  # the threads of a server would be waited for


if __name__ == "__main__":
    main()
