"""What became of the answers: how many changed, which classes are confused or lose, and what confidence is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from vitdeploy.document.answers import AnswerFacts, ChangedCounts
from vitdeploy.document.report import Report
from vitdeploy.report import figures, lookup, text
from vitdeploy.report.measures import Cell
from vitdeploy.report.svg import Plot, both_variants
from vitdeploy.verify.classes import ClassRow as ClassDrops
from vitdeploy.verify.classes import ConfusedPair, Confusion, Drops, Reliability, ReliabilityBin

# Shades of a cell, from its share of the row.
SHADES = 5
# A phone has room for so many digits in a row of the matrix.
PHONE_DIGITS = 32
# Classes that a sentence names.
NAMED_CLASSES = 5
LONGEST_NAME, UPRIGHT_NAME = 18, 3  # letters of a class above its column, at all and without being turned


@dataclass(frozen=True)
class ChangedRow:
    """One engine: how many answers are others than the original's, and what that did to them ("" without labels)."""

    artifact: str
    changed: str
    lost: str
    gained: str
    other: str


@dataclass(frozen=True)
class MatrixCell:
    """How often; the shade, 0 to SHADES; by how much that is more or less often than of the original ("" the same)."""

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


def changed_rows(report: Report) -> list[ChangedRow]:
    """Every engine; none in a report that does not say."""
    found = report.answers.changed if report.answers else {}
    return [_changed(report, name, each) for name, each in found.items()]


def _changed(report: Report, artifact: str, found: ChangedCounts) -> ChangedRow:
    total = next(engine.verify.n for engine in report.engines if engine.artifact == artifact)
    words = f"{text.number(found.changed, 0)} of {text.number(total, 0)}"
    if found.lost is None or found.gained is None:
        return ChangedRow(artifact, words, "", "", "")
    other = found.changed - found.lost - found.gained
    return ChangedRow(artifact, words, *(text.number(each, 0) for each in (found.lost, found.gained, other)))


def left(report: Report) -> tuple[int, int]:
    """How many confusions, and how many classes, are not listed."""
    found = report.answers or AnswerFacts()
    return found.confusion.left if found.confusion else 0, found.classes.left if found.classes else 0


def class_views(report: Report) -> list[Classes]:
    """What is shipped or recommended, class by class, the recommended first; none without classes."""
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
    """Which classes lose, as far as the intervals of all classes together carry it."""
    lost = classes.lost[artifact]
    if not lost.classes:
        return f"No class provably loses accuracy ({text.count(classes.classes, 'class', 'classes')} together, 95 %)."
    parts = [
        f"{each.name} {text.number(each.drop)} points ({text.interval(each.drop_ci95)})"
        for each in lost.worst[:NAMED_CLASSES]
    ]
    more = f"; and {lost.classes - NAMED_CLASSES} more" if lost.classes > NAMED_CLASSES else ""
    return f"Provably lost: {'; '.join(parts)}{more}."


def reliability_plot(report: Report) -> Plot | None:
    """Accuracy against confidence, of the original and of what is recommended; None without labels."""
    found = report.answers.reliability if report.answers else None
    if not found or lookup.ORIGINAL not in found:
        return None
    names = [lookup.ORIGINAL, *(name for name in lookup.focus(report)[:1] if name in found)]
    facts = " ".join(calibration_words(name, found[name]) for name in names)
    wide, narrow = both_variants(
        lambda is_narrow: _draw(report, {name: found[name] for name in names}, is_narrow),
        "reliability",
        f"Accuracy against confidence. {facts}",
    )
    caption = (
        "Answers of about one confidence are one mark, with the 95 % interval of their accuracy; the larger, the more "
        f"answers. On the dashed line confidence is right; below it the model is too sure. {facts} The error is the "
        "mean of |confidence − accuracy| over ten bins."
    )
    return Plot("Confidence against accuracy", caption, wide, narrow)


def calibration_words(name: str, found: Reliability) -> str:
    """The calibration error, and whether it is more than chance makes of a model whose confidence is right."""
    error, chance = text.number(found.error), text.number(found.by_chance)
    words = f"{name}: calibration error {error} %"
    if found.error <= found.by_chance:
        return f"{words}, no more than chance makes of so few answers ({chance} %)."
    both = f"{text.number(found.confidence, 1)} % sure and {text.number(found.accuracy, 1)} % right"
    return f"{words}, above the {chance} % that chance makes: on the whole {both}."


def _draw(report: Report, found: Mapping[str, Reliability], narrow: bool) -> Figure:
    """Accuracy against confidence, and, beside or below, how many answers there are of each confidence."""
    width, height = (360, 584) if narrow else (840, 440)
    figure = figures.new_figure(width, height)
    above, below = {"left": 46, "right": 14 if narrow else 360}, {"left": 46 if narrow else 530, "right": 14}
    axes = figures.axes_in(figure, **above, bottom=256 if narrow else 48, top=52)
    counts = figures.axes_in(figure, **below, bottom=48, top=height - 176 if narrow else 52)
    axes.set(xlim=(-2, 102), ylim=(-2, 104))
    axes.plot([0, 100], [0, 100], color=figures.MUTED, linewidth=1, linestyle=(0, (3, 4)), zorder=1.2)
    counts.set(xlim=(-2, 102), ylim=(0, 104))
    for each, title in ((axes, "Accuracy, %"), (counts, "Share of the answers, %")):
        each.set_xlabel("confidence, %")
        pad = 32 if each is axes else 12
        each.set_title(title, loc="left", fontsize=12, color=figures.MUTED, pad=pad, fontweight="normal")
        each.grid(axis="both" if each is axes else "y")
        each.set_axisbelow(True)
        each.tick_params(length=0)
    handles = []
    for number, (name, facts) in enumerate(found.items()):
        index, aside = lookup.colours(report)[name], number - (len(found) - 1) / 2
        _draw_bins(axes, facts.bins, index, 1.2 * aside)
        _draw_counts(counts, facts.bins, index, 3.4 * aside)
        label, marker = text.shorten(name, 20 if narrow else 28), figures.MARKERS[index]
        handles.append(Line2D([], [], linestyle="none", marker=marker, color=figures.SERIES[index], label=label))
    figures.mark_legend(axes, handles, gap=0.5)
    return figure


def _draw_counts(axes: Axes, bins: Sequence[ReliabilityBin], series: int, aside: float) -> None:
    total = sum(each.n for each in bins)
    x = [10 * min(int(each.confidence // 10), 9) + 5 + aside for each in bins]
    axes.bar(x, [100 * each.n / total for each in bins], width=3.2, color=figures.SERIES[series], zorder=2)


def _draw_bins(axes: Axes, bins: Sequence[ReliabilityBin], series: int, aside: float) -> None:
    """The bins of one artifact, moved aside a little, so that two do not hide each other."""
    colour, total = figures.SERIES[series], sum(each.n for each in bins)
    x = [each.confidence + aside for each in bins]
    y = [each.accuracy for each in bins]
    axes.plot(x, y, color=colour, linewidth=1, alpha=0.6, zorder=2)
    for at, each in zip(x, bins, strict=True):
        axes.plot([at, at], each.ci95, color=colour, linewidth=1.3, solid_capstyle="butt", zorder=2.5)
        size = 5 + 9 * math.sqrt(each.n / total)
        axes.plot(
            *(at, each.accuracy),
            marker=figures.MARKERS[series],
            markersize=size,
            color=colour,
            markeredgecolor=figures.PAPER,
            markeredgewidth=0.8,
            zorder=3,
            clip_on=False,
        )
