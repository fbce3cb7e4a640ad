"""Plots of answers against latency: for a report, for all recipes of a sweep, for all variants of a search."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from vitdeploy.backends import TARGETS
from vitdeploy.document.report import ORIGINAL, Judgement, Report
from vitdeploy.document.sweep import SweepDocument, SweptRecipe, TuneDocument, VariantFacts
from vitdeploy.report import figures, page, table, text
from vitdeploy.report.figures import Plot, both_variants
from vitdeploy.report.table import Badge
from vitdeploy.runtime.host import name_host
from vitdeploy.verification.comparison import Comparison

# --- The plot of accuracy against latency of one report ---------------------------------------------------------------


FRONT = " The grey steps are the Pareto front: no artifact was both faster and at least as good."
_KEY_ROW = 19.0  # pixels
_KEY_COLUMNS = 3  # of the wide variant


@dataclass(frozen=True)
class _PlotPoint:
    """An artifact in the plot. `bounds`: those of its value; `series`: its colour and marker. In a plot of many
    recipes, `number`: its number in the table; `device`: the device that it ran on."""

    name: str
    series: int
    latency: float
    value: float
    bounds: tuple[float, float] | None
    recommended: bool
    decided: bool
    number: int = 0
    device: str = ""

    @property
    def place(self) -> figures.Place:
        return self.latency, self.value


def _front(points: Sequence[_PlotPoint]) -> list[figures.Place]:
    """Latency and loss of the points that may be on the front: those with a decided latency, if any provably differs
    from the original."""
    level = points[0].value
    differs = any(point.bounds and not point.bounds[0] <= level <= point.bounds[1] for point in points)
    return [(point.latency, -point.value) for point in points if point.decided and differs]


def _percent_plane(figure: Figure, points: Sequence[_PlotPoint], measure: str, key: float = 0) -> Axes:
    """Axes of latencies and percentages. Below 0 and above 100 % there is only room for markers and labels."""
    axes = figures.plane(figure, "p50 latency, ms (single stream)", f"{measure}, %", bottom=48 + key)
    figures.limit_latency(axes, [point.latency for point in points], padding=0.12)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if 0 <= value <= 100 else ""))
    return axes


def accuracy_points(report: Judgement) -> list[_PlotPoint]:
    """The metric (or, without labels, the agreement) and p50 latency of every measured and verified artifact."""
    reference, series = report.reference_value, page.colours(report)
    # Without labels, the measure is agreement with the original, which agrees fully with itself.
    found: dict[str, tuple[float | None, tuple[float, float] | None]]
    found = {ORIGINAL: (100.0 if reference is None else reference, None)}
    found |= {engine.artifact: _accuracy(engine.verify, reference) for engine in report.engines}
    return [
        _PlotPoint(
            *(name, series[name], report.results[name].latency_ms.p50, value, bounds),
            recommended=name == report.starred,
            decided=name not in report.undecided,
        )
        for name, (value, bounds) in found.items()
        if name in report.results and value is not None
    ]


def _accuracy(verify: Comparison, reference: float | None) -> tuple[float | None, tuple[float, float] | None]:
    """The value and the 95 % bounds of one engine on the accuracy axis."""
    if reference is None:
        low, high = verify.agreement_ci95
        return verify.agreement, (low, high)
    if verify.drop is None:
        return None, None
    # The interval of the paired difference, drawn around the original's accuracy minus the drop.
    low_high = verify.drop_ci95
    bounds = None if low_high is None else (reference - low_high[1], reference - low_high[0])
    return reference - verify.drop, bounds


def accuracy_plot(report: Judgement) -> Plot | None:
    """The plot of accuracy (up is better) against p50 latency (left is better)."""
    points = accuracy_points(report)
    if not points:
        return None
    metric = table.metric(report)
    measure = "Agreement with the original" if metric is None else text.capital(metric.words)
    facts = "; ".join(
        f"{point.name}: {text.number(point.value)} % at {text.significant(point.latency)} ms" for point in points
    )
    wide, narrow = both_variants(
        lambda is_narrow: _draw_accuracy(points, measure, is_narrow),
        "accuracy",
        f"{measure} against p50 latency. {facts}.",
    )
    bars = (
        "Bars are 95 % intervals of the paired difference from the original."
        if metric is not None
        else "Without labels, agreement replaces accuracy. Bars are 95 % intervals."
    )
    caption = f"Higher is more accurate, further left is faster. {bars} The dashed line is the original’s level."
    decided = [point for point in points if point.decided]
    best = figures.front(_front(points))
    if len(best) > 1:
        caption += FRONT
    elif len(decided) > 1 and not best:
        caption += " No Pareto front is drawn: no artifact provably differs from the original."
    elif len(decided) > 1:
        alone = next(point.name for point in decided if (point.latency, -point.value) == best[0])
        caption += f" No artifact was faster or better than {alone}, so the Pareto front is this point."
    if any(point.recommended for point in points):
        caption += " ★ marks the recommendation."
    undecided = [point.name for point in points if not point.decided]
    if undecided:
        caption += f" The latency of {', '.join(undecided)} is not decided."
    return Plot("Accuracy and latency", caption, wide, narrow)


def _draw_accuracy(points: Sequence[_PlotPoint], measure: str, narrow: bool) -> Figure:
    """One variant of the accuracy plot. If names do not fit, points are numbered, with a key below."""
    figure, clean = _compose(points, measure, narrow, keyed=False)
    return figure if clean else _compose(points, measure, narrow, keyed=True)[0]


def _compose(points: Sequence[_PlotPoint], measure: str, narrow: bool, keyed: bool) -> tuple[Figure, bool]:
    """The plot with names or numbers at its points, and whether all of them fit."""
    key_rows = -(-len(points) // (1 if narrow else _KEY_COLUMNS))
    key = key_rows * _KEY_ROW + 12 if keyed else 0
    width, height = (360, 360 + key) if narrow else (840, 400 + key)
    figure = figures.new_figure(width, height)
    axes = _percent_plane(figure, points, measure, key)
    _limit_accuracy(axes, points)
    if points[0].name == ORIGINAL:
        axes.axhline(points[0].value, color=figures.MUTED, linewidth=1, linestyle=(0, (3, 4)), zorder=1.2)
    steps = figures.draw_front(axes, _front(points), -1.0)
    for point in points:
        _draw_point(axes, point)
    # The star marks the recommendation independently of the ring and the bold font.
    names = ["★ " * point.recommended + text.shorten(point.name, 28) for point in points]
    if keyed:
        _draw_key(figure, [point.series for point in points], names, key_rows, height - key)
        names = [str(number) for number, _ in enumerate(points, start=1)]
    return figure, _label_accuracy(axes, points, names, steps)


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


def _limit_accuracy(axes: Axes, points: Sequence[_PlotPoint]) -> None:
    """Set a vertical range around all points and bars, wide enough that noise does not look like a difference."""
    values = [value for point in points for value in (point.value, *(point.bounds or ()))]
    low, high = min(values), max(values)
    padding = max(0.18 * (high - low), 0.5 - (high - low) / 2, 0.1)
    axes.set_ylim(low - padding, high + padding)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    axes.tick_params(axis="y", length=0)


def _draw_point(axes: Axes, point: _PlotPoint) -> None:
    """One marker with its bar; the recommended one gets a ring."""
    colour = figures.SERIES[point.series]
    if point.bounds is not None:
        low, high = point.bounds
        axes.plot([point.latency] * 2, [low, high], color=colour, linewidth=1.5, solid_capstyle="butt", zorder=2)
        axes.plot([point.latency] * 2, [low, high], linestyle="none", marker="_", markersize=9, color=colour, zorder=2)
    figures.mark_point(axes, point.place, point.series, point.recommended)


def _label_accuracy(
    axes: Axes, points: Sequence[_PlotPoint], names: Sequence[str], steps: Sequence[figures.Place]
) -> bool:
    """Label every point; returns whether there was room for all figures."""
    texts, obstacles = [], []
    for point, name in zip(points, names, strict=True):
        label = axes.text(
            *(*point.place, name),
            color=figures.INK,
            fontweight="bold" if point.recommended else "normal",
            fontsize=12,
            parse_math=False,
            zorder=5,
        )
        texts.append(label)
        obstacles += _obstacles(axes, point, 10 if point.recommended else 7)
    lines = [_level_line(axes, points[0].value)] if points[0].name == ORIGINAL else []
    ends = [(float(x), float(y)) for x, y in axes.transData.transform(steps)] if steps else []
    lines += itertools.pairwise(ends)
    return figures.label_points(axes, [point.place for point in points], texts, obstacles, lines)


def _obstacles(axes: Axes, point: _PlotPoint, radius: float) -> list[figures.PixelBox]:
    """The boxes in pixels that a point's marker and bar take up."""
    x, y = (float(value) for value in axes.transData.transform(point.place))
    boxes = [figures.PixelBox(x - radius, y - radius, x + radius, y + radius)]
    if point.bounds is not None:
        bottom, top = (float(axes.transData.transform((point.latency, bound))[1]) for bound in point.bounds)
        boxes.append(figures.PixelBox(x - 6, bottom - 2, x + 6, top + 2))
    return boxes


def _level_line(axes: Axes, value: float) -> figures.Line:
    """The dashed line at the original's level, in pixels."""
    (left, y), (right, _) = axes.transData.transform([(limit, value) for limit in axes.get_xlim()])
    return (float(left), float(y)), (float(right), float(y))


# The refresh interval of the page of a running sweep.
REFRESH_SECONDS = 10
# Above this number of points, none is numbered: numbers would hide the points.
_MOST_NUMBERS = 60


def recipe_outcome(recipe: SweptRecipe) -> tuple[Badge, str]:
    """The outcome of a recipe: the badge of its gate and its verdict, or why it failed."""
    report, error = recipe.report, recipe.error
    if recipe.not_begun is not None:
        return Badge("none", "–", "Not started"), text.capital(f"{recipe.not_begun}.")
    if report is None:
        found = f" ({error.found})" if error and error.found else ""
        return Badge("fail", "✕", "Failed"), f"{error.code}: {error.message}{found}" if error else ""
    where = f" Measured on {recipe.host}." if recipe.host is not None else ""
    return table.gate(report.verdict.gate, table.judges(report)), report.verdict.sentence + where


def sweep_plots(document: SweepDocument) -> list[Plot]:
    """For each device, the plots of every engine's agreement with its original, and of each metric, against
    latency."""
    reports = [recipe.report for recipe in document.recipes]
    metrics = {judged.title: judged.words for report in reports if report and (judged := table.metric(report))}
    pairs = [("Agreement with the original", None), *((text.capital(words), title) for title, words in metrics.items())]
    return [plot for measure, metric in pairs for plot in _plots(document, measure, metric)]


def _points(document: SweepDocument, metric: str | None) -> list[_PlotPoint]:
    """The engines by agreement, or the engines and originals with this metric. Artifacts are numbered across all
    recipes, as in the table."""
    points, number = [], 0
    for index, recipe in enumerate(document.recipes):
        report = recipe.report
        if report is None:
            continue
        known = table.metric(report)
        results, others = report.results, metric is not None and (known is None or known.title != metric)
        for name in report.artifacts:
            number += 1
            value = None if others else _value(report, name, metric is None)
            if value is not None and name in results:
                points.append(
                    _PlotPoint(
                        number=number,
                        name=f"{recipe.name}, {name}",
                        series=page.series_colour(index),
                        latency=results[name].latency_ms.p50,
                        value=value,
                        bounds=None,
                        recommended=name == report.starred,
                        decided=name not in report.undecided,
                        device=_device(report, name),
                    )
                )
    return points


def _device(report: Report, artifact: str) -> str:
    """The device that an artifact ran on: the machine, and the device if it is not the CPU."""
    engine, machine = report.engine(artifact), ", ".join(name_host(report.environment))
    target = TARGETS.get(engine.target) if engine is not None else None
    return machine if target is None or target.device == "CPU" else f"{target.device}, {machine}"


def _value(report: Report, artifact: str, agreement: bool) -> float | None:
    engine = report.engine(artifact)
    if engine is None:
        return None if agreement else report.reference_value
    return engine.verify.agreement if agreement else engine.verify.value


def _plots(document: SweepDocument, measure: str, metric: str | None) -> Iterator[Plot]:
    points = _points(document, metric)
    devices = list(dict.fromkeys(point.device for point in points))
    for number, device in enumerate(devices):
        name = "sweep-agreement" if metric is None else f"sweep-{''.join(filter(str.isalnum, metric))}"
        title = f"{measure} and latency" + (f": {device}" if len(devices) > 1 else "")
        on_it = [point for point in points if point.device == device]
        yield _plot(on_it, measure, title, f"{name}-{number}" if number else name)


def _plot(points: list[_PlotPoint], measure: str, title: str, name: str) -> Plot:
    facts = "; ".join(
        f"{point.number}, {point.name}: {text.number(point.value)} % at {text.significant(point.latency)} ms"
        for point in points
    )
    wide, narrow = both_variants(
        lambda is_narrow: _draw(points, measure, is_narrow), name, f"{measure} against p50 latency. {facts}."
    )
    caption = "Higher is better, further left is faster. Each recipe has a colour; numbers refer to the table."
    if any(point.recommended for point in points):
        caption += " A ring marks the recommendation of a recipe."
    undecided = [f"{point.number}" for point in points if not point.decided]
    if undecided:
        caption += f" The latencies of {', '.join(undecided)} are not decided."
    return Plot(title, caption, wide, narrow)


def _draw(points: list[_PlotPoint], measure: str, narrow: bool) -> Figure:
    figure = figures.new_figure(*((360, 360) if narrow else (840, 420)))
    axes = _percent_plane(figure, points, measure)
    values = [point.value for point in points]
    padding = max(0.12 * (max(values) - min(values)), 0.5)
    axes.set_ylim(min(values) - padding, max(values) + padding)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    for point in points:
        figures.mark_point(axes, point.place, point.series, point.recommended)
    if len(points) <= _MOST_NUMBERS:
        figures.number_points(axes, [point.place for point in points], [point.number for point in points])
    return figure


# --- The page of a search: the outcome of every variant, and distance against latency ---------------------------------


# The lower end of the logarithmic axis, as a share of the largest distance: below it, all variants answer alike.
FLOOR = 1e-4


def outcome(variant: VariantFacts, document: TuneDocument) -> str:
    """The outcome of a variant in a few words."""
    verdict, name = document.verdict, variant.name
    if not variant.finalist:
        return "dominated by another variant"
    if name in verdict.confirmed:
        best = name == verdict.recommended != document.starred
        return "finalist, confirmed; the best estimate" if best else "finalist, confirmed"
    if name != verdict.stopped:
        return "finalist, not considered"
    return "finalist, not confirmed; the best estimate" if name == verdict.recommended else "finalist, not confirmed"


def pareto_plot(document: TuneDocument) -> Plot:
    """The plot of distance (lower is closer) against latency (left is faster), with the Pareto front as a line."""
    facts = "; ".join(
        f"{number}, {each.name}: {text.small(each.distance)} at {text.significant(each.latency_ms)} ms"
        for number, each in enumerate(document.nearest, start=1)
    )
    wide, narrow = both_variants(
        lambda is_narrow: _draw_variants(document, is_narrow),
        "pareto",
        f"Distance from the original against latency of {len(document.variants)} variants. {facts}.",
    )
    front = (
        f"No Pareto front is drawn: {document.noise}."
        if document.noise
        else "The line is the Pareto front: no variant was both closer and faster."
    )
    caption = (
        f"Lower is closer to the original, further left is faster. {front} Numbers refer to the table. Distances: "
        f"{document.unit}, mean over the calibration images; those close to zero are drawn at the edge."
    )
    return Plot("All variants", caption, wide, narrow)


def _draw_variants(document: TuneDocument, narrow: bool) -> Figure:
    variants = document.nearest
    floor = max(FLOOR * max(variant.distance for variant in variants), 1e-15)
    places = [(variant.latency_ms, max(variant.distance, floor)) for variant in variants]
    figure = figures.new_figure(360 if narrow else 840, 360)
    axes = figures.plane(figure, "latency, ms (median)", f"Distance: {document.unit}", left=58)
    axes.set_yscale("log")
    axes.set_ylim(floor / 2, 3 * max(y for _, y in places))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text.small(value, 1)))
    axes.tick_params(axis="y", length=0)
    figures.limit_latency(axes, [x for x, _ in places], padding=0.12)
    drawn = [place for place, each in zip(places, variants, strict=True) if each.finalist and not document.noise]
    corners = figures.draw_front(axes, drawn)
    series = page.colours(document)
    for place, each in zip(places, variants, strict=True):
        figures.mark_point(axes, place, series[each.name], each.name == document.starred)
    ends = [(float(x), float(y)) for x, y in axes.transData.transform(corners)]
    figures.number_points(axes, places, range(1, len(places) + 1), list(itertools.pairwise(ends)))
    return figure


def left_out(document: TuneDocument) -> list[tuple[str, str]]:
    """The untried variants grouped by reason, as (what, why)."""
    reasons: dict[str, list[str]] = {}
    for each in document.left_out:
        reasons.setdefault(each.why, []).append(each.what)
    return [(", ".join(what), why) for why, what in reasons.items()]
