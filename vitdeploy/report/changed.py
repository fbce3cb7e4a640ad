"""The samples whose answer an engine changed: how many, what that did to them, and the worst of them."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.document.answers import ChangedCounts
from vitdeploy.document.report import Report
from vitdeploy.report import examples, text
from vitdeploy.report.examples import Example
from vitdeploy.report.page import RunPage
from vitdeploy.spec import Task


@dataclass(frozen=True)
class ChangedRow:
    """One engine: how many answers are others than the original's, and what that did to them ("" without labels)."""

    artifact: str
    changed: str
    lost: str
    gained: str
    other: str


@dataclass(frozen=True)
class ChangedView:
    """The section. `labelled`: it is known what is right. `ticked`: an answer that is shown is the label. `bars`: what
    they show; None of a task without."""

    title: str
    noun: str
    task: Task
    rows: list[ChangedRow]
    changed: list[Example]
    labelled: bool
    ticked: bool
    bars: str | None


def changed_view(page: RunPage) -> list[ChangedView]:
    """The section; none in a report that does not say what changed."""
    report, rows = page.report, changed_rows(page.report)
    changed, _ = examples.examples(report, page.images)
    if not rows and not changed:
        return []
    labelled, ticked = bool(rows) and rows[0].lost != "", examples.ticked(page)
    noun, bars = report.data.noun, examples.BARS.get(report.task)
    return [ChangedView(f"{noun.capitalize()}s", noun, report.task, rows, changed, labelled, ticked, bars)]


def changed_rows(report: Report) -> list[ChangedRow]:
    """Every engine; none in a report that does not say."""
    found = report.answers.changed if report.answers else {}
    return [_changed(report, name, each) for name, each in found.items()]


def _changed(report: Report, artifact: str, found: ChangedCounts) -> ChangedRow:
    total = next(engine.verify.n for engine in report.engines if engine.artifact == artifact)
    words = f"{text.number(found.changed, 0)} of {text.number(total, 0)}"
    if found.lost is None or found.gained is None:
        return ChangedRow(artifact, words, "", "", "")
    other = found.changed - found.lost - found.gained
    return ChangedRow(artifact, words, *(text.number(each, 0) for each in (found.lost, found.gained, other)))
