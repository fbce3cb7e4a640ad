"""The head of a page: the summary, notes, sections."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.document.engine import EngineFacts
from vitdeploy.document.report import Report
from vitdeploy.report import accuracy as classes
from vitdeploy.report import context as reliability
from vitdeploy.report import examples, lookup, measures, quantization, table, text
from vitdeploy.report import page as notes
from vitdeploy.report.examples import Example
from vitdeploy.report.page import RunPage
from vitdeploy.runtime.host import name_host
from vitdeploy.spec import Task, bound_words
from vitdeploy.tasks.answers import ChangedCounts
from vitdeploy.tasks.registry import TASKS

# --- The samples whose answer an engine changed: how many, what that did to them, and the worst of them ---------------


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
    noun, bars = report.data.noun, TASKS[report.task].score
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


# --- The one-page summary of a run: what was found in one per line, with where the page says more ---------------------


@dataclass(frozen=True)
class Line:
    """One question, its answer, and the id of the section that says more ("" of none)."""

    name: str
    words: str
    section: str


@dataclass(frozen=True)
class SummaryView:
    """The section."""

    lines: list[Line]


def summary_view(page: RunPage) -> list[SummaryView]:
    """The section; none of a report without engines."""
    found = summary(page.report)
    return [SummaryView(found)] if found else []


def summary(report: Report) -> list[Line]:
    """The summary of the recommended engine, or else of the first that is shipped; nothing without engines."""
    names = lookup.focus(report)
    engine = report.engine(names[0]) if names else None
    if engine is None:
        return []
    artifact = names[0]
    found = [
        Line("Engine", _engine(report, engine), "comparison"),
        Line("Answers", _answers(report, engine), "comparison"),
        Line("Changed answers", _summary_changed(report, artifact), "changed"),
        Line("Classes", _classes(report, artifact), "classes"),
        Line("Confidence", _confidence(report, artifact), "reliability"),
        Line("Speed", _speed(report, artifact), "comparison"),
        Line("Where the time goes", _time(report, artifact), "context"),
        Line("What INT8 costs", _cost(engine), _sensitivity_section(report, artifact)),
        Line("Flags", _flags(report), "flags"),
        Line("Measured", _measured(report), "details"),
    ]
    return [line for line in found if line.words]


def _engine(report: Report, engine: EngineFacts) -> str:
    starred = engine.artifact == lookup.starred(report)
    parts = [
        f"{engine.artifact}, {engine.precision} on {engine.provider}, {text.megabytes(engine.bytes)} MB",
        "recommended" if starred else report.verdict.grade or "not recommended",
        table.gate(engine.gate.status, table.judges(report)).words.lower(),
    ]
    return "; ".join(parts)


def _answers(report: Report, engine: EngineFacts) -> str:
    verify = engine.verify
    cell = table.agreement(verify)
    words = f"{cell.value} % as the original ({cell.note})"
    metric = measures.metric(report)
    if metric is None or verify.drop is None:
        return f"{words}; no labels, so nothing is known of accuracy"
    drop = f"drop {text.number(verify.drop)} points ({text.interval(verify.drop_ci95)})"
    both = f"{text.number(verify.value)} %, the original’s {text.number(verify.reference_value)} %"
    return f"{words}; {metric.words} {both}, {drop}"


def _summary_changed(report: Report, artifact: str) -> str:
    row = next((row for row in changed_rows(report) if row.artifact == artifact), None)
    if row is None:
        return ""
    if not row.lost:
        return row.changed
    return f"{row.changed}: {row.lost} right became wrong, {row.gained} wrong became right, {row.other} wrong otherwise"


def _classes(report: Report, artifact: str) -> str:
    found = report.answers.classes if report.answers else None
    return classes.class_headline(found, artifact) if found else ""


def _confidence(report: Report, artifact: str) -> str:
    found = (report.answers.reliability if report.answers else None) or {}
    names = [name for name in (lookup.ORIGINAL, artifact) if name in found]
    return " ".join(reliability.calibration_words(name, found[name]) for name in names)


def _speed(report: Report, artifact: str) -> str:
    if not report.bench:
        return "the bench was not run"
    ratio = table.latency_ratio(report, artifact)
    if ratio is None:
        return ""
    if not ratio.decided and not bound_words(ratio.bounds):
        return "not decided"
    cell = table.speed(ratio)
    return f"{cell.value} {cell.note}"


def _time(report: Report, artifact: str) -> str:
    context = report.bench.context if report.bench else None
    lines = (each.line for each in (context.artifacts if context else ()) if each.artifact == artifact)
    return next((line for line in lines if line), "")


def _cost(engine: EngineFacts) -> str:
    sensitivity = engine.quantization.sensitivity if engine.quantization else None
    return quantization.headline(sensitivity) if sensitivity else ""


def _sensitivity_section(report: Report, artifact: str) -> str:
    found = [each.artifact for each in quantization.quantized_engines(report) if each.layers]
    return f"sensitivity-of-{1 + found.index(artifact)}" if artifact in found else ""


def _flags(report: Report) -> str:
    used = [flag for row in table.main_rows(report) for flag in row.flags if flag != "not shipped"]
    return ", ".join(flag for flag, _ in notes.legend(used))


def _measured(report: Report) -> str:
    environment = report.environment
    machine = [*name_host(environment), *([environment["system"]] if "system" in environment else [])]
    samples = text.count(report.data.evaluation_images, f"evaluation {report.data.noun}")
    return ", ".join([samples, *machine, text.date(report.created)])
