"""A section of the report: the engine that answers last, and how long each takes."""

from dataclasses import dataclass

from vitdeploy.report import lookup, text
from vitdeploy.report.page import RunPage, Section


@dataclass(frozen=True)
class SlowestView:
    """The section. `milliseconds`: p50 of every artifact by name, the slowest first."""

    slowest: str
    milliseconds: dict[str, str]


def slowest_view(page: RunPage) -> list[SlowestView]:
    """The section; none of a report without a bench."""
    rows = sorted(lookup.bench_results(page.report).values(), key=lambda row: -row.latency_ms.p50)
    times = {row.artifact: text.significant(row.latency_ms.p50) for row in rows}
    return [SlowestView(rows[0].artifact, times)] if rows else []


SECTION = Section("slowest", "Slowest: {view.slowest}", slowest_view, "toy_section.html.jinja")
