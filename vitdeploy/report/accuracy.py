"""The plot of accuracy against latency."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitdeploy.document.report import ORIGINAL, Judgement
from vitdeploy.report import figures, table, text
from vitdeploy.report.figures import Plot, both_variants
from vitdeploy.report.page import colours
from vitdeploy.verification.comparison import Comparison

_KEY_ROW = 19.0  # pixels
_KEY_COLUMNS = 3  # of the wide variant


@dataclass(frozen=True)
class PlotPoint:
    """An artifact in the plane of accuracy and latency."""

    artifact: str
    latency: float
    value: float
    bounds: tuple[float, float] | None


def accuracy_points(report: Judgement) -> list[PlotPoint]:
    """The metric (or, without labels, agreement) and p50 latency of every benched artifact that was verified."""
    results, reference = report.results, report.reference_value
    points = []
    if ORIGINAL in results:
        # Without labels the measure is agreement with the original, which agrees with itself.
        level = 100.0 if reference is None else reference
        points.append(PlotPoint(ORIGINAL, results[ORIGINAL].latency_ms.p50, level, None))
    for engine in report.engines:
        result, verify = results.get(engine.artifact), engine.verify
        value, bounds = _accuracy(verify, reference)
        if result is not None and value is not None:
            points.append(PlotPoint(engine.artifact, result.latency_ms.p50, value, bounds))
    return points


def _accuracy(verify: Comparison, reference: float | None) -> tuple[float | None, tuple[float, float] | None]:
    """The value and the 95 % bounds of one engine on the accuracy axis."""
    if reference is None:
        low, high = verify.agreement_ci95
        return verify.agreement, (low, high)
    if verify.drop is None:
        return None, None
    # The interval is that of the paired difference, so it is drawn around the original's accuracy less the drop.
    low_high = verify.drop_ci95
    bounds = None if low_high is None else (reference - low_high[1], reference - low_high[0])
    return reference - verify.drop, bounds


def accuracy_plot(report: Judgement) -> Plot | None:
    """Accuracy (up is better) against p50 latency (left is better)."""
    points = accuracy_points(report)
    if not points:
        return None
    metric = table.metric(report)
    measure = "Agreement with the original" if metric is None else text.capital(metric.words)
    facts = "; ".join(
        f"{point.artifact}: {text.number(point.value)} % at {text.significant(point.latency)} ms" for point in points
    )
    wide, narrow = both_variants(
        lambda is_narrow: _draw_accuracy(report, points, measure, is_narrow),
        "accuracy",
        f"{measure} against p50 latency. {facts}.",
    )
    bars = (
        "Bars are the 95 % interval of the paired difference from the original."
        if metric is not None
        else "There are no labels, so agreement stands in for accuracy. Bars are the 95 % interval."
    )
    caption = f"Further up is more accurate, further left is faster. {bars} The dashed line is the original’s level."
    decided = _decided(report, points)
    best = figures.front([(point.latency, -point.value) for point in decided])
    if len(best) > 1:
        caption += " The grey steps are the Pareto front: nothing was measured both faster and as good."
    elif len(decided) > 1:
        alone = next(point.artifact for point in decided if (point.latency, -point.value) == best[0])
        caption += f" Nothing was measured faster or better than {alone}: it is the whole Pareto front."
    if report.starred in [point.artifact for point in points]:
        caption += " ★ marks the recommendation."
    undecided = [point.artifact for point in points if point not in decided]
    if undecided:
        caption += f" Not decided is the latency of {', '.join(undecided)}."
    return Plot("Accuracy and latency", caption, wide, narrow)


def _decided(report: Judgement, points: Sequence[PlotPoint]) -> list[PlotPoint]:
    """Those that may be on the front: of the others nobody knows how fast they are."""
    return [point for point in points if point.artifact not in report.undecided]


def _draw_accuracy(report: Judgement, points: Sequence[PlotPoint], measure: str, narrow: bool) -> Figure:
    """One variant of the accuracy plot. Where names would crowd each other, points are numbered, with a key below."""
    figure, clean = _compose(report, points, measure, narrow, keyed=False)
    return figure if clean else _compose(report, points, measure, narrow, keyed=True)[0]


def _compose(
    report: Judgement, points: Sequence[PlotPoint], measure: str, narrow: bool, keyed: bool
) -> tuple[Figure, bool]:
    """The plot with names or numbers at its points, and whether those found room."""
    key_rows = -(-len(points) // (1 if narrow else _KEY_COLUMNS))
    key = key_rows * _KEY_ROW + 12 if keyed else 0
    width, height = (360, 360 + key) if narrow else (840, 400 + key)
    figure = figures.new_figure(width, height)
    axes = figures.plane(figure, "p50 latency, ms (single stream)", f"{measure}, %", bottom=48 + key)
    figures.limit_latency(axes, [point.latency for point in points], padding=0.12)
    _limit_accuracy(axes, points)
    if points[0].artifact == ORIGINAL:
        axes.axhline(points[0].value, color=figures.MUTED, linewidth=1, linestyle=(0, (3, 4)), zorder=1.2)
    recommended = report.starred
    front = [(point.latency, -point.value) for point in _decided(report, points)]
    steps, series = figures.draw_front(axes, front, -1.0), colours(report)
    for point in points:
        _draw_point(axes, point, series[point.artifact], point.artifact == recommended)
    names = [_name(point.artifact, point.artifact == recommended) for point in points]
    if keyed:
        _draw_key(figure, [series[point.artifact] for point in points], names, key_rows, height - key)
        names = [str(number) for number, _ in enumerate(points, start=1)]
    return figure, _label_accuracy(axes, points, names, recommended, steps)


def _draw_key(figure: Figure, indices: Sequence[int], names: Sequence[str], rows: int, top: float) -> None:
    """The numbered points by name, below the plot; `top` is the height above the key in pixels."""
    width, height = figure.get_size_inches() * 72
    axes = figures.axes_in(figure, left=0, right=0, bottom=0, top=top)
    axes.set_axis_off()
    axes.set(xlim=(0, width), ylim=(height - top, 0))
    column_width = (width - 50) / -(-len(names) // rows)
    for number, (index, name) in enumerate(zip(indices, names, strict=True)):
        x, y = 50 + column_width * (number // rows), _KEY_ROW * (number % rows + 0.8)
        axes.plot(x + 6, y, marker=figures.MARKERS[index], markersize=8, color=figures.SERIES[index], clip_on=False)
        axes.text(x + 34, y, str(number + 1), ha="right", va="center", color=figures.MUTED)
        axes.text(x + 42, y, name, va="center", color=figures.INK, parse_math=False)


def _limit_accuracy(axes: Axes, points: Sequence[PlotPoint]) -> None:
    """A vertical range around all points and bars, not so narrow that noise looks like a difference."""
    values = [value for point in points for value in (point.value, *(point.bounds or ()))]
    low, high = min(values), max(values)
    padding = max(0.18 * (high - low), 0.5 - (high - low) / 2, 0.1)
    axes.set_ylim(low - padding, high + padding)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    # More than 100 % and less than 0 are only there as room for the marker and its label.
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if 0 <= value <= 100 else ""))
    axes.tick_params(axis="y", length=0)


def _draw_point(axes: Axes, point: PlotPoint, index: int, recommended: bool) -> None:
    """One marker with its bar; the recommended one gets a ring."""
    colour = figures.SERIES[index]
    if point.bounds is not None:
        low, high = point.bounds
        axes.plot([point.latency] * 2, [low, high], color=colour, linewidth=1.5, solid_capstyle="butt", zorder=2)
        axes.plot([point.latency] * 2, [low, high], linestyle="none", marker="_", markersize=9, color=colour, zorder=2)
    figures.mark_point(axes, (point.latency, point.value), index, recommended)


def _label_accuracy(
    axes: Axes,
    points: Sequence[PlotPoint],
    names: Sequence[str],
    recommended: str | None,
    steps: Sequence[figures.Place],
) -> bool:
    """Label every point; returns whether there was room for all figures."""
    texts, obstacles = [], []
    for point, name in zip(points, names, strict=True):
        chosen = point.artifact == recommended
        label = axes.text(
            point.latency,
            point.value,
            name,
            color=figures.INK,
            fontweight="bold" if chosen else "normal",
            fontsize=12,
            parse_math=False,
            zorder=5,
        )
        texts.append(label)
        obstacles += _obstacles(axes, point, 10 if chosen else 7)
    lines = [_level_line(axes, points[0].value)] if points[0].artifact == ORIGINAL else []
    ends = [(float(x), float(y)) for x, y in axes.transData.transform(steps)] if steps else []
    lines += itertools.pairwise(ends)
    places = [(point.latency, point.value) for point in points]
    return figures.label_points(axes, places, texts, obstacles, lines)


def _name(artifact: str, recommended: bool) -> str:
    """The artifact's name, saying what is special about it without relying on the ring or the boldness."""
    name = text.shorten(artifact, 28)
    return f"★ {name}" if recommended else name


def _obstacles(axes: Axes, point: PlotPoint, radius: float) -> list[figures.PixelBox]:
    """The boxes in pixels that a point's marker and bar take up."""
    x, y = (float(value) for value in axes.transData.transform((point.latency, point.value)))
    boxes = [figures.PixelBox(x - radius, y - radius, x + radius, y + radius)]
    if point.bounds is not None:
        bottom, top = (float(axes.transData.transform((point.latency, bound))[1]) for bound in point.bounds)
        boxes.append(figures.PixelBox(x - 6, bottom - 2, x + 6, top + 2))
    return boxes


def _level_line(axes: Axes, value: float) -> figures.Line:
    """The dashed line at the original's level, in pixels."""
    (left, y), (right, _) = axes.transData.transform([(limit, value) for limit in axes.get_xlim()])
    return (float(left), float(y)), (float(right), float(y))
