"""The plot of latency: its distribution per artifact."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from vitdeploy.benchmark.row import Row
from vitdeploy.report import figures, strips, text
from vitdeploy.report.lookup import Measured
from vitdeploy.report.svg import Plot, both_variants

_RISE = 0.46  # of a strip's height: the peak of a density
_MARKS = {"p50": "o", "p90": "D", "p99": "|"}

Values = NDArray[np.float64]


def latency_plot(measured: Measured) -> Plot | None:
    """The distribution of latency per artifact."""
    if not measured.rows:
        return None
    facts = "; ".join(
        f"{name}: " + ", ".join(f"{key} {text.significant(value)} ms" for key, value in _percentiles(row).items())
        for name, row in measured.rows.items()
    )
    wide, narrow = both_variants(
        lambda is_narrow: _draw_latency(measured, is_narrow),
        "latency",
        f"Distribution of latency. {facts}.",
    )
    caption = (
        "Every tick under a curve is one measured latency; the curve is their density. A long tail to the right is "
        "what p99 tells of."
    )
    return Plot("Latency", caption, wide, narrow)


def _percentiles(row: Row) -> dict[str, float]:
    return {key: getattr(row.latency_ms, key) for key in _MARKS}


def _draw_latency(measured: Measured, narrow: bool) -> Figure:
    """One variant: a strip for each artifact."""
    names = list(measured.rows)
    figure, axes = strips.new_strips(names, [""] * len(names), narrow, top=32, rise=_RISE)
    _draw_distributions(axes, measured)
    return figure


def _draw_distributions(axes: Axes, measured: Measured) -> None:
    """Per artifact a density curve, the samples as a rug, and the three percentiles."""
    values = {name: _usable(measured.bench.samples_ms.get(name)) for name in measured.rows}
    marks = [value for row in measured.rows.values() for value in _percentiles(row).values()]
    figures.limit_latency(axes, [*marks, *np.concatenate(list(values.values()))], padding=0.03)
    logarithmic = axes.get_xscale() == "log"
    axes.set_xlabel("latency, ms (logarithmic)" if logarithmic else "latency, ms")
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    for index, (name, row) in enumerate(measured.rows.items()):
        colour = figures.SERIES[measured.colours[name]]
        if values[name].size:
            _draw_density(axes, values[name], -index, colour, logarithmic)
        for key, value in _percentiles(row).items():
            _draw_mark(axes, value, -index, _MARKS[key], colour)
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
    axes.fill_between(grid, base, base + _RISE * height, color=colour, alpha=0.22, linewidth=0, zorder=2)
    axes.plot(grid, base + _RISE * height, color=colour, linewidth=1.2, zorder=3)
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
    """The legend of the three marks, above the plot."""
    handles = []
    for key, marker in _MARKS.items():
        face = figures.MUTED if marker == "o" else figures.PAPER
        handle = Line2D([], [], linestyle="none", marker=marker, color=face, label=key)
        handle.set(markeredgecolor=figures.MUTED, markersize={"o": 8, "D": 6.5, "|": 12}[marker], markeredgewidth=1.6)
        handles.append(handle)
    figures.mark_legend(axes, handles)
