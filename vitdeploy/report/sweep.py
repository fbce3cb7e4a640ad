"""The page of a sweep: every engine of every recipe in one table, and in one plane of latency and agreement."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from urllib.parse import quote

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitdeploy.backends import TARGETS
from vitdeploy.benchmark.run import spelt
from vitdeploy.document.report import Report
from vitdeploy.document.sweep import SweepDocument, SweptRecipe
from vitdeploy.report import figures, lookup, measures, table, text
from vitdeploy.report import figures as labels
from vitdeploy.report import page as notes
from vitdeploy.report.figures import Plot, both_variants
from vitdeploy.report.table import Gate, Row
from vitdeploy.runtime.host import name_host

# How often a browser looks at the page of a sweep that goes on.
REFRESH_SECONDS = 10
# With more points than this none is numbered: numbers would hide the points.
_MOST_NUMBERS = 60


@dataclass(frozen=True)
class Swept:
    """One recipe: its verdict with the badge of its gate, or why it failed; `link` leads to its report. `rows` go with
    the numbers that they have in the plot; `series` is the colour of the recipe there."""

    name: str
    sentence: str
    gate: Gate
    metric: str
    rows: list[tuple[int, Row]]
    link: str | None
    series: int


@dataclass(frozen=True)
class Point:
    """An artifact in the plane: its number in the table, and the colour of its recipe."""

    number: int
    name: str
    series: int
    latency: float
    value: float
    recommended: bool
    decided: bool
    device: str


@dataclass(frozen=True)
class SweptView:
    """What the sections of verdicts and of engines show; `legend` of the flags."""

    recipes: list[Swept]
    legend: list[tuple[str, str]]


def swept_view(document: SweepDocument) -> list[SweptView]:
    """What the sections of verdicts and of engines show."""
    recipes = swept(document)
    return [SweptView(recipes, notes.legend(flag for each in recipes for _, row in each.rows for flag in row.flags))]


@dataclass(frozen=True)
class Progressed:
    """How far a sweep is that goes on. `recipes`: such as "3 of 24 recipes"; `phase`: what is being done; `left`: the
    time that is left, "" where that is unknown; `at`: when that was so; `refresh`: seconds until it is looked at
    again."""

    recipes: str
    phase: str
    left: str
    at: str
    share: float
    refresh: int


def progressed(document: SweepDocument) -> Progressed | None:
    """None of a sweep that is done."""
    running = document.running
    if running is None:
        return None
    count, done = len(document.recipes), sum(each.not_begun is None for each in document.recipes)
    phase = running.text + (f", {running.done} of {running.total}" if running.total > 1 else "")
    left = "" if running.seconds_left is None else spelt(running.seconds_left)
    return Progressed(f"{done} of {count} recipes are done", phase, left, running.at, done / count, REFRESH_SECONDS)


def swept(document: SweepDocument) -> list[Swept]:
    """Every recipe; its artifacts are numbered through all recipes."""
    found, number = [], 1
    for index, each in enumerate(document.recipes):
        found.append(_swept(each, number, _colour(index)))
        number += len(found[-1].rows)
    return found


def _colour(index: int) -> int:
    return 1 + index % (len(figures.SERIES) - 1)


def _swept(each: SweptRecipe, first: int, series: int) -> Swept:
    report = each.report
    if each.not_begun is not None:
        return Swept(
            each.name, text.capital(f"{each.not_begun}."), Gate("none", "–", "Not begun"), "", [], None, series
        )
    if report is None:
        error = each.error
        found = f" ({error.found})" if error and error.found else ""
        said = f"{error.code}: {error.message}{found}" if error else ""
        return Swept(each.name, said, Gate("fail", "✕", "Failed"), "", [], None, series)
    metric = measures.metric(report)
    return Swept(
        each.name,
        report.verdict.sentence + (f" Measured on {each.host}." if each.host is not None else ""),
        table.gate(report.verdict.gate, table.judges(report)),
        metric.title if metric else "",
        list(enumerate(table.main_rows(report), start=first)),
        f"{quote(each.name)}/report.html",
        series,
    )


def sweep_plots(document: SweepDocument) -> list[Plot]:
    """For each device: agreement with its own original against latency, of every engine; and each metric against
    latency."""
    reports = [each.report for each in document.recipes]
    metrics = {found.title: found.words for report in reports if report and (found := measures.metric(report))}
    asked = [("Agreement with its original", None), *((text.capital(words), title) for title, words in metrics.items())]
    return [plot for measure, metric in asked for plot in _plots(document, measure, metric)]


def _points(document: SweepDocument, metric: str | None) -> list[Point]:
    """The engines by agreement, or those of a metric, with their originals, by that."""
    points = []
    for each, recipe in zip(swept(document), document.recipes, strict=True):
        report = recipe.report
        if report is None or metric not in (None, each.metric):
            continue
        results = lookup.bench_results(report)
        for number, row in each.rows:
            value = _value(report, row.artifact, metric is None)
            if value is not None and row.artifact in results:
                latency = results[row.artifact].latency_ms.p50
                name = f"{each.name}, {row.artifact}"
                decided = row.artifact not in lookup.undecided(report)
                device = _device(report, row.artifact)
                points.append(Point(number, name, each.series, latency, value, row.recommended, decided, device))
    return points


def _device(report: Report, artifact: str) -> str:
    """What an artifact ran on: the kind of machine, and what of it if that is not its CPU."""
    engine, machine = report.engine(artifact), ", ".join(name_host(report.environment))
    target = TARGETS.get(engine.target) if engine is not None else None
    return machine if target is None or target.device == "CPU" else f"{target.device}, {machine}"


def _value(report: Report, artifact: str, agreement: bool) -> float | None:
    engine = report.engine(artifact)
    if engine is None:
        return None if agreement else lookup.reference_value(report)
    return engine.verify.agreement if agreement else engine.verify.value


def _plots(document: SweepDocument, measure: str, metric: str | None) -> Iterator[Plot]:
    points = _points(document, metric)
    devices = list(dict.fromkeys(point.device for point in points))
    for number, device in enumerate(devices):
        name = "sweep-agreement" if metric is None else f"sweep-{''.join(filter(str.isalnum, metric))}"
        title = f"{measure} and latency" + (f": {device}" if len(devices) > 1 else "")
        on_it = [point for point in points if point.device == device]
        yield _plot(on_it, measure, title, f"{name}-{number}" if number else name)


def _plot(points: list[Point], measure: str, title: str, name: str) -> Plot:
    facts = "; ".join(
        f"{point.number}, {point.name}: {text.number(point.value)} % at {text.significant(point.latency)} ms"
        for point in points
    )
    wide, narrow = both_variants(
        lambda is_narrow: _draw(points, measure, is_narrow), name, f"{measure} against p50 latency. {facts}."
    )
    caption = "Further up is better, further left is faster. A colour is a recipe; numbers are those of the table."
    if len(figures.front(_decided(points))) > 1:
        caption += " The grey steps are the Pareto front: nothing was measured both faster and as good."
    if any(point.recommended for point in points):
        caption += " A ring marks what its recipe recommends."
    undecided = [f"{point.number}" for point in points if not point.decided]
    if undecided:
        caption += f" Not decided are the latencies of {', '.join(undecided)}."
    return Plot(title, caption, wide, narrow)


def _decided(points: list[Point]) -> list[tuple[float, float]]:
    """Latency and loss of the points that a front may be made of."""
    return [(point.latency, -point.value) for point in points if point.decided]


def _draw(points: list[Point], measure: str, narrow: bool) -> Figure:
    figure = figures.new_figure(*((360, 360) if narrow else (840, 420)))
    axes = figures.axes_in(figure, left=50, right=14, bottom=48, top=28)
    axes.set_xlabel("p50 latency, ms (single stream)")
    axes.set_title(f"{measure}, %", loc="left", fontsize=12, color=figures.MUTED, pad=12)
    figures.limit_latency(axes, [point.latency for point in points], padding=0.12)
    values = [point.value for point in points]
    padding = max(0.12 * (max(values) - min(values)), 0.5)
    axes.set_ylim(min(values) - padding, max(values) + padding)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if 0 <= value <= 100 else ""))
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    figures.draw_front(axes, _decided(points), sign=-1.0)
    for point in points:
        figures.mark_point(axes, (point.latency, point.value), point.series, point.recommended)
    if len(points) <= _MOST_NUMBERS:
        _number(axes, points)
    return figure


def _number(axes: Axes, points: list[Point]) -> None:
    places = [(point.latency, point.value) for point in points]
    texts = [
        axes.text(*place, str(point.number), color=figures.INK) for place, point in zip(places, points, strict=True)
    ]
    pixels = axes.transData.transform(places).tolist()
    labels.label_points(axes, places, texts, [labels.Box(x - 7, y - 7, x + 7, y + 7) for x, y in pixels], [])
