"""The page of a comparison: what became of every engine between a baseline and a candidate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitdeploy.report import table, text
from vitdeploy.report.measures import Cell
from vitdeploy.report.table import Gate


@dataclass(frozen=True)
class Check:
    """One check of a pair: its name, its badge, and why."""

    name: str
    gate: Gate
    reasons: list[str]


@dataclass(frozen=True)
class PairRow:
    """One pair of engines. Accuracies are percents, the drop points; the ratios are candidate / baseline."""

    name: str
    how: str
    baseline: str
    candidate: str
    drop: Cell
    agreement: Cell
    ratios: dict[str, Cell]
    flags: list[str]
    checks: list[Check]


def pair_rows(document: Mapping[str, Any]) -> list[PairRow]:
    return [_row(engine) for engine in document["engines"]]


def metrics(document: Mapping[str, Any]) -> list[str]:
    """What of the times was compared, each once, in order."""
    return list(dict.fromkeys(ratio["metric"] for engine in document["engines"] for ratio in engine["ratios"]))


def _row(engine: Mapping[str, Any]) -> PairRow:
    accuracy = engine["accuracy"] or {}
    return PairRow(
        engine["engine"],
        accuracy.get("how", ""),
        text.number(accuracy.get("baseline")),
        text.number(accuracy.get("candidate")),
        _cell(accuracy.get("drop"), accuracy.get("drop_ci95")),
        _cell(accuracy.get("agreement"), accuracy.get("agreement_ci95")),
        {ratio["metric"]: _ratio_cell(ratio) for ratio in engine["ratios"]},
        list(engine["flags"]),
        [Check(check["name"], table.gate(check["status"]), list(check["reasons"])) for check in engine["checks"]],
    )


def _cell(value: float | None, interval: tuple[float, float] | None) -> Cell:
    return Cell(text.number(value), "" if interval is None else text.interval(interval))


def _ratio_cell(ratio: Mapping[str, Any]) -> Cell:
    return Cell(text.number(ratio["ratio"], 3), f"{text.ratio_interval(ratio['ci95'])}, {ratio['difference']}")
