"""The tables of docs/results/compatibility/: a test writes each row, and compares it ever after."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent.parent / "docs" / "results" / "compatibility"
BETWEEN = "<br>"
REWRITE = "pytest tests/compatibility --write-compatibility rewrites the pages"


@dataclass(frozen=True)
class Page:
    """One page with one table. `rows` are the first cells of all its rows, in their order; those with equal other cells
    share a line of the page.

    Cells hold what is the same on every machine: no times, no measured numbers.
    """

    name: str
    head: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.md"

    def check(self, cells: Sequence[str], *, write: bool) -> None:
        """Assert that the page has this row; with `write`, put it there instead.

        One process at a time may write a page: keep all tests of one page in one file.
        """
        if len(cells) != len(self.columns) or cells[0] not in self.rows:
            raise ValueError(f"no row of {self.name}: {list(cells)}")
        found = self.read()
        if write:
            self._write({**found, cells[0]: tuple(cells)})
        else:
            assert found.get(cells[0]) == tuple(cells), REWRITE

    def read(self) -> dict[str, tuple[str, ...]]:
        """The rows of the page by their first cells."""
        if not self.path.exists():
            return {}
        lines = [line for line in self.path.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
        rows = [tuple(line.strip("|").strip().split(" | ")) for line in lines[1:]]
        return {name: (name, *rest) for first, *rest in rows if first != "---" for name in first.split(BETWEEN)}

    def _write(self, found: dict[str, tuple[str, ...]]) -> None:
        groups: dict[tuple[str, ...], list[str]] = {}
        for name in (name for name in self.rows if name in found):
            groups.setdefault(found[name][1:], []).append(name)
        rows = [(BETWEEN.join(names), *rest) for rest, names in groups.items()]
        lines = [self.columns, ("---",) * len(self.columns), *rows]
        table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
        self.path.parent.mkdir(exist_ok=True)
        self.path.write_text(f"{self.head}\n{table}", encoding="utf-8")
