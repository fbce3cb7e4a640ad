"""Figures in the look of the report: placeholder colours, style, margins in pixels, the latency axis."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

# Plots are drawn in placeholder colours; each becomes a CSS variable of the page. So the same SVG serves the
# light and the dark page, and print.
INK, MUTED, RULE, PAPER = "#010101", "#010102", "#010103", "#010104"
SERIES = tuple(f"#0101{index:02x}" for index in range(0x10, 0x17))
# Parts of a bar, from the first precision to the last and what is none: they are no artifacts, and so have no colour of
# one.
PARTS = tuple(f"#0102{index:02x}" for index in range(0x10, 0x15))
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    RULE: "var(--rule)",
    PAPER: "var(--paper)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(SERIES)},
    **{colour: f"var(--part-{index})" for index, colour in enumerate(PARTS)},
}
MARKERS = ("D", "o", "s", "^", "v", "P", "X")

Place = tuple[float, float]

LOG_FROM = 4.0  # a wider range than this is drawn on a logarithmic axis

_STYLE = {
    "svg.fonttype": "none",  # real text: sharp, small, and set in the font of the page
    "svg.hashsalt": "vitdeploy",
    "text.parse_math": False,  # a "$" in a name is a "$"
    "text.usetex": False,
    "font.size": 12,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 12,
    "axes.linewidth": 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 72,  # one point is one CSS pixel
    "figure.facecolor": "none",
    "grid.color": RULE,
    "grid.linewidth": 0.75,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 11.5,
    "ytick.labelsize": 11.5,
}


@contextmanager
def plot_style() -> Iterator[None]:
    """The style in which a figure must be both built and written; a user's own matplotlibrc has no say."""
    with matplotlib.style.context(["default", _STYLE]):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure measured in CSS pixels, on a canvas that can measure text."""
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasAgg(figure)
    return figure


def axes_in(figure: Figure, *, left: float, right: float, bottom: float, top: float) -> Axes:
    """Axes with margins in pixels, which stay right whatever the size of the figure."""
    width, height = figure.get_size_inches() * 72
    return figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
    )


def mark_legend(axes: Axes, handles: Sequence[Line2D], *, right: bool = False, gap: float = 0.4) -> None:
    """The legend of the marks, in one line above the plot; `gap` in letter heights."""
    axes.legend(
        handles=handles,
        loc="lower right" if right else "lower left",
        bbox_to_anchor=(1 if right else 0, 1.0),
        borderaxespad=gap,
        borderpad=0,
        ncols=len(handles),
        frameon=False,
        labelcolor=MUTED,
        handletextpad=0.1,
        columnspacing=1.4,
    )


def limit_latency(axes: Axes, values: Sequence[float], padding: float) -> None:
    """A horizontal latency axis around the values, logarithmic where they differ by much."""
    low, high = float(min(values)), float(max(values))
    if low > 0 and high / low > LOG_FROM:
        margin = (high / low) ** padding
        low, high = low / margin, high * margin
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(_log_ticks(low, high)))
    else:
        margin = max(padding * (high - low), 0.02 * high)
        low, high = max(0.0, low - margin), high + margin
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(low, high)


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two limits: the sparsest set that has at least three of them."""
    exponents = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks: list[float] = []
    for mantissas in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [float(f"{m}e{e}") for e in exponents for m in mantissas if low <= float(f"{m}e{e}") <= high]
        if len(ticks) >= 3:
            break
    return ticks


def front(places: Sequence[Place]) -> list[Place]:
    """The Pareto front of the points (x, y), lower is better in both, from left to right."""
    found: list[Place] = []
    for x, y in sorted(set(places)):
        if not found or y < found[-1][1]:
            found.append((x, y))
    return found


def corners(places: Sequence[Place]) -> list[Place]:
    """The staircase through places from left to right, each lower than the one before: what is beyond is dominated."""
    steps = list(places[:1])
    for (_, higher), (right, lower) in itertools.pairwise(places):
        steps += [(right, higher), (right, lower)]
    return steps


def draw_front(axes: Axes, places: Sequence[Place], sign: float = 1.0) -> list[Place]:
    """Draw the Pareto front of points (x, y), lower is better, as grey steps; returns the corners as drawn.

    sign: -1 where the axis shows -y.
    """
    steps = [(x, sign * y) for x, y in corners(front(places))]
    if len(steps) > 1:
        axes.plot(*zip(*steps, strict=True), color=MUTED, linewidth=1.2, alpha=0.8, zorder=1.4)
    return steps


def mark_point(axes: Axes, place: Place, series: int, chosen: bool) -> None:
    """A marker in the colour and shape of a series, with a ring where it is chosen."""
    colour = SERIES[series]
    if chosen:
        axes.plot(*place, marker="o", markersize=19, color="none", markeredgecolor=colour, zorder=3)
    axes.plot(
        *place,
        marker=MARKERS[series],
        markersize=9,
        color=colour,
        markeredgecolor=PAPER,
        markeredgewidth=1,
        zorder=4,
    )
