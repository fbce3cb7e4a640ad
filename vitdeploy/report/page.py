"""The structure of a page: a table of sections, each with its view of a document and its template."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from vitdeploy.document.report import Report

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
