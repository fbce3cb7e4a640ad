"""What the gate of `make scale` says: a row for each promise, with what was seen."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tests.faults.gate import this_machine, today

COLUMNS = ("promise", "", "seen", "took, s")


class Missing(Exception):
    """What a row needs and this machine lacks, in words that a person can act on: the row is skipped."""


@dataclass
class Row:
    """One promise. `right`: what was checked and held; `wrong`: what did not; `seen`: figures by what they are called,
    which are told and judge nothing. `skipped`: why nothing was checked. `seconds` that it took."""

    promise: str
    right: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)
    skipped: str = ""
    seconds: float = 0.0
    date: str = field(default_factory=today)
    machine: str = field(default_factory=this_machine)

    def check(self, holds: bool, what: str, note: str = "") -> bool:
        """Note whether something holds; `note` is told where it does not."""
        print(f"{'ok   ' if holds else 'WRONG'}  {what}{'' if holds else f': {note}'}", flush=True)
        (self.right if holds else self.wrong).append(what if holds or not note else f"{what}: {note}")
        return holds

    def same(self, found: Mapping[str, object], expected: Mapping[str, object], what: str) -> bool:
        """Check that two tables are equal, and that there is something in them."""
        names = sorted({*found, *expected})
        differs = [name for name in names if found.get(name) != expected.get(name)]
        return self.check(bool(names) and not differs, what, f"{', '.join(differs[:5]) or 'nothing'} differs")

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong, and something was checked or the row skipped."""
        return not self.wrong and bool(self.right or self.skipped)

    @property
    def verdict(self) -> str:
        return "skipped" if self.skipped else "right" if self.passed else "WRONG"


def table(rows: Sequence[Row]) -> str:
    """The rows as a table of Markdown; below it where they were run, why some were not, and what is wrong."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for row in rows:
        seen = "; ".join(f"{name} {value}" for name, value in row.seen.items())
        lines.append(f"| {row.promise} | {row.verdict} | {seen} | {row.seconds:.0f} |")
    places = sorted({f"on {row.machine}, {row.date}" for row in rows})
    skipped = [f"skipped: {row.promise}: {row.skipped}" for row in rows if row.skipped]
    wrong = [f"WRONG: {row.promise}: {what}" for row in rows for what in row.wrong]
    nothing = [f"WRONG: {row.promise}: nothing was checked" for row in rows if not row.passed and not row.wrong]
    return "\n".join([*lines, "", *places, *skipped, *wrong, *nothing])


def save(rows: Sequence[Row], file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_suffix(".tmp")
    temporary.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")
    temporary.replace(file)


def load(file: Path) -> list[Row]:
    return [Row(**row) for row in json.loads(file.read_text(encoding="utf-8"))]
