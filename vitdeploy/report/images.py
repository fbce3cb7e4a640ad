"""Pictures of a page: plots, strips of images, their sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from vitdeploy.document.report import SizeRow
from vitdeploy.report import figures, lookup, measures, text
from vitdeploy.report import figures as labels
from vitdeploy.report.page import RunPage
from vitdeploy.tasks.answers import Metric

# --- The time of each graph of a model of several ---------------------------------------------------------------------


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


# --- The image sizes of a bundle that has several, each in a row ------------------------------------------------------


@dataclass(frozen=True)
class SizesView:
    """The section; the first row is the page's own. `metric`: None without labels."""

    noun: str
    metric: Metric | None
    rows: tuple[SizeRow, ...]


def sizes_view(page: RunPage) -> list[SizesView]:
    """The section; none of a bundle with one image size."""
    report = page.report
    return [SizesView(report.data.noun, measures.metric(report), report.sizes)] if report.sizes else []


# --- Figures of strips ------------------------------------------------------------------------------------------------
# one strip for each artifact, one above the other on one horizontal axis, each with its name.


WIDE, NARROW = 840.0, 360.0  # pixels
_HEIGHTS = {False: 58.0, True: 68.0}  # of a strip, by whether the figure is narrow
_LONGEST = 30  # letters of a name next to its strip


def new_strips(
    names: Sequence[str], notes: Sequence[str], narrow: bool, top: float, rise: float
) -> tuple[Figure, Axes]:
    """Axes with a strip for each name, the first at height 0, the next at -1, and so on.

    Beside a strip stands its name, with a note below it; on a phone both stand above it, where there is more room.

    Args:
        top: room above the strips, in pixels. rise: how far what is drawn in a strip reaches above its height, at most
            0.5.
    """
    count, height = len(names), _HEIGHTS[narrow]
    if narrow:
        figure = figures.new_figure(NARROW, count * height + top + 54)
        axes = figures.axes_in(figure, left=10, right=12, bottom=48, top=top + 6)
    else:
        figure = figures.new_figure(WIDE, count * height + top + 48)
        left = _label_width(figure, [*names, *notes]) + 30
        axes = figures.axes_in(figure, left=left, right=14, bottom=48, top=top)
    axes.set_ylim(-count + (0.62 if narrow else 0.5), rise + (0.36 if narrow else 0.14))
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    axes.set_axisbelow(True)
    for index, (name, note) in enumerate(zip(names, notes, strict=True)):
        if narrow:
            _name_above(axes, -index + rise + 0.1, name, note)
        else:
            _name_beside(axes, -index, name, note)
    return figure, axes


def _label_width(figure: Figure, names: Sequence[str]) -> float:
    """The room that the longest name or note needs, in pixels."""
    probe = figure.text(0, 0, "", fontsize=12, parse_math=False)
    widths = []
    for name in names:
        probe.set_text(text.shorten(name, _LONGEST))
        widths.append(labels.text_size(probe)[0])
    probe.remove()
    return max(widths)


def _name_beside(axes: Axes, height: float, name: str, note: str) -> None:
    lines = [(text.shorten(name, _LONGEST), figures.INK, 12.0), (note, figures.MUTED, 11.0)]
    for number, (words, colour, size) in enumerate(line for line in lines if line[0]):
        axes.annotate(
            words,
            (0, height),
            xytext=(-14, (4 if note else -4) - 15 * number),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            ha="right",
            color=colour,
            fontsize=size,
            parse_math=False,
        )


def _name_above(axes: Axes, height: float, name: str, note: str) -> None:
    axes.text(
        0,
        height,
        text.shorten(name, _LONGEST if note else 40),
        transform=axes.get_yaxis_transform(),
        color=figures.INK,
        parse_math=False,
    )
    axes.text(
        1,
        height,
        note,
        transform=axes.get_yaxis_transform(),
        ha="right",
        color=figures.MUTED,
        fontsize=11,
        parse_math=False,
    )
