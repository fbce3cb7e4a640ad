"""Format values: tables that fit the terminal, numbers and sizes.

On a narrow terminal, columns are dropped in a defined order, and a note names them.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vitdeploy.verification.comparison import Control


@dataclass(frozen=True)
class Column:
    """`keep`: the least goes first where the terminal is narrow; the first column stays. Numbers stand at the right."""

    name: str
    keep: int = 0
    left: bool = False
    least: int = 0


@dataclass(frozen=True)
class Table:
    """Rows of cells, one per column; a shorter row is a subject with a remark: "failed: ..."."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]

    def lines(self, width: int | None = None) -> list[str]:
        """The table in at most `width` columns of characters; None: as wide as it is."""
        every = range(len(self.columns))
        shown = list(every)
        while width is not None and self._wide(shown) > width and len(shown) > 1:
            shown.remove(min(shown[1:], key=lambda index: (self.columns[index].keep, -index)))
        for index in sorted(set(every) - set(shown), key=lambda index: -self.columns[index].keep):
            if width is not None and self._wide(sorted([*shown, index])) <= width:  # a wide one made room
                shown = sorted([*shown, index])
        dropped = [self.columns[index].name for index in every if index not in shown]
        lines = [line for row in self._all() for line in self._row(row, shown, width)]
        if dropped:
            lines += wrapped(f"(not shown in {width} columns: {', '.join(dropped)}; --json has all)", width)
        return lines

    def html(self) -> str:
        """The table for a notebook."""
        head = "".join(f"<th>{html.escape(column.name)}</th>" for column in self.columns)
        rows = "".join(f"<tr>{self._html_cells(row)}</tr>" for row in self.rows)
        return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"

    def _html_cells(self, row: tuple[str, ...]) -> str:
        if len(row) < len(self.columns):
            rest = html.escape("  ".join(row[1:]))
            return f'<td>{html.escape(row[0])}</td><td colspan="{len(self.columns) - 1}">{rest}</td>'
        return "".join(f"<td>{html.escape(cell)}</td>" for cell in row)

    def _all(self) -> tuple[tuple[str, ...], ...]:
        return (tuple(column.name for column in self.columns), *self.rows)

    def _widths(self, shown: Sequence[int]) -> list[int]:
        full = [row for row in self._all() if len(row) == len(self.columns)]
        widths = [max(self.columns[index].least, *(len(row[index]) for row in full)) for index in shown]
        if self.columns[shown[-1]].left:  # nothing stands behind it
            widths[-1] = max(len(row[shown[-1]]) for row in full)
        return widths

    def _wide(self, shown: Sequence[int]) -> int:
        return sum(self._widths(shown)) + 2 * (len(shown) - 1)

    def _row(self, row: tuple[str, ...], shown: Sequence[int], width: int | None) -> list[str]:
        widths = self._widths(shown)
        if len(row) < len(self.columns):
            return wrapped("  ".join([row[0].ljust(widths[0]), *row[1:]]), width)
        cells = [
            row[index].ljust(size) if self.columns[index].left or index == 0 else row[index].rjust(size)
            for index, size in zip(shown, widths, strict=True)
        ]
        return wrapped("  ".join(cells).rstrip(), width)


Line = str | Table


def printed(lines: Sequence[Line], width: int | None) -> list[str]:
    """Lines of text: tables and long texts in `width` columns, where there is such a bound."""
    found: list[str] = []
    for line in lines:
        found += line.lines(width) if isinstance(line, Table) else wrapped(line, width)
    return found


def wrapped(text: str, width: int | None) -> list[str]:
    """The lines of a text, the long ones broken between words, and what follows indented; paths stay whole."""
    found = []
    for line in text.split("\n"):
        if width is None or len(line) <= width:
            found.append(line)
            continue
        indent = " " * (len(line) - len(line.lstrip(" ")) + 4)
        found += textwrap.wrap(
            line,
            max(width, 20),
            subsequent_indent=indent,
            break_long_words=False,
            break_on_hyphens=False,
            replace_whitespace=False,
            drop_whitespace=True,
        )
    return found


def human_bytes(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def unrelated(control: Control | None) -> str:
    """What stands behind an agreement: that of answers to other images."""
    return "" if control is None else f", unrelated {control.agreement:.2f} %"


def interval(value: float, bounds: Sequence[float] | None, digits: int = 2) -> str:
    """A value with its interval, where there is one."""
    if bounds is None:
        return f"{value:.{digits}f}"
    low, high = bounds
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"
