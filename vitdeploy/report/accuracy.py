"""Accuracy of a page: measures, classes, outputs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitdeploy.document.report import Judgement, Report
from vitdeploy.report import figures, lookup, measures, text
from vitdeploy.report import figures as labels
from vitdeploy.report.figures import Plot, both_variants
from vitdeploy.report.measures import Cell
from vitdeploy.report.page import RunPage
from vitdeploy.tasks.answers import AnswerFacts
from vitdeploy.tasks.tensors import LEAST_EQUAL, LEAST_SNR, OutputFacts, TensorComparison
from vitdeploy.verification.classes import ClassRow as ClassDrops
from vitdeploy.verification.classes import ConfusedPair, Confusion, Drops
from vitdeploy.verification.comparison import Comparison

# --- The plot of accuracy against latency -----------------------------------------------------------------------------


_KEY_ROW = 19.0  # pixels
_KEY_COLUMNS = 3  # of the wide variant


@dataclass(frozen=True)
class Point:
    """An artifact in the plane of accuracy and latency."""

    artifact: str
    latency: float
    value: float
    bounds: tuple[float, float] | None


def accuracy_points(report: Judgement) -> list[Point]:
    """The metric (or, without labels, agreement) and p50 latency of every benched artifact that was verified."""
    results, reference = lookup.bench_results(report), lookup.reference_value(report)
    points = []
    if lookup.ORIGINAL in results:
        # Without labels the measure is agreement with the original, which agrees with itself.
        level = 100.0 if reference is None else reference
        points.append(Point(lookup.ORIGINAL, results[lookup.ORIGINAL].latency_ms.p50, level, None))
    for engine in report.engines:
        result, verify = results.get(engine.artifact), engine.verify
        value, bounds = _accuracy(verify, reference)
        if result is not None and value is not None:
            points.append(Point(engine.artifact, result.latency_ms.p50, value, bounds))
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
    metric = measures.metric(report)
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
    if lookup.starred(report) in [point.artifact for point in points]:
        caption += " ★ marks the recommendation."
    undecided = [point.artifact for point in points if point not in decided]
    if undecided:
        caption += f" Not decided is the latency of {', '.join(undecided)}."
    return Plot("Accuracy and latency", caption, wide, narrow)


def _decided(report: Judgement, points: Sequence[Point]) -> list[Point]:
    """Those that may be on the front: of the others nobody knows how fast they are."""
    return [point for point in points if point.artifact not in lookup.undecided(report)]


def _draw_accuracy(report: Judgement, points: Sequence[Point], measure: str, narrow: bool) -> Figure:
    """One variant of the accuracy plot. Where names would crowd each other, points are numbered, with a key below."""
    figure, clean = _compose(report, points, measure, narrow, keyed=False)
    return figure if clean else _compose(report, points, measure, narrow, keyed=True)[0]


def _compose(
    report: Judgement, points: Sequence[Point], measure: str, narrow: bool, keyed: bool
) -> tuple[Figure, bool]:
    """The plot with names or numbers at its points, and whether those found room."""
    key_rows = -(-len(points) // (1 if narrow else _KEY_COLUMNS))
    key = key_rows * _KEY_ROW + 12 if keyed else 0
    width, height = (360, 360 + key) if narrow else (840, 400 + key)
    figure = figures.new_figure(width, height)
    axes = figures.axes_in(figure, left=50, right=14, bottom=48 + key, top=28)
    axes.set_xlabel("p50 latency, ms (single stream)")
    # A level title above the axis reads better than one on its side.
    axes.set_title(f"{measure}, %", loc="left", fontsize=12, color=figures.MUTED, pad=12, fontweight="normal")
    figures.limit_latency(axes, [point.latency for point in points], padding=0.12)
    _limit_accuracy(axes, points)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    if points[0].artifact == lookup.ORIGINAL:
        axes.axhline(points[0].value, color=figures.MUTED, linewidth=1, linestyle=(0, (3, 4)), zorder=1.2)
    recommended = lookup.starred(report)
    front = [(point.latency, -point.value) for point in _decided(report, points)]
    steps, colours = figures.draw_front(axes, front, -1.0), lookup.colours(report)
    for point in points:
        _draw_point(axes, point, colours[point.artifact], point.artifact == recommended)
    names = [_name(point.artifact, point.artifact == recommended) for point in points]
    if keyed:
        _draw_key(figure, [colours[point.artifact] for point in points], names, key_rows, height - key)
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


def _limit_accuracy(axes: Axes, points: Sequence[Point]) -> None:
    """A vertical range around all points and bars, not so narrow that noise looks like a difference."""
    values = [value for point in points for value in (point.value, *(point.bounds or ()))]
    low, high = min(values), max(values)
    padding = max(0.18 * (high - low), 0.5 - (high - low) / 2, 0.1)
    axes.set_ylim(low - padding, high + padding)
    axes.yaxis.set_major_locator(MaxNLocator(nbins=6, steps=[1, 2, 2.5, 5, 10]))
    # More than 100 % and less than 0 are only there as room for the marker and its label.
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}" if 0 <= value <= 100 else ""))
    axes.tick_params(axis="y", length=0)


def _draw_point(axes: Axes, point: Point, index: int, recommended: bool) -> None:
    """One marker with its bar; the recommended one gets a ring."""
    colour = figures.SERIES[index]
    if point.bounds is not None:
        low, high = point.bounds
        axes.plot([point.latency] * 2, [low, high], color=colour, linewidth=1.5, solid_capstyle="butt", zorder=2)
        axes.plot([point.latency] * 2, [low, high], linestyle="none", marker="_", markersize=9, color=colour, zorder=2)
    figures.mark_point(axes, (point.latency, point.value), index, recommended)


def _label_accuracy(
    axes: Axes, points: Sequence[Point], names: Sequence[str], recommended: str | None, steps: Sequence[figures.Place]
) -> bool:
    """Label every point; returns whether there was room for all labels."""
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
    lines = [_level_line(axes, points[0].value)] if points[0].artifact == lookup.ORIGINAL else []
    ends = [(float(x), float(y)) for x, y in axes.transData.transform(steps)] if steps else []
    lines += itertools.pairwise(ends)
    places = [(point.latency, point.value) for point in points]
    return labels.label_points(axes, places, texts, obstacles, lines)


def _name(artifact: str, recommended: bool) -> str:
    """The artifact's name, saying what is special about it without relying on the ring or the boldness."""
    name = text.shorten(artifact, 28)
    return f"★ {name}" if recommended else name


def _obstacles(axes: Axes, point: Point, radius: float) -> list[labels.Box]:
    """The boxes in pixels that a point's marker and bar take up."""
    x, y = (float(value) for value in axes.transData.transform((point.latency, point.value)))
    boxes = [labels.Box(x - radius, y - radius, x + radius, y + radius)]
    if point.bounds is not None:
        bottom, top = (float(axes.transData.transform((point.latency, bound))[1]) for bound in point.bounds)
        boxes.append(labels.Box(x - 6, bottom - 2, x + 6, top + 2))
    return boxes


def _level_line(axes: Axes, value: float) -> labels.Line:
    """The dashed line at the original's level, in pixels."""
    (left, y), (right, _) = axes.transData.transform([(limit, value) for limit in axes.get_xlim()])
    return (float(left), float(y)), (float(right), float(y))


# --- Class by class: which are confused, and which provably lose ------------------------------------------------------


# Shades of a cell, from its share of the row.
SHADES = 5
# A phone has room for this many digits in a row of the matrix.
PHONE_DIGITS = 32
# Classes that a sentence names.
NAMED_CLASSES = 5
LONGEST_NAME, UPRIGHT_NAME = 18, 3  # letters of a class above its column, at all and without being turned


@dataclass(frozen=True)
class MatrixCell:
    """The count; the shade, 0 to SHADES; the difference from the original's count ("" if equal)."""

    count: str
    shade: int
    change: str


@dataclass(frozen=True)
class Matrix:
    """A row for each true class, a column for each answer. `upright`: the names of columns are that short. `phone`:
    there is room for it on one."""

    classes: list[str]
    upright: bool
    rows: list[tuple[str, list[MatrixCell]]]
    phone: bool


@dataclass(frozen=True)
class Confused:
    """A true class, the wrong answer to it, how often the original and the engine give it, and the difference."""

    truth: str
    answer: str
    original: str
    engine: str
    change: str


@dataclass(frozen=True)
class ClassRow:
    """One class. `proven`: the whole interval of the drop is above zero."""

    name: str
    n: str
    original: str
    value: str
    drop: Cell
    proven: bool


@dataclass(frozen=True)
class Classes:
    """One engine class by class. `headline` says what is proven of its classes."""

    artifact: str
    matrix: Matrix | None
    pairs: list[Confused]
    headline: str
    rows: list[ClassRow]


@dataclass(frozen=True)
class ClassesView:
    """The section. `left`: how many confusions, and how many classes, are not listed."""

    noun: str
    engines: list[Classes]
    left: tuple[int, int]


def classes_view(page: RunPage) -> list[ClassesView]:
    """The section; none where samples have no class."""
    found = class_views(page.report)
    return [ClassesView(page.report.data.noun, found, left(page.report))] if found else []


def left(report: Report) -> tuple[int, int]:
    """The numbers of confusions and of classes that are not listed."""
    found = report.answers or AnswerFacts()
    return found.confusion.left if found.confusion else 0, found.classes.left if found.classes else 0


def class_views(report: Report) -> list[Classes]:
    """Shipped or recommended engines, class by class, the recommended first; none without classes."""
    found = report.answers
    if found is None or found.confusion is None or found.classes is None:
        return []
    names = [name for name in lookup.focus(report) if name in found.changed]
    return [_classes(found.confusion, found.classes, name) for name in names]


def _classes(confusion: Confusion, classes: Drops, artifact: str) -> Classes:
    matrix = None
    if confusion.matrix and confusion.classes:
        both = [confusion.matrix[name] for name in (lookup.ORIGINAL, artifact)]
        matrix = _matrix(confusion.classes, *both)
    pairs = [_confused(pair, artifact) for pair in confusion.pairs]
    rows = [_class_row(row, artifact) for row in classes.rows]
    return Classes(artifact, matrix, pairs, class_headline(classes, artifact), rows)


def _matrix(classes: Sequence[str], original: Sequence[Sequence[int]], engine: Sequence[Sequence[int]]) -> Matrix:
    rows, widest = [], 1
    for name, theirs, ours in zip(classes, original, engine, strict=True):
        total = max(sum(ours), 1)
        widest = max(widest, *(len(str(each)) for each in ours))
        cells = [
            MatrixCell(str(b) if b else "", math.ceil(SHADES * b / total), _signed(b - a))
            for a, b in zip(theirs, ours, strict=True)
        ]
        rows.append((name, cells))
    names = [text.shorten(name, LONGEST_NAME) for name in classes]
    upright = max(map(len, names)) <= UPRIGHT_NAME
    return Matrix(names, upright, rows, widest * len(classes) <= PHONE_DIGITS)


def _signed(change: int) -> str:
    return f"{change:+d}".replace("-", "−") if change else ""


def _confused(pair: ConfusedPair, artifact: str) -> Confused:
    original, engine = (pair.counts.get(name, 0) for name in (lookup.ORIGINAL, artifact))
    change = _signed(engine - original) or "0"
    return Confused(pair.truth, pair.answer, text.number(original, 0), text.number(engine, 0), change)


def _class_row(row: ClassDrops, artifact: str) -> ClassRow:
    engine = row.engines[artifact]
    return ClassRow(
        row.name,
        text.number(row.n, 0),
        text.number(row.original),
        text.number(engine.value),
        Cell(text.number(engine.drop), text.interval(engine.drop_ci95)),
        engine.drop_ci95[0] > 0,
    )


def class_headline(classes: Drops, artifact: str) -> str:
    """The classes that lose, if the intervals of all classes together prove it."""
    lost = classes.lost[artifact]
    if not lost.classes:
        return f"No class provably loses accuracy ({text.count(classes.classes, 'class', 'classes')} together, 95 %)."
    parts = [
        f"{each.name} {text.number(each.drop)} points ({text.interval(each.drop_ci95)})"
        for each in lost.worst[:NAMED_CLASSES]
    ]
    more = f"; and {lost.classes - NAMED_CLASSES} more" if lost.classes > NAMED_CLASSES else ""
    return f"Provably lost: {'; '.join(parts)}{more}."


# --- Outputs of no known task, each by how far every engine's lies from the original's --------------------------------


@dataclass(frozen=True)
class OutputRow:
    """One output of one engine, in words."""

    artifact: str
    output: str
    difference: str
    cosine: str
    snr: str
    equal: str


@dataclass(frozen=True)
class OutputsView:
    """The section, with the bounds from which an image counts as answered alike."""

    rows: list[OutputRow]
    least_snr: str
    least_equal: str


def outputs_view(page: RunPage) -> list[OutputsView]:
    """The section; none of a task that reads its outputs."""
    rows = [
        _row(engine.artifact, facts)
        for engine in page.report.engines
        if isinstance(engine.verify, TensorComparison)
        for facts in engine.verify.outputs
    ]
    return [OutputsView(rows, text.significant(LEAST_SNR), text.significant(100 * LEAST_EQUAL))] if rows else []


def _row(artifact: str, facts: OutputFacts) -> OutputRow:
    exact = facts.equal is not None
    return OutputRow(
        artifact,
        facts.name,
        text.small(facts.max_difference),
        f"{text.number(facts.cosine_mean, 5)}, least {text.number(facts.cosine_min, 5)}" if not exact else text.MISSING,
        text.MISSING if exact else _decibels(facts.snr, facts.snr_min),
        text.number(facts.equal),
    )


def _decibels(whole: float | None, least: float | None) -> str:
    if whole is None:
        return "no error"
    return f"{text.number(whole, 1)}, least {'no error' if least is None else text.number(least, 1)}"
