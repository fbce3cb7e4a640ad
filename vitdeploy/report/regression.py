"""The page of a comparison: what became of every engine between a baseline and a candidate."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.document.comparison import ComparisonDocument, PairFacts, TimeRatio
from vitdeploy.report import page as notes
from vitdeploy.report import table, text
from vitdeploy.report.measures import Cell
from vitdeploy.report.table import Gate
from vitdeploy.spec import bound_words


@dataclass(frozen=True)
class Check:
    """One check of a pair: its name, its badge, and how it ended in words."""

    name: str
    gate: Gate
    words: str


@dataclass(frozen=True)
class PairRow:
    """One pair of engines. `accuracy` is the candidate's in percent, with the baseline's below it; the drop is in
    points; the ratios are candidate / baseline."""

    name: str
    how: str
    accuracy: Cell
    drop: Cell
    agreement: Cell
    ratios: dict[str, Cell]
    flags: list[str]
    checks: list[Check]


@dataclass(frozen=True)
class PairsView:
    """The section of the pairs of engines. `metrics`: of the times that were compared; `missing`: one that was not."""

    report: ComparisonDocument
    rows: list[PairRow]
    metrics: list[str]
    missing: Cell
    legend: list[tuple[str, str]]


@dataclass(frozen=True)
class SidesView:
    """The section on what was compared; `changed`: how many digests differ."""

    report: ComparisonDocument
    changed: int


def pairs_view(document: ComparisonDocument) -> list[PairsView]:
    """The section of the pairs of engines."""
    legend = notes.legend(flag for engine in document.engines for flag in engine.flags)
    return [PairsView(document, pair_rows(document), metrics(document), Cell(text.MISSING), legend)]


def sides_view(document: ComparisonDocument) -> list[SidesView]:
    """The section on what was compared."""
    return [SidesView(document, changed(document))]


def pair_rows(document: ComparisonDocument) -> list[PairRow]:
    """A row for each pair of engines."""
    return [_row(engine) for engine in document.engines]


def metrics(document: ComparisonDocument) -> list[str]:
    """The time metrics that were compared, each once, in order."""
    return list(dict.fromkeys(ratio.metric for engine in document.engines for ratio in engine.ratios))


def _row(engine: PairFacts) -> PairRow:
    accuracy, unknown = engine.accuracy, Cell(text.MISSING)
    return PairRow(
        engine.engine,
        accuracy.how if accuracy else "",
        _accuracy(accuracy.candidate, accuracy.baseline) if accuracy else unknown,
        table.with_interval(accuracy.drop, accuracy.drop_ci95) if accuracy else unknown,
        table.agreement(accuracy) if accuracy else unknown,
        {ratio.metric: ratio_cell(ratio) for ratio in engine.ratios},
        list(engine.flags),
        [_check(check.name, table.gate(check.status)) for check in engine.checks],
    )


def changed(document: ComparisonDocument) -> int:
    """The number of digests that differ between the two sides."""
    return sum(row.baseline != row.candidate for row in document.digests)


def _check(name: str, gate: Gate) -> Check:
    return Check(name, gate, "no limit set" if gate.status == "none" else gate.words.removeprefix("Gate: "))


def _accuracy(candidate: float | None, baseline: float | None) -> Cell:
    known = "" if baseline is None else f"baseline {text.number(baseline)}"
    return Cell(text.number(candidate), known)


def ratio_cell(ratio: TimeRatio) -> Cell:
    """A ratio with its interval and what that says, where it is decided."""
    if not ratio.decided:
        return Cell(bound_words(ratio.bounds) or "not decided", ratio.reason)
    return Cell(text.number(ratio.ratio, 3), f"{text.ratio_interval(ratio.ci95)}, {ratio.difference}")
