"""The page of a sweep: every engine of every recipe in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from vitdeploy.report import measures, table
from vitdeploy.report.table import Gate, Row


@dataclass(frozen=True)
class Swept:
    """One recipe: its verdict with the badge of its gate, or why it failed; `link` leads to its report."""

    name: str
    sentence: str
    gate: Gate
    metric: str
    rows: list[Row]
    link: str | None


def swept(document: Mapping[str, Any]) -> list[Swept]:
    return [_swept(each) for each in document["recipes"]]


def _swept(each: Mapping[str, Any]) -> Swept:
    report = each["report"]
    if report is None:
        error = each["error"]
        text = f"{error['code']}: {error['message']}" + (f" ({error['found']})" if error["found"] else "")
        return Swept(each["name"], text, Gate("fail", "✕", "Failed"), "", [], None)
    metric = measures.metric(report)
    return Swept(
        each["name"],
        report["verdict"]["sentence"],
        table.gate(report["verdict"]["gate"]),
        metric.title if metric else "",
        table.main_rows(report),
        f"{quote(each['name'])}/report.html",
    )
