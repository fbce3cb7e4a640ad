"""The page of a history: each series over its results, with its changes."""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitdeploy.document.history import ChangeFacts, HistoryDocument, PointFacts, SeriesFacts
from vitdeploy.report import figures, table, text
from vitdeploy.report.figures import Plot, both_variants

# The number of the latest results in the table of a series; the plot shows all.
MOST_ROWS = 20


def latest_changes(document: HistoryDocument) -> list[tuple[int, SeriesFacts, ChangeFacts]]:
    """Every change with its series and the number of the series, the latest change first."""
    found = [
        (number, series, change) for number, series in enumerate(document.series, start=1) for change in series.changes
    ]
    return sorted(found, key=lambda each: -each[1].points[each[2].number - 1].sequence)


def about_series(series: SeriesFacts) -> list[str]:
    """The machine of a series, its configuration, and the noise of its results."""
    sizes = [f"batch {series.batch}"] if series.batch is not None else []
    sizes += [f"{series.threads} threads"] if series.threads else []
    noise = ""
    if series.noise is not None and series.correlation is not None:
        noise = f"noise of a single result {text.percent(series.noise)}, correlation of neighbouring results "
        noise += text.number(series.correlation)
    lines = [series.machine, ", ".join([series.target, series.precision, *sizes]), noise, series.too_few]
    return [line for line in lines if line]


def changed_with(change: ChangeFacts) -> list[str]:
    """The recorded differences that coincide with a change of the latency, one per line."""
    what = [f"{each.what}: {each.before or 'unknown'} → {each.after or 'unknown'}" for each in change.differences]
    what += [
        f"{share.what} {share.value}: in {share.before} of {share.of_before} results before, {share.after} of "
        f"{share.of_after} after"
        for share in change.shares
    ]
    return [*(what or ["no recorded difference"]), *change.further]


def point_latency(point: PointFacts) -> table.Cell:
    """The median latency with its interval, if known."""
    low, high = point.p50_ms_ci95
    bounds = [low, high] if low is not None and high is not None else None
    return table.Cell(text.significant(point.p50_ms, 4), text.interval(bounds, 3) if bounds else "")


def history_plot(series: SeriesFacts, name: str) -> Plot | None:
    """The plot of each result's latency with its interval, and of the levels between changes."""
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
    caption = "Results in the order of the history; bars are 95 % intervals."
    if any(not point.decided or point.flags for point in timed):
        caption += " Hollow marks are undecided or flagged results."
    if series.changes:
        caption += " Lines are the levels between changes."
    return Plot("p50 latency", caption, wide, narrow)


def _draw(series: SeriesFacts, timed: Sequence[PointFacts], narrow: bool) -> Figure:
    figure = figures.new_figure(*((360, 280) if narrow else (840, 320)))
    axes = figures.plane(figure, "result", "p50 latency, ms", left=58, top=44, pad=24)
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
    """Draw the level on each side of every change, from change to change."""
    edges = [series.points[0].number, *(change.number for change in series.changes), series.points[-1].number + 1]
    levels = [*(change.before_ms for change in series.changes), *(change.after_ms for change in series.changes[-1:])]
    for start, end, level in zip(edges, edges[1:], levels, strict=False):
        axes.plot([start - 0.5, end - 0.5], [level, level], color=figures.INK, linewidth=1.6, zorder=3)
    for change in series.changes:
        axes.axvline(change.number - 0.5, color=figures.MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1.2)


def _mark(plain: bool, label: str) -> Line2D:
    """The marks of results, filled if `plain`: decided and without flags."""
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
