"""The time of each graph of a model of several."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.report import lookup, text
from vitdeploy.report.page import RunPage


@dataclass(frozen=True)
class PartsView:
    """The section. `rows`: the milliseconds of each of `parts`, by artifact."""

    parts: tuple[str, ...]
    rows: dict[str, tuple[str, ...]]


def parts_view(page: RunPage) -> list[PartsView]:
    """The section; none of a model of one graph, whose latency is that graph's."""
    found = {name: row.parts_ms for name, row in lookup.bench_results(page.report).items() if row.parts_ms}
    if not found:
        return []
    names = tuple(dict.fromkeys(name for times in found.values() for name in times))
    rows = {artifact: tuple(text.significant(times.get(name)) for name in names) for artifact, times in found.items()}
    return [PartsView(names, rows)]
