"""The measures of each task, in words and columns: its metric against labels, its agreement, and its own numbers."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.document.report import Judgement
from vitdeploy.document.verified import Verified
from vitdeploy.report import text
from vitdeploy.tasks.answers import Measure, Metric
from vitdeploy.tasks.registry import TASKS


@dataclass(frozen=True)
class Cell:
    """A value and, in small print below it, its interval or condition."""

    value: str
    note: str = ""


def metric(report: Judgement) -> Metric | None:
    """The metric that is measured against labels; None without labels. An unknown metric keeps its own name."""
    name = next((engine.verify.metric for engine in report.engines if engine.verify.metric is not None), None)
    known = {metric.name: metric for adapter in TASKS.values() for metric in adapter.metrics}
    return None if name is None else known.get(name, Metric(name))


def agreement_of(report: Judgement) -> str:
    """What agreement with the original counts, in a few words; empty without engines."""
    return next((engine.verify.agreement_of for engine in report.engines), "")


def counts_nothing(report: Judgement) -> bool:
    """Whether the original gave no answers at all, so that agreement, which is 100 % then, is meaningless."""
    key = TASKS[report.task].counts
    return bool(key) and any(getattr(engine.verify, key) == 0 for engine in report.engines)


def columns(report: Judgement) -> list[Measure]:
    """The task's own numbers for which at least one engine has a value."""
    return [
        measure
        for measure in TASKS[report.task].measures
        if any(_value(engine.verify, measure.key) is not None for engine in report.engines)
    ]


def cell(verify: Verified, measure: Measure) -> Cell:
    """One engine's value, with the original's or its interval below it."""

    def form(value: float | None) -> str:
        return text.small(value) if measure.digits is None else text.number(value, measure.digits)

    note = ""
    if measure.original:
        note = f"original {form(_value(verify, f'reference_{measure.key}'))}"
    elif measure.interval:
        note = text.interval(getattr(verify, measure.interval))
    return Cell(form(_value(verify, measure.key)), note)


def _value(verify: Verified, key: str) -> float | None:
    outer, _, inner = key.partition(".")
    value = getattr(verify, outer)
    if inner and value is not None:
        value = getattr(value, inner)
    return None if value is None else float(value)
