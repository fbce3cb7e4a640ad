"""The page of a history: each series over its results, with its changes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitdeploy.document.history import ChangeFacts, HistoryDocument, PointFacts, SeriesFacts
from vitdeploy.report import figures, text
from vitdeploy.report.figures import Plot, both_variants
from vitdeploy.report.measures import Cell
from vitdeploy.report.tuning import LeftOutView

# The latest results of a series that its table has; the plot has all.
_MOST_ROWS = 20


@dataclass(frozen=True)
class Told:
    """One change in a sentence; `anchor` leads to the section of its series, on `machine`."""

    anchor: str
    chip: str
    direction: str
    sentence: str
    machine: str


@dataclass(frozen=True)
class ChangesView:
    """The section of all changes, the latest of the history first. `searched`: series that have enough results."""

    changes: list[Told]
    searched: int
    short: int


@dataclass(frozen=True)
class ToldCanary:
    """One engine with one release, in a sentence; `proposal`: the entry for the table, as JSON, or ""."""

    sentence: str
    error: str
    proposal: str


@dataclass(frozen=True)
class CanariesView:
    """The section of all of these."""

    canaries: list[ToldCanary]


@dataclass(frozen=True)
class SeriesRow:
    """One series in the table of all; `anchor` leads to its section."""

    anchor: str
    series: SeriesFacts
    latency: Cell
    changes: str
    flags: list[str]


@dataclass(frozen=True)
class OverviewView:
    """The section of all series."""

    rows: list[SeriesRow]


@dataclass(frozen=True)
class ChangeRow:
    """One change in words; `what` is what else changed, a line each."""

    number: int
    time: str
    direction: str
    chip: str
    size: Cell
    before: str
    after: str
    what: list[str]


@dataclass(frozen=True)
class PointRow:
    """One result; `note`: why it is not decided, or the error."""

    number: int
    time: str
    host: str
    kind: str
    latency: Cell
    throughput: str
    agreement: str
    versions: str
    flags: list[str]
    note: str


@dataclass(frozen=True)
class SeriesView:
    """The section of one series. `hidden`: how many earlier results the table leaves to the plot."""

    title: str
    about: list[str]
    changes: list[ChangeRow]
    plot: Plot | None
    points: list[PointRow]
    hidden: int


def changes_view(document: HistoryDocument) -> list[ChangesView]:
    """The section of all changes, or that there are none."""
    found = [
        (
            series.points[change.number - 1].sequence,
            Told(
                anchor=f"series-{number}",
                chip=_chip(change),
                direction=text.capital(change.direction),
                sentence=change.sentence,
                machine=series.machine,
            ),
        )
        for number, series in enumerate(document.series, start=1)
        for change in series.changes
    ]
    latest = [told for _, told in sorted(found, key=lambda each: -each[0])]
    short = sum(bool(series.too_few) for series in document.series)
    return [ChangesView(latest, len(document.series) - short, short)] if document.series else []


def canaries_view(document: HistoryDocument) -> list[CanariesView]:
    """The section of engines that did not give their golden answers."""
    told = [
        ToldCanary(each.sentence, each.error, json.dumps(each.proposal, indent=1) if each.proposal else "")
        for each in document.canaries
    ]
    return [CanariesView(told)] if told else []


def overview_view(document: HistoryDocument) -> list[OverviewView]:
    """The section of all series."""
    rows = [_series_row(number, series) for number, series in enumerate(document.series, start=1)]
    return [OverviewView(rows)] if rows else []


def series_views(document: HistoryDocument) -> list[SeriesView]:
    """A section for each series."""
    return [_series_view(number, series) for number, series in enumerate(document.series, start=1)]


def files_view(document: HistoryDocument) -> list[LeftOutView]:
    """The section of files that are left out."""
    return [LeftOutView([(each.what, each.why) for each in document.left_out])] if document.left_out else []


def _series_row(number: int, series: SeriesFacts) -> SeriesRow:
    last = next((point for point in reversed(series.points) if point.p50_ms is not None), series.points[-1])
    changes = ", ".join(f"{change.direction} at {change.number}" for change in series.changes)
    nothing = "too few results" if series.too_few else "none"
    return SeriesRow(f"series-{number}", series, _latency(last), changes or nothing, _flags(series.points[-1]))


def _series_view(number: int, series: SeriesFacts) -> SeriesView:
    sizes = [f"batch {series.batch}"] if series.batch is not None else []
    sizes += [f"{series.threads} threads"] if series.threads else []
    noise = []
    if series.noise is not None and series.correlation is not None:
        noise = [
            f"single results scatter by {text.percent(series.noise)}, neighbours correlate by "
            f"{text.number(series.correlation)}"
        ]
    about = [series.machine, ", ".join([series.target, series.precision, *sizes]), *noise, series.too_few]
    latest = series.points[-_MOST_ROWS:]
    return SeriesView(
        title=f"{series.model}, {series.artifact}" if series.artifact else series.model,
        about=[line for line in about if line],
        changes=[_change_row(change) for change in series.changes],
        plot=_plot(f"history-{number}", series),
        points=[_point_row(point) for point in reversed(latest)],
        hidden=len(series.points) - len(latest),
    )


def _change_row(change: ChangeFacts) -> ChangeRow:
    percent, bounds = 100 * (change.ratio - 1), [100 * (bound - 1) for bound in change.ci95]
    what = [f"{each.what}: {each.before or 'unknown'} → {each.after or 'unknown'}" for each in change.differences]
    what += [
        f"{each.what} {each.value}: in {each.before} of {each.of_before} results before it, {each.after} of "
        f"{each.of_after} after it"
        for each in change.shares
    ]
    what = what or ["nothing that is recorded"]
    known = {each.what for each in change.shares}
    if unclear := [each for each in change.unclear if each not in known]:
        what.append(f"more than one value on a side: {', '.join(unclear)}")
    if change.same:
        what.append(f"the same on both sides: {', '.join(change.same)}")
    return ChangeRow(
        number=change.number,
        time=change.time,
        direction=text.capital(change.direction),
        chip=_chip(change),
        size=Cell(f"{text.number(percent, 1)} %", text.interval(bounds, 1)),
        before=text.significant(change.before_ms, 4),
        after=text.significant(change.after_ms, 4),
        what=what,
    )


def _chip(change: ChangeFacts) -> str:
    return "fail" if change.direction == "slower" else "pass"


def _point_row(point: PointFacts) -> PointRow:
    return PointRow(
        number=point.number,
        time=point.time,
        host=point.host,
        kind=point.kind,
        latency=_latency(point),
        throughput=text.significant(point.throughput),
        agreement=text.number(point.agreement),
        versions=", ".join(filter(None, [point.runtime_version, point.vitdeploy and f"vitdeploy {point.vitdeploy}"])),
        flags=_flags(point),
        note=point.error or point.undecided,
    )


def _latency(point: PointFacts) -> Cell:
    low, high = point.p50_ms_ci95
    bounds = [low, high] if low is not None and high is not None else None
    return Cell(text.significant(point.p50_ms, 4), text.interval(bounds, 3) if bounds else "")


def _flags(point: PointFacts) -> list[str]:
    return [*point.flags, *([] if point.decided else ["not decided"])]


def _plot(name: str, series: SeriesFacts) -> Plot | None:
    """The latency of each result with its interval, and the level between changes."""
    timed = [point for point in series.points if point.p50_ms is not None]
    if len(timed) < 2:
        return None
    changes = "; ".join(
        f"{change.direction} at result {change.number}, {text.significant(change.before_ms, 4)} to "
        f"{text.significant(change.after_ms, 4)} ms"
        for change in series.changes
    )
    description = f"p50 latency of {len(timed)} results. Changes: {changes or 'none'}."
    wide, narrow = both_variants(lambda is_narrow: _draw(series, timed, is_narrow), name, description)
    caption = "In the order of the history; a bar is the 95 % interval."
    if any(not point.decided or point.flags for point in timed):
        caption += " A hollow mark is a result that is not decided, or has a flag."
    if series.changes:
        caption += " Lines are the levels between changes."
    return Plot("p50 latency", caption, wide, narrow)


def _draw(series: SeriesFacts, timed: Sequence[PointFacts], narrow: bool) -> Figure:
    figure = figures.new_figure(*((360, 280) if narrow else (840, 320)))
    axes = figures.axes_in(figure, left=58, right=14, bottom=48, top=44)
    axes.set_xlabel("result")
    axes.set_title("p50 latency, ms", loc="left", fontsize=12, color=figures.MUTED, pad=24)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5 if narrow else 10, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for plain in (True, False):
        _draw_points(axes, [point for point in timed if (point.decided and not point.flags) == plain], plain)
    _draw_levels(axes, series)
    first, last = timed[0].number, timed[-1].number
    margin = max(0.5, 0.02 * (last - first))
    axes.set_xlim(first - margin, last + margin)
    figures.mark_legend(axes, _legend(series, timed))
    return figure


def _draw_points(axes: Axes, points: Sequence[PointFacts], plain: bool) -> None:
    colour = figures.SERIES[1]
    for point in points:
        low, high = point.p50_ms_ci95
        if low is not None and high is not None:
            axes.plot([point.number] * 2, [low, high], color=colour, linewidth=1, alpha=0.35, zorder=1.5)
    mark = _mark(plain, "")
    mark.set_data([point.number for point in points], [point.p50_ms or 0.0 for point in points])
    axes.add_line(mark)
    axes.update_datalim([(point.number, point.p50_ms or 0.0) for point in points])
    axes.autoscale_view()


def _draw_levels(axes: Axes, series: SeriesFacts) -> None:
    """The level of each side of every change, from change to change."""
    edges = [series.points[0].number, *(change.number for change in series.changes), series.points[-1].number + 1]
    levels = [*(change.before_ms for change in series.changes), *(change.after_ms for change in series.changes[-1:])]
    for start, end, level in zip(edges, edges[1:], levels, strict=False):
        axes.plot([start - 0.5, end - 0.5], [level, level], color=figures.INK, linewidth=1.6, zorder=3)
    for change in series.changes:
        axes.axvline(change.number - 0.5, color=figures.MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1.2)


def _mark(plain: bool, label: str) -> Line2D:
    """The marks of results, filled where they are `plain`: decided, and without a flag."""
    colour = figures.SERIES[1]
    return Line2D(
        [],
        [],
        linestyle="none",
        marker="o",
        markersize=4.5,
        markerfacecolor=colour if plain else figures.PAPER,
        markeredgecolor=colour,
        label=label,
        zorder=2,
    )


def _legend(series: SeriesFacts, timed: Sequence[PointFacts]) -> list[Line2D]:
    found = [_mark(True, "decided")]
    if any(not point.decided or point.flags for point in timed):
        found.append(_mark(False, "flagged"))
    if series.changes:
        found.append(Line2D([], [], color=figures.INK, linewidth=1.6, label=" level"))
    return found
