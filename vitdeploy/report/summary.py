"""The one-page summary of a run: what it found in one line for each question, with where the page says more."""

from __future__ import annotations

from vitdeploy.document.engine import EngineFacts
from vitdeploy.document.report import ORIGINAL, Report
from vitdeploy.report import page as notes
from vitdeploy.report import quantization, table, text
from vitdeploy.report.context import calibration_words
from vitdeploy.report.examples import class_headline
from vitdeploy.runtime.host import name_host
from vitdeploy.spec import bound_words
from vitdeploy.tasks.answers import ChangedCounts


def wrong_otherwise(counts: ChangedCounts) -> int | None:
    """How many wrong answers became other wrong ones; None without labels."""
    if counts.lost is None or counts.gained is None:
        return None
    return counts.changed - counts.lost - counts.gained


def summary(report: Report) -> list[tuple[str, str, str]]:
    """The summary of the recommended engine, or else of the first that is shipped; nothing without engines.

    Of each question its name, the answer, and the id of the section that says more ("" of none).
    """
    names = report.focus
    engine = report.engine(names[0]) if names else None
    if engine is None:
        return []
    artifact = names[0]
    lines = [
        ("Engine", _engine(report, engine), "comparison"),
        ("Answers", _answers(report, engine), "comparison"),
        ("Changed answers", _changed(report, engine), "changed"),
        ("Classes", _classes(report, artifact), "classes"),
        ("Confidence", _confidence(report, artifact), "reliability"),
        ("Speed", _speed(report, artifact), "comparison"),
        ("Where the time goes", _time(report, artifact), "context"),
        ("What INT8 costs", _cost(engine), _sensitivity_section(report, engine)),
        ("Flags", ", ".join(flag for flag, _ in notes.legend(report.flags) if flag != "not shipped"), "flags"),
        ("Measured", _measured(report), "details"),
    ]
    return [line for line in lines if line[1]]


def _engine(report: Report, engine: EngineFacts) -> str:
    starred = engine.artifact == report.starred
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
    metric = table.metric(report)
    if metric is None or verify.drop is None:
        return f"{words}; no labels, so nothing is known of accuracy"
    drop = f"drop {text.number(verify.drop)} points ({text.interval(verify.drop_ci95)})"
    both = f"{text.number(verify.value)} %, the original’s {text.number(verify.reference_value)} %"
    return f"{words}; {metric.words} {both}, {drop}"


def _changed(report: Report, engine: EngineFacts) -> str:
    counts = report.answers.changed.get(engine.artifact) if report.answers else None
    if counts is None:
        return ""
    words = f"{text.number(counts.changed, 0)} of {text.number(engine.verify.n, 0)}"
    other = wrong_otherwise(counts)
    if other is None:
        return words
    lost, gained = text.number(counts.lost, 0), text.number(counts.gained, 0)
    return f"{words}: {lost} right became wrong, {gained} wrong became right, {text.number(other, 0)} wrong otherwise"


def _classes(report: Report, artifact: str) -> str:
    found = report.answers.classes if report.answers else None
    return class_headline(found, artifact) if found else ""


def _confidence(report: Report, artifact: str) -> str:
    found = (report.answers.reliability if report.answers else None) or {}
    names = [name for name in (ORIGINAL, artifact) if name in found]
    return " ".join(calibration_words(name, found[name]) for name in names)


def _speed(report: Report, artifact: str) -> str:
    if not report.bench:
        return "the bench was not run"
    ratio = report.ratio(artifact)
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
    return quantization.sensitivity_headline(sensitivity) if sensitivity else ""


def _sensitivity_section(report: Report, engine: EngineFacts) -> str:
    known = [each.artifact for each in quantization.engines_with_costs(report)]
    return f"sensitivity-of-{1 + known.index(engine.artifact)}" if engine.artifact in known else ""


def _measured(report: Report) -> str:
    environment = report.environment
    machine = [*name_host(environment), *([environment["system"]] if "system" in environment else [])]
    samples = text.count(report.data.evaluation_images, f"evaluation {report.data.noun}")
    return ", ".join([samples, *machine, text.date(report.created)])
