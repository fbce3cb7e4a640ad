"""The pages of many engines: all of a sweep in one plane of latency and agreement, and all variants of a search."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from vitdeploy.backends import TARGETS
from vitdeploy.document.report import Report
from vitdeploy.document.sweep import SweepDocument, SweptRecipe, TuneDocument, VariantFacts
from vitdeploy.report import figures, table, text
from vitdeploy.report.figures import Plot, both_variants
from vitdeploy.report.page import colours, series_colour
from vitdeploy.report.table import Badge
from vitdeploy.runtime.host import name_host

# How often a browser looks at the page of a sweep that goes on.
REFRESH_SECONDS = 10
# With more points than this none is numbered: numbers would hide the points.
_MOST_NUMBERS = 60


@dataclass(frozen=True)
class PlacedEngine:
    """An artifact in the plane: its number in the table, and the colour of its recipe."""

    number: int
    name: str
    series: int
    latency: float
    value: float
    recommended: bool
    decided: bool
    device: str


def recipe_outcome(recipe: SweptRecipe) -> tuple[Badge, str]:
    """How a recipe ended: the badge of its gate, and its verdict, or why it failed."""
    report, error = recipe.report, recipe.error
    if recipe.not_begun is not None:
        return Badge("none", "–", "Not begun"), text.capital(f"{recipe.not_begun}.")
    if report is None:
        found = f" ({error.found})" if error and error.found else ""
        return Badge("fail", "✕", "Failed"), f"{error.code}: {error.message}{found}" if error else ""
    where = f" Measured on {recipe.host}." if recipe.host is not None else ""
    return table.gate(report.verdict.gate, table.judges(report)), report.verdict.sentence + where


def sweep_plots(document: SweepDocument) -> list[Plot]:
    """For each device: agreement with its own original against latency, of every engine; and each metric against
    latency."""
    reports = [each.report for each in document.recipes]
    metrics = {found.title: found.words for report in reports if report and (found := table.metric(report))}
    asked = [("Agreement with its original", None), *((text.capital(words), title) for title, words in metrics.items())]
    return [plot for measure, metric in asked for plot in _plots(document, measure, metric)]


def _points(document: SweepDocument, metric: str | None) -> list[PlacedEngine]:
    """The engines by agreement, or those of a metric, with their originals, by that. Artifacts are numbered through all
    recipes, as the table has them."""
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
                    PlacedEngine(
                        number=number,
                        name=f"{recipe.name}, {name}",
                        series=series_colour(index),
                        latency=results[name].latency_ms.p50,
                        value=value,
                        recommended=name == report.starred,
                        decided=name not in report.undecided,
                        device=_device(report, name),
                    )
                )
    return points


def _device(report: Report, artifact: str) -> str:
    """What an artifact ran on: the kind of machine, and what of it if that is not its CPU."""
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


def _plot(points: list[PlacedEngine], measure: str, title: str, name: str) -> Plot:
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


def _decided(points: list[PlacedEngine]) -> list[tuple[float, float]]:
    """Latency and loss of the points that a front may be made of."""
    return [(point.latency, -point.value) for point in points if point.decided]


def _draw(points: list[PlacedEngine], measure: str, narrow: bool) -> Figure:
    figure = figures.new_figure(*((360, 360) if narrow else (840, 420)))
    axes = figures.plane(figure, "p50 latency, ms (single stream)", f"{measure}, %")
    figures.limit_latency(axes, [point.latency for point in points], padding=0.12)
    values = [point.value for point in points]
    padding = max(0.12 * (max(values) - min(values)), 0.5)
    axes.set_ylim(min(values) - padding, max(values) + padding)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if 0 <= value <= 100 else ""))
    figures.draw_front(axes, _decided(points), sign=-1.0)
    for point in points:
        figures.mark_point(axes, (point.latency, point.value), point.series, point.recommended)
    if len(points) <= _MOST_NUMBERS:
        places = [(point.latency, point.value) for point in points]
        figures.number_points(axes, places, [point.number for point in points])
    return figure


# --- The page of a search: what became of every variant, and distance against latency ---------------------------------


# Below this share of the largest distance all variants answer alike; a logarithmic axis would show little else.
FLOOR = 1e-4


def outcome(variant: VariantFacts, document: TuneDocument) -> str:
    """What became of a variant, in a word or two."""
    verdict, name = document.verdict, variant.name
    if not variant.finalist:
        return "another was measured nearer and faster"
    if name in verdict.confirmed:
        best = name == verdict.recommended != document.starred
        return "finalist, confirmed; the best found" if best else "finalist, confirmed"
    if name != verdict.stopped:
        return "finalist, not considered"
    return "finalist, not confirmed; the best found" if name == verdict.recommended else "finalist, not confirmed"


def pareto_plot(document: TuneDocument) -> Plot:
    """Distance (down is nearer) against latency (left is faster), with the front as a line."""
    facts = "; ".join(
        f"{number}, {each.name}: {text.small(each.distance)} at {text.significant(each.latency_ms)} ms"
        for number, each in enumerate(document.nearest, start=1)
    )
    wide, narrow = both_variants(
        lambda is_narrow: _draw_variants(document, is_narrow),
        "pareto",
        f"Distance from the original against latency of {len(document.variants)} variants. {facts}.",
    )
    caption = (
        "Further down is nearer to the original, further left is faster. The line is the Pareto front: nothing was "
        "measured both nearer and faster; its variants were judged on the evaluation data. Numbers are those of the "
        f"table. Distances: {document.unit}, mean over the calibration images; near zero they are drawn at the edge."
    )
    return Plot("All variants", caption, wide, narrow)


def _draw_variants(document: TuneDocument, narrow: bool) -> Figure:
    variants = document.nearest
    floor = max(FLOOR * max(each.distance for each in variants), 1e-15)
    places = [(each.latency_ms, max(each.distance, floor)) for each in variants]
    figure = figures.new_figure(360 if narrow else 840, 360)
    axes = figures.plane(figure, "latency, ms (median)", f"Distance: {document.unit}", left=58)
    axes.set_yscale("log")
    axes.set_ylim(floor / 2, 3 * max(y for _, y in places))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text.small(value, 1)))
    axes.tick_params(axis="y", length=0)
    figures.limit_latency(axes, [x for x, _ in places], padding=0.12)
    corners = figures.draw_front(axes, [place for place, each in zip(places, variants, strict=True) if each.finalist])
    series = colours(document)
    for place, each in zip(places, variants, strict=True):
        figures.mark_point(axes, place, series[each.name], each.name == document.starred)
    ends = [(float(x), float(y)) for x, y in axes.transData.transform(corners)]
    figures.number_points(axes, places, range(1, len(places) + 1), list(itertools.pairwise(ends)))
    return figure


def left_out(document: TuneDocument) -> list[tuple[str, str]]:
    """The untried variants, grouped by reason: (what, why)."""
    reasons: dict[str, list[str]] = {}
    for each in document.left_out:
        reasons.setdefault(each.why, []).append(each.what)
    return [(", ".join(what), why) for why, what in reasons.items()]
