"""The table of docs/results/known-bad.md: `python -m tests.known_bad.page` writes it again."""

from __future__ import annotations

import os
from pathlib import Path

from vitdeploy.known_bad.entries import DONE, table
from vitdeploy.known_bad.find import releases

PAGE = Path(__file__).parents[2] / "docs" / "results" / "known-bad.md"
BEGIN, END = "<!-- entries -->\n", "<!-- end -->\n"


def entry_table() -> str:
    """All entries in Markdown, as the documentation has them."""
    rows = []
    for entry in table():
        links = (os.path.relpath(each, "docs/results") if each.startswith("docs/") else each for each in entry.sources)
        sources = ", ".join(f"[{index}]({link})" for index, link in enumerate(links, 1))
        cells = (f"`{entry.id}`", releases(entry), entry.wrong, DONE[entry.action], entry.way_out, sources)
        rows.append(f"| {' | '.join((*cells, entry.reproduced))} |")
    head = ("entry", "release and device", "defect", "vitdeploy", "fix", "sources", "reproduced")
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *rows])


def written() -> str:
    """The page with the table of today."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{entry_table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
