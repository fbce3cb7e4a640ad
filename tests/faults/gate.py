"""What the gate of `make faults` counts: rows of cases, each case with one outcome."""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

# clean: refused or ended as documented. accepted: taken, rightly. crash: a bug in vitdeploy, a traceback, a signal.
# hang: no end within its limit. wrong: something was lost, left behind, or answered wrongly without a word.
Outcome = Literal["clean", "accepted", "crash", "hang", "wrong"]
BAD: tuple[Outcome, ...] = ("crash", "hang", "wrong")
# How a line begins that a figure prints for each case: by these, whoever waits for it counts them.
TOLD = "case: "


@functools.cache
def this_machine() -> str:
    """This machine in words, as it stands beside what was counted on it."""
    from vitdeploy.runtime.host import describe_host

    facts = describe_host()
    return f"{facts['cores']} cores of {facts['cpu']}"


def today() -> str:
    return datetime.now(timezone.utc).date().isoformat()


def asked_seconds() -> float:
    """How long the server is loaded at least, where the environment asks for more than the figure does."""
    return float(os.environ.get("VITDEPLOY_FAULT_SECONDS", 0))


@dataclass(frozen=True)
class Case:
    """One case: `seconds` it took, `peak_mb` of resident memory where it was measured, `note` what is to be known."""

    name: str
    outcome: Outcome
    seconds: float = 0.0
    peak_mb: float = 0.0
    note: str = ""


@dataclass
class Row:
    """A line of the table. `expected`: the number of cases, and what else must hold. `missing`: why it did not run
    here, or only in part. `seconds` that it took; `date` and `machine`: when and where it was run."""

    figure: str
    expected: int
    cases: list[Case] = field(default_factory=list)
    missing: str = ""
    seconds: float = 0.0
    date: str = field(default_factory=today)
    machine: str = field(default_factory=this_machine)

    def add(self, name: str, outcome: Outcome, seconds: float = 0.0, peak_mb: float = 0.0, note: str = "") -> None:
        self.cases.append(Case(name, outcome, seconds, peak_mb, note))
        print(f"{TOLD}{self.figure}: {name!a}: {outcome}", flush=True)

    def count(self, *outcomes: Outcome) -> int:
        return sum(case.outcome in outcomes for case in self.cases)

    @property
    def bad(self) -> list[Case]:
        return [case for case in self.cases if case.outcome in BAD]

    @property
    def passed(self) -> bool:
        """Whether all was run, and nothing lies outside of what is allowed. What cannot run here does not fail."""
        return not self.bad and (bool(self.missing) or len(self.cases) >= self.expected)


def timed(figure: Callable[..., Row], *arguments: Any) -> Row:
    """The row that a function makes, with the seconds that it took."""
    started = time.monotonic()
    row = figure(*arguments)
    row.seconds = time.monotonic() - started
    return row


COLUMNS = (
    *("figure", "cases", "clean", "accepted", "crash", "hang", "wrong"),
    *("slowest, s", "largest, MB", "took, s", "run"),
)


def table(rows: list[Row]) -> str:
    """The rows as a table of Markdown, and below it where they were run, and what is outside of what is allowed."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for row in rows:
        slowest = max((case.seconds for case in row.cases), default=0.0)
        largest = max((case.peak_mb for case in row.cases), default=0.0)
        cases = f"{len(row.cases):,}" + ("" if len(row.cases) >= row.expected else f" of {row.expected:,}")
        counts = [f"{row.count(each):,}" for each in ("clean", "accepted", *BAD)]
        numbers = [f"{slowest:.1f}" if slowest else "", f"{largest:,.0f}" if largest else "", f"{row.seconds:.0f}"]
        lines.append(f"| {' | '.join([row.figure, cases, *counts, *numbers, row.date])} |")
    return "\n".join([*lines, "", *_machines(rows), *_remarks(rows)])


def _machines(rows: list[Row]) -> Iterator[str]:
    found: dict[str, list[str]] = {}
    for row in rows:
        found.setdefault(row.machine, []).append(row.figure)
    for name, figures in found.items():
        yield f"on {name}: {'; '.join(figures) if len(found) > 1 else 'all'}"


def _remarks(rows: list[Row]) -> Iterator[str]:
    for row in rows:
        if row.missing:
            yield f"{row.figure}: {row.missing}"
        elif len(row.cases) < row.expected:
            yield f"{row.figure}: {len(row.cases)} cases, and {row.expected} are expected"
        for case in row.bad:
            yield f"{row.figure}: {case.outcome.upper()}  {case.name}  {case.note}"


def save(rows: list[Row], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    temporary.replace(file)


def load(file: Path) -> list[Row]:
    found = json.loads(file.read_text(encoding="utf-8"))
    return [Row(**{**row, "cases": [Case(**case) for case in row["cases"]]}) for row in found]
