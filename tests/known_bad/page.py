"""The table of docs/known-bad.md: `python -m tests.known_bad.page` writes it again."""

from __future__ import annotations

from pathlib import Path

from vitdeploy.known_bad.find import entry_table

PAGE = Path(__file__).parents[2] / "docs" / "known-bad.md"
BEGIN, END = "<!-- entries -->\n", "<!-- end -->\n"


def written() -> str:
    """The page with the table of today."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    return f"{before}{BEGIN}{entry_table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
