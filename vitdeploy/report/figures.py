"""Figures in the look of the report: placeholder colours, style, margins in pixels, the latency axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

# Plots are drawn in placeholder colours, each of which becomes a CSS variable of the page. So the same SVG serves the
# light and the dark page, and print.
INK, MUTED, RULE, PAPER = "#010101", "#010102", "#010103", "#010104"
SERIES = tuple(f"#0101{index:02x}" for index in range(0x10, 0x17))
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    RULE: "var(--rule)",
    PAPER: "var(--paper)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(SERIES)},
}
MARKERS = ("D", "o", "s", "^", "v", "P", "X")

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
    """What marks mean, in one line above the plot; `gap` in heights of a letter."""
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
