"""Entries of the table as a person, or a JSON document, is told of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vitdeploy.known_bad.entries import DONE, Entry, table
from vitdeploy.known_bad.find import Match
from vitdeploy.spec import encode


def releases(entry: Entry) -> str:
    """Which releases an entry is about, on what: "openvino <2025.4 on a CPU"."""
    where = ["on any device" if entry.device == "any" else f"on a {entry.device}"]
    where += [f"with {', '.join(entry.isa)}"] if entry.isa else []
    where += [f"without {', '.join(entry.without)}"] if entry.without else []
    where += [f"in {' or '.join(entry.precisions)}"] if entry.precisions else []
    return f"{entry.runtime} {entry.versions or 'of every release'} {' '.join(where)}"


def match_lines(match: Match, done: str = "") -> list[str]:
    """What goes wrong, where, and the way out; `done` says what was done about it, where that is not the usual."""
    entry = match.entry
    return [
        f"{entry.id}  {done or DONE[entry.action]}: {releases(entry)}: {entry.wrong}",
        f"        at:      {match.shown}",
        f"        way out: {entry.way_out}",
        f"        source:  {' '.join(entry.sources)}",
    ]


def described(match: Match) -> dict[str, Any]:
    """The entry, without its pattern, and the nodes that show it."""
    entry = {key: value for key, value in encode(match.entry).items() if key != "pattern"}
    return {**entry, "nodes": list(match.nodes)}


def entry_table() -> str:
    """All entries in Markdown, as the documentation has them."""
    rows = []
    for entry in table():
        sources = ", ".join(f"[{index}]({_link(source)})" for index, source in enumerate(entry.sources, 1))
        cells = (f"`{entry.id}`", releases(entry), entry.wrong, DONE[entry.action], entry.way_out, sources)
        rows.append(f"| {' | '.join((*cells, entry.reproduced))} |")
    head = ("entry", "release and device", "what goes wrong", "vitdeploy", "way out", "sources", "reproduced")
    return "\n".join([f"| {' | '.join(head)} |", "|" + "---|" * len(head), *rows])


def in_spite(artifact: str, accepted: Sequence[str]) -> list[str]:
    """Remarks on an engine whose runtime is known to compute such a graph wrongly, which was accepted."""
    wrong = {entry.id: entry.wrong for entry in table()}
    return [f"{artifact} was compiled in spite of {each}: {wrong.get(each, 'unknown')}." for each in accepted]


def _link(source: str) -> str:
    """An address, or a page of the documentation as its pages name it."""
    return source.removeprefix("docs/")
