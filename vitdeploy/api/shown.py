"""Display results: as text in a terminal, as tables and plots in a notebook."""

from __future__ import annotations

import html
from abc import ABC, abstractmethod
from collections.abc import Sequence

from vitdeploy.api.tables import Line, Table, printed

STYLE = "overflow-x:auto;font-variant-numeric:tabular-nums"


class Shown(ABC):
    """A value with lines of text and tables, and perhaps plots."""

    @abstractmethod
    def lines(self) -> Sequence[Line]:
        """The result as lines for people."""

    def plots(self) -> Sequence[str]:
        """SVG elements that stand below the lines in a notebook."""
        return ()

    def __str__(self) -> str:
        return "\n".join(printed(self.lines(), None))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        parts = [line.html() if isinstance(line, Table) else f"<div>{html.escape(line)}</div>" for line in self.lines()]
        return f'<div style="{STYLE}">{"".join([*parts, *self.plots()])}</div>'
