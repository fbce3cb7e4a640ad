"""A section of the report: the engine that answers last, and how long each takes."""

from vitdeploy.benchmark.summary import Row
from vitdeploy.report.page import RunPage, Section


def slowest_first(page: RunPage) -> list[list[Row]]:
    """What was measured of every artifact, the slowest first; nothing of a report without a bench."""
    rows = sorted(page.report.results.values(), key=lambda row: -row.latency_ms.p50)
    return [rows] if rows else []


SECTION = Section("slowest", "Slowest: {view[0].artifact}", slowest_first, "toy_section.html.jinja")
