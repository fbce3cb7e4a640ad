"""The plot of latency: its distribution per artifact, and its drift over the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from vitdeploy.report import figures, labels, lookup, text
from vitdeploy.report.svg import Plot, both_variants

_DRIFT_SCALES = (2, 5, 10, 20, 50, 100, 200, 500, 1000)
_MARKS = {"p50": "o", "p90": "D", "p99": "|"}

Values = NDArray[np.float64]


def latency_plot(report: Mapping[str, Any]) -> Plot | None:
    """How latency is distributed per artifact, and how it moved over the rounds."""
    results = lookup.bench_results(report)
    names = [name for name in lookup.artifact_order(report) if name in results]
    if not names:
        return None
    facts = "; ".join(
        f"{name}: " + ", ".join(f"{key} {text.significant(results[name]['latency_ms'][key])} ms" for key in _MARKS)
        for name in names
    )
    wide, narrow = both_variants(
        lambda is_narrow: _draw_latency(report, names, is_narrow),
        "latency",
        f"Distribution of single-stream latency, and block medians over the rounds. {facts}.",
    )
    caption = (
        "Every tick under a curve is one measured latency. The block medians show how far each artifact’s latency "
        "moved from its own median over the rounds: a level line is a steady machine, a slope is drift."
    )
    return Plot("Latency", caption, wide, narrow)


def _draw_latency(report: Mapping[str, Any], names: Sequence[str], narrow: bool) -> Figure:
    """One variant: distribution and drift side by side, or one above the other on a phone."""
    count = len(names)
    if narrow:
        half = count * 62.0
        figure = figures.new_figure(360, 2 * half + 190)
        distribution = figures.axes_in(figure, left=10, right=12, bottom=half + 142, top=44)
        drift = figures.axes_in(figure, left=10, right=12, bottom=48, top=half + 118)
    else:
        figure = figures.new_figure(840, count * 58 + 80)
        left = _label_width(figure, names) + 18
        split = left + (840 - left) * 0.62
        distribution = figures.axes_in(figure, left=left, right=840 - split, bottom=48, top=32)
        drift = figures.axes_in(figure, left=split + 28, right=12, bottom=48, top=32)
    _draw_distributions(distribution, report, names)
    _draw_drift(drift, report, names)
    for axes in (distribution, drift):
        axes.set_ylim(-count + 0.66, 0.9)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0, pad=12)
        axes.set_yticks([])
    if narrow:
        _names_above(distribution, names, 0.56)
        _names_above(drift, names, 0.4)
    else:
        distribution.set_yticks([-index for index in range(count)], [text.shorten(name, 30) for name in names])
        distribution.tick_params(axis="y", labelcolor=figures.INK, labelsize=12)
    return figure


def _label_width(figure: Figure, names: Sequence[str]) -> float:
    """The room that the longest artifact name needs."""
    probe = figure.text(0, 0, "", fontsize=12, parse_math=False)
    widths = []
    for name in names:
        probe.set_text(text.shorten(name, 30))
        widths.append(labels.text_size(probe)[0])
    probe.remove()
    return max(widths)


def _names_above(axes: Axes, names: Sequence[str], height: float) -> None:
    """On a phone each row is named above its line, not beside it."""
    for index, name in enumerate(names):
        place = (0, -index + height)
        axes.text(
            *place, text.shorten(name, 40), transform=axes.get_yaxis_transform(), color=figures.INK, parse_math=False
        )


def _draw_distributions(axes: Axes, report: Mapping[str, Any], names: Sequence[str]) -> None:
    """Per artifact a density curve, the samples as a rug, and the three percentiles."""
    results, samples = lookup.bench_results(report), report["bench"]["samples_ms"]
    values = {name: _usable(samples.get(name)) for name in names}
    marks = [results[name]["latency_ms"][key] for name in names for key in _MARKS]
    figures.limit_latency(axes, [*marks, *np.concatenate(list(values.values()))], padding=0.03)
    logarithmic = axes.get_xscale() == "log"
    axes.set_xlabel("latency, ms (logarithmic)" if logarithmic else "latency, ms")
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    for index, name in enumerate(names):
        colour = figures.SERIES[lookup.series(report, name)]
        if values[name].size:
            _draw_density(axes, values[name], -index, colour, logarithmic)
        for key, marker in _MARKS.items():
            _draw_mark(axes, results[name]["latency_ms"][key], -index, marker, colour)
    _mark_legend(axes)


def _usable(samples: Sequence[float] | None) -> Values:
    """The samples that a latency axis can show."""
    values = np.asarray(samples or [], dtype=np.float64)
    return values[np.isfinite(values) & (values > 0)]


def _draw_density(axes: Axes, values: Values, base: float, colour: str, logarithmic: bool) -> None:
    """A curve above the base line and one short tick per sample below it."""
    scaled = np.log(values) if logarithmic else values
    grid, height = density(scaled)
    grid = np.exp(grid) if logarithmic else grid
    axes.fill_between(grid, base, base + 0.46 * height, color=colour, alpha=0.22, linewidth=0, zorder=2)
    axes.plot(grid, base + 0.46 * height, color=colour, linewidth=1.2, zorder=3)
    # All ticks are one path, broken by gaps; samples closer than the rounding would only print over each other.
    step = max(float(np.ptp(scaled)), 1e-9) / 500
    unique = np.unique(np.round(scaled / step)) * step
    positions = np.exp(unique) if logarithmic else unique
    x = np.repeat(positions, 3)
    y = np.tile([base - 0.09, base - 0.17, np.nan], positions.size)
    axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.55, zorder=2, solid_capstyle="butt")


def density(values: Values, points: int = 160) -> tuple[Values, Values]:
    """A Gaussian kernel density with a peak of 1, evaluated around the values."""
    spread = float(np.std(values))
    quartiles = np.percentile(values, [25, 75])
    robust = float(quartiles[1] - quartiles[0]) / 1.34
    width = 0.9 * (min(spread, robust) or spread) * values.size**-0.2
    # Identical values have no width of their own.
    width = max(width, 1e-3 * abs(float(np.mean(values))), 1e-9)
    # Most of the curve's points go where most of the samples are.
    body = np.percentile(values, np.linspace(0, 100, points - 40))
    ends = np.linspace(values.min() - 3 * width, values.max() + 3 * width, 40)
    grid = np.unique(np.concatenate([body, ends]))
    height = np.exp(-0.5 * ((grid[:, None] - values[None, :]) / width) ** 2).sum(axis=1)
    return grid, height / height.max()


def _draw_mark(axes: Axes, value: float, base: float, marker: str, colour: str) -> None:
    """A percentile on the base line: p50 filled, p90 open, p99 a bar."""
    face = colour if marker == "o" else figures.PAPER
    size = {"o": 8.0, "D": 6.5, "|": 14.0}[marker]
    edge = figures.PAPER if marker == "o" else colour
    width = 1.0 if marker == "o" else 1.8
    axes.plot(
        value,
        base,
        marker=marker,
        markersize=size,
        color=face,
        markeredgecolor=edge,
        markeredgewidth=width,
        zorder=5,
        clip_on=False,
    )


def _mark_legend(axes: Axes) -> None:
    """What the three marks mean, above the plot."""
    handles = []
    for key, marker in _MARKS.items():
        face = figures.MUTED if marker == "o" else figures.PAPER
        handle = Line2D([], [], linestyle="none", marker=marker, color=face, label=key)
        handle.set(markeredgecolor=figures.MUTED, markersize={"o": 8, "D": 6.5, "|": 12}[marker], markeredgewidth=1.6)
        handles.append(handle)
    axes.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        borderaxespad=0.4,
        borderpad=0,
        ncols=3,
        frameon=False,
        labelcolor=figures.MUTED,
        handletextpad=0.1,
        columnspacing=1.4,
    )


def _draw_drift(axes: Axes, report: Mapping[str, Any], names: Sequence[str]) -> None:
    """Per artifact the block medians over the rounds, as percents of their own median, on one common scale."""
    medians = report["bench"]["block_medians_ms"]
    moves = {name: block_drift(medians.get(name) or []) for name in names}
    largest = max((float(np.abs(move).max()) for move in moves.values() if move.size), default=0.0)
    scale = next((step for step in _DRIFT_SCALES if step >= largest), _DRIFT_SCALES[-1])
    rounds = max([2, *(move.size for move in moves.values())])
    for index, name in enumerate(names):
        axes.axhspan(-index - 0.3, -index + 0.3, color=figures.RULE, alpha=0.35, linewidth=0)
        axes.axhline(-index, color=figures.RULE, linewidth=1)
        colour = figures.SERIES[lookup.series(report, name)]
        x = np.arange(1, moves[name].size + 1)
        axes.plot(
            x, -index + 0.3 * moves[name] / scale, color=colour, marker="o", markersize=3.5, linewidth=1.4, zorder=3
        )
    axes.set_xlim(0.6, rounds + 0.4)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("round")
    axes.set_title(f"Block medians; band is ±{scale} %", loc="left", fontsize=12, color=figures.MUTED, pad=8)


def block_drift(medians: Sequence[float]) -> Values:
    """How far each block median is from their common median, in percent."""
    values = np.asarray(medians, dtype=np.float64)
    return 100 * (values / np.median(values) - 1) if values.size else values
