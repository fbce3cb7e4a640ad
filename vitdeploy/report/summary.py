"""The one-page summary of a run: what was found in one per line, with where the page says more."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.document.engine import EngineFacts
from vitdeploy.document.report import Report
from vitdeploy.report import changed, classes, lookup, measures, notes, quantization, reliability, table, text
from vitdeploy.report.page import RunPage
from vitdeploy.runtime.host import name_host
from vitdeploy.spec import bound_words


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
        Line("Changed answers", _changed(report, artifact), "changed"),
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


def _changed(report: Report, artifact: str) -> str:
    row = next((row for row in changed.changed_rows(report) if row.artifact == artifact), None)
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
