"""The image sizes of a bundle that has several, each in a row."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.document.report import SizeRow
from vitdeploy.report import measures
from vitdeploy.report.measures import Metric
from vitdeploy.report.page import RunPage


@dataclass(frozen=True)
class SizesView:
    """The section; the first row is the page's own. `metric`: None without labels."""

    noun: str
    metric: Metric | None
    rows: tuple[SizeRow, ...]


def sizes_view(page: RunPage) -> list[SizesView]:
    """The section; none of a bundle with one image size."""
    report = page.report
    return [SizesView(report.data.noun, measures.metric(report), report.sizes)] if report.sizes else []
