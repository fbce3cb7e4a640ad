"""The frame of a page: its sections and notes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from vitdeploy.document.report import Report

# --- The structure of a page: a table of sections, each with its view of a document and its template ------------------


Document = TypeVar("Document")


@dataclass(frozen=True)
class RunPage:
    """A report, with the pictures that its examples name."""

    report: Report
    images: Mapping[str, bytes]


@dataclass(frozen=True)
class Section(Generic[Document]):
    """A row of a page's table.

    `views` gives what the template shows as `view`, typed: nothing where the document has nothing of the kind, several
    where `anchor` counts them by "{number}". In `title` the attributes of the view may stand, as "{view.noun}s". `css`:
    a class of the section.
    """

    anchor: str
    title: str
    views: Callable[[Document], Sequence[object]]
    template: str
    css: str = ""


@dataclass(frozen=True)
class Shown:
    """One section that there is; the names are those that the templates use."""

    anchor: str
    title: str
    view: object
    template: str
    css: str


def shown(sections: Sequence[Section[Document]], document: Document) -> Iterator[Shown]:
    """The sections of a document, in the table's order."""
    for section in sections:
        for number, view in enumerate(section.views(document), start=1):
            title = section.title.format(view=view)
            yield Shown(section.anchor.format(number=number), title, view, section.template, section.css)


# --- Notes to the numbers: warnings of the run, undecided measurements, and the meaning of the flags ------------------
# docs/measuring.md says exactly when each flag is set.


MEANINGS = {
    "not shipped": "made for the comparison, and not in the bundle",
    "throttled": "the machine became slower while it was measured, as when it is too hot or has too little power",
    "unstable": "the times of blocks, or of processes, vary so much that the median is not known to 10 %",
    "contended": "other programs, or other virtual machines, used the same processors",
    "fallback": "it ran on something else than when the engine was made",
    "short": "too few queries for the highest percentile that was asked for",
    "overloaded": "more queries arrived than could be answered: the queue only grew",
    "suspended": "the machine slept while it was measured",
}


@dataclass(frozen=True)
class Notice:
    """`kind` is the class of its colours, as of a gate. `folded`: the lines show when they are asked for."""

    kind: str
    title: str
    lines: list[str]
    folded: bool = False


def notices(warnings: Sequence[str], *undecided: Mapping[str, str]) -> list[Notice]:
    """The warnings, and the artifacts of each bench whose speed is not decided, by name with the reason; those of one
    reason together."""
    found = [Notice("fail", "Check this first", list(warnings))] if warnings else []
    if lines := by_reason(*undecided):
        found.append(Notice("undecided", "Speed is not decided", lines, folded=True))
    return found


def by_reason(*undecided: Mapping[str, str]) -> list[str]:
    """The artifacts of each bench whose speed is not decided, those of one reason together."""
    reasons: dict[str, list[str]] = {}
    for bench in undecided:
        for artifact, reason in bench.items():
            reasons.setdefault(reason, []).append(artifact)
    return [f"{', '.join(dict.fromkeys(names))}: {reason}" for reason, names in reasons.items()]


def legend(flags: Iterable[str]) -> list[tuple[str, str]]:
    """Each flag that is used with its meaning, in the order of MEANINGS; one that is not known has none."""
    used = list(dict.fromkeys(flags))
    order = sorted(used, key=lambda flag: list(MEANINGS).index(flag) if flag in MEANINGS else len(MEANINGS))
    return [(flag, MEANINGS.get(flag, "")) for flag in order]
