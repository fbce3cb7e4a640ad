"""Print a history for people: one line per series, then where each changed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitdeploy.api.tables import Column, Line, Table, interval

if TYPE_CHECKING:
    from vitdeploy.document.history import ChangeFacts, HistoryDocument, PointFacts, SeriesFacts


def history_lines(document: HistoryDocument) -> list[Line]:
    """A table of the series, then each change in words, then remarks."""
    several = f"{document.results} results of {len(document.series)} series at {document.place}"
    lines: list[Line] = [several, *([_table(document)] if document.series else [])]
    for number, series in enumerate(document.series, 1):
        lines += [line for change in series.changes for line in change_lines(number, change)]
        lines += [f"series {number}: {text}" for text in _remarks(series)]
    for canary in document.canaries:
        lines.append(f"wrong answers: {canary.sentence}")
        if canary.proposal is not None:
            lines.append("    --json has an entry for the table of runtimes known to be wrong (docs/known-bad.md)")
    return [*lines, *(f"left out: {each.what}: {each.why}" for each in document.left_out)]


def _table(document: HistoryDocument) -> Table:
    columns = (
        Column("no."),
        Column("model", 95, left=True),
        Column("engine", 90, left=True),
        Column("precision", 30, left=True),
        Column("machine", 40, left=True),
        Column("batch", 20),
        Column("results", 60),
        Column("last p50 ms", 100, left=True),
        Column("changes", 98, left=True),
        Column("flags of the last", 70, left=True),
    )
    return Table(columns, tuple(_row(number, series) for number, series in enumerate(document.series, 1)))


def _row(number: int, series: SeriesFacts) -> tuple[str, ...]:
    last = series.points[-1]
    timed = next((point for point in reversed(series.points) if point.p50_ms is not None), None)
    return (
        str(number),
        series.model,
        series.artifact,
        series.precision,
        series.machine,
        "" if series.batch is None else str(series.batch),
        str(len(series.points)),
        "" if timed is None else _p50(timed),
        " ".join(f"{change.direction} at {change.number}" for change in series.changes)
        or ("" if series.too_few else "none"),
        " ".join([*last.flags, *([] if last.decided else ["not decided"])]),
    )


def _p50(point: PointFacts) -> str:
    low, high = point.p50_ms_ci95
    assert point.p50_ms is not None
    return interval(point.p50_ms, (low, high) if low is not None and high is not None else None, 3)


def change_lines(number: int, change: ChangeFacts) -> list[str]:
    """A change in words: the sentence, then the levels and what else is known of both sides."""
    lines = [f"series {number}: {change.sentence}", f"    {change.before_ms:.4g} to {change.after_ms:.4g} ms"]
    known = {each.what for each in change.shares}
    if unclear := [each for each in change.unclear if each not in known]:
        lines.append(f"    more than one value on a side: {', '.join(unclear)}")
    if change.same:
        lines.append(f"    the same on both sides: {', '.join(change.same)}")
    return lines


def _remarks(series: SeriesFacts) -> list[str]:
    undecided = [str(point.number) for point in series.points if not point.decided and not point.error]
    remarks = [f"not decided, and no part of the search for changes: {', '.join(undecided)}"] if undecided else []
    remarks += [f"result {point.number} ({point.time}): {point.error}" for point in series.points if point.error]
    return remarks + ([series.too_few] if series.too_few else [])
