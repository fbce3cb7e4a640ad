"""The plots of latency: its distribution, and its course over time."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from vitdeploy.benchmark.summary import Row, ScenarioResult
from vitdeploy.report import figures, text
from vitdeploy.report.figures import Plot, both_variants
from vitdeploy.report.page import MeasuredBench

# --- The distribution of latency per artifact -------------------------------------------------------------------------


_RISE = 0.46  # of a strip's height: the peak of a density
_MARKS = {"p50": "o", "p90": "D", "p99": "|"}

Values = NDArray[np.float64]


def latency_plot(measured: MeasuredBench) -> Plot | None:
    """The plot of the distribution of latency per artifact; None without rows."""
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
        "Every tick under a curve is one measured latency; the curve is their density. p99 describes the tail on the "
        "right."
    )
    return Plot("Latency", caption, wide, narrow)


def bench_plots(measured: MeasuredBench | None) -> list[Plot]:
    """Plots of the distribution of latencies, and of their drift over time; none without a bench."""
    latency = latency_plot(measured) if measured is not None else None
    return [] if measured is None or latency is None else [latency, *timeline_plots(measured)]


def _percentiles(row: Row) -> dict[str, float]:
    return {key: getattr(row.latency_ms, key) for key in _MARKS}


def _draw_latency(measured: MeasuredBench, narrow: bool) -> Figure:
    """One variant: a strip for each artifact."""
    names = list(measured.rows)
    figure, axes = figures.new_strips(names, [""] * len(names), narrow, top=32, rise=_RISE)
    _draw_distributions(axes, measured)
    return figure


def _draw_distributions(axes: Axes, measured: MeasuredBench) -> None:
    """Draw per artifact a density curve, the samples as a rug, and the three percentiles."""
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
    """Draw a curve above the base line, and one short tick per sample below it."""
    scaled = np.log(values) if logarithmic else values
    grid, height = density(scaled)
    grid = np.exp(grid) if logarithmic else grid
    axes.fill_between(grid, base, base + _RISE * height, color=colour, alpha=0.22, linewidth=0, zorder=2)
    axes.plot(grid, base + _RISE * height, color=colour, linewidth=1.2, zorder=3)
    # All ticks are one path with gaps; samples closer than the rounding would overlap.
    step = max(float(np.ptp(scaled)), 1e-9) / 500
    unique = np.unique(np.round(scaled / step)) * step
    positions = np.exp(unique) if logarithmic else unique
    x = np.repeat(positions, 3)
    y = np.tile([base - 0.09, base - 0.17, np.nan], positions.size)
    axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.55, zorder=2, solid_capstyle="butt")


def density(values: Values, points: int = 160) -> tuple[Values, Values]:
    """A Gaussian kernel density, scaled to a peak of 1: the places and the heights."""
    spread = float(np.std(values))
    quartiles = np.percentile(values, [25, 75])
    robust = float(quartiles[1] - quartiles[0]) / 1.34
    width = 0.9 * (min(spread, robust) or spread) * values.size**-0.2
    # Identical values have no spread.
    width = max(width, 1e-3 * abs(float(np.mean(values))), 1e-9)
    # Most points of the curve lie where most samples are.
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


# --- The course of each artifact's latency during the bench, and of its throughput under a long load ------------------


_STEPS = (2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200, 300, 500, 700, 1000)  # percent: the ends of a strip
_BAND = 0.32  # of a strip's height, up and down: the range of the moves
_PROCESS_WIDTH = 70.0  # pixels: the width of the words "process 1"
_TOP = 46.0  # pixels: room for the labels of lines and processes
# A mark for each scenario of a benchmark run; they repeat from the fifth on.
_TIMELINE_MARKS = (("o", True), ("o", False), ("s", True), ("s", False))
_SHARED_FROM = 3  # artifacts, so that no single one dominates their mean
_MINUTES_FROM = 300.0  # seconds
_MOST_POINTS = 120  # of a line with marks; longer lines have none


@dataclass(frozen=True)
class Track:
    """The course of one artifact in one scenario over time.

    seconds, moves: float64 [blocks]; a move is the difference of a block from the median of all blocks, in percent.
    process: int64 [blocks]. level: the median of all blocks, in `unit`, NaN without blocks.
    """

    scenario: str
    seconds: Values
    moves: Values
    process: NDArray[np.int64]
    level: float
    unit: str


def _tracks_in_turns(measured: MeasuredBench) -> dict[str, list[Track]]:
    """The tracks of every artifact in scenarios measured alternately; artifacts or scenarios without times are
    left out."""
    found = {
        name: [_track(scenario, each) for scenario, each in row.scenarios.items() if each.bins is None]
        for name, row in measured.rows.items()
    }
    known = {name: [track for track in each if track.moves.size] for name, each in found.items()}
    return {name: each for name, each in known.items() if each}


def _tracks_of_runs(measured: MeasuredBench) -> dict[str, dict[str, list[Track]]]:
    """The tracks of long runs (not measured alternately), by scenario and artifact."""
    found: dict[str, dict[str, list[Track]]] = {}
    for name, row in measured.rows.items():
        for scenario, each in row.scenarios.items():
            if each.bins:
                found.setdefault(scenario, {})[name] = [_run(scenario, each)]
    return found


def _track(scenario: str, result: ScenarioResult) -> Track:
    """The track of a benchmark run, without blocks that have no answered query."""
    blocks = result.blocks
    medians = np.array([np.nan if each is None else each for each in blocks.median_ms], np.float64)
    seconds, process = np.array(blocks.begun_seconds, np.float64), np.array(blocks.process, np.int64)
    usable = np.isfinite(medians) & (medians > 0)
    level = float(np.median(medians[usable])) if usable.any() else np.nan
    return Track(scenario, seconds[usable], moves(medians[usable]), process[usable], level, " ms")


def _run(scenario: str, result: ScenarioResult) -> Track:
    """The track of one long run in images per second, from its own start."""
    bins, begun = (np.array(each, np.float64) for each in (result.bins, result.blocks.begun_seconds))
    process = np.zeros(bins.size, np.int64)
    return Track(scenario, begun - begun[0], moves(bins), process, float(np.median(bins)), "/s")


def moves(values: Values) -> Values:
    """The difference of each value from the median of all, in percent of the median. [n] -> [n]."""
    return np.asarray(100 * (values / np.median(values) - 1)) if values.size else values


def _together(tracks: Sequence[Track]) -> Iterator[tuple[Values, Values]]:
    """The mean times and mean moves of all artifacts, block by block, for each scenario and process."""
    for scenario in dict.fromkeys(track.scenario for track in tracks):
        of = [track for track in tracks if track.scenario == scenario]
        for number in np.unique(of[0].process):
            parts = [(track.seconds[track.process == number], track.moves[track.process == number]) for track in of]
            count = min(seconds.size for seconds, _ in parts)
            if count:
                means = (np.mean([part[column][:count] for part in parts], axis=0) for column in (0, 1))
                yield next(means), next(means)


def timeline_plots(measured: MeasuredBench) -> list[Plot]:
    """The plots of the benchmark run and of each long run with known times."""
    bench_run = _bench_plot(measured, _tracks_in_turns(measured))
    plots = [] if bench_run is None else [bench_run]
    for number, (scenario, runs) in enumerate(_tracks_of_runs(measured).items(), start=1):
        plots.append(_run_plot(measured, runs, scenario, number))
    return plots


def _bench_plot(measured: MeasuredBench, found: Mapping[str, Sequence[Track]]) -> Plot | None:
    if not found:
        return None
    wide, narrow = both_variants(
        lambda is_narrow: _draw(measured, found, is_narrow, "since the start of the bench", len(found) >= _SHARED_FROM),
        "timeline",
        f"The median latency of every block over time, relative to the median of all blocks. {_facts(found)}.",
    )
    shared = " The thin grey line is the mean of all artifacts." if len(found) >= _SHARED_FROM else ""
    processes = max(int(track.process.max()) for each in found.values() for track in each) + 1
    fresh = " At a dotted line, all artifacts were started again." if processes > 1 else ""
    scenarios = list(dict.fromkeys(track.scenario for each in found.values() for track in each))
    levels = "the medians" if len(scenarios) > 1 else "the median"
    caption = (
        "Each mark is the median latency of one block relative to the median of all blocks: higher is slower. The band "
        f"is the vertical range of each strip, relative to the median; {levels} of all blocks are next to the name."
        f"{shared} Artifacts take turns: moves of all artifacts come from the machine, moves of a single one from that "
        f"artifact.{fresh}"
    )
    return Plot("Timeline", caption, wide, narrow, folded=True)


def _run_plot(measured: MeasuredBench, runs: Mapping[str, Sequence[Track]], scenario: str, number: int) -> Plot:
    wide, narrow = both_variants(
        lambda is_narrow: _draw(measured, runs, is_narrow, "since the start of the artifact’s run", False),
        f"sustained-{number}",
        f"Throughput over time under {scenario}, relative to its median. {_facts(runs)}.",
    )
    caption = (
        "Throughput in every second of a run without a pause, relative to the median of that run: lower is slower. A "
        "line that falls and stays down shows a machine that heats up, or that other processes use."
    )
    return Plot(f"Timeline of {scenario}", caption, wide, narrow, folded=True)


def _facts(found: Mapping[str, Sequence[Track]]) -> str:
    """The content of the strips in words."""
    return "; ".join(
        f"{name}: "
        + ", ".join(
            f"{track.scenario} {text.significant(track.level)}{track.unit}, "
            f"{track.moves.min():+.0f} to {track.moves.max():+.0f} %"
            for track in each
        )
        for name, each in found.items()
    )


def _draw(
    measured: MeasuredBench, found: Mapping[str, Sequence[Track]], narrow: bool, begins: str, with_mean: bool
) -> Figure:
    """One variant: a strip for each artifact, all on one scale of percentages and one time axis, whose zero `begins`
    names. `with_mean`: draw the mean of all artifacts."""
    names = list(found)
    levels = [_levels(found[name]) for name in names]
    figure, axes = figures.new_strips(names, levels, narrow, top=_TOP, rise=_BAND)
    every = [track for each in found.values() for track in each]
    scenarios = list(dict.fromkeys(track.scenario for track in every))
    low, high = _limits([track.moves for track in every])
    unit, scale = (
        ("minutes", 60.0) if max(float(track.seconds.max()) for track in every) >= _MINUTES_FROM else ("seconds", 1.0)
    )

    def height(percents: Values) -> Values:
        return _BAND * (2 * (np.clip(percents, low, high) - low) / (high - low) - 1)

    shared = list(_together(every)) if with_mean else []
    for index, name in enumerate(names):
        axes.axhspan(-index - _BAND, -index + _BAND, color=figures.RULE, alpha=0.35, linewidth=0)
        axes.axhline(-index + float(height(np.zeros(1))[0]), color=figures.RULE, linewidth=1)
        for seconds, mean in shared:
            axes.plot(seconds / scale, -index + height(mean), color=figures.MUTED, linewidth=0.8, alpha=0.7, zorder=2)
        for track in found[name]:
            marker, filled = _TIMELINE_MARKS[scenarios.index(track.scenario) % len(_TIMELINE_MARKS)]
            _draw_track(axes, track, scale, -index + height(track.moves), measured.colours[name], marker, filled)
    _mark_processes(axes, every, scale)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel(f"{unit} {begins}")
    band = f"Band: {low:+d} to {high:+d} %".replace("-", "−")
    axes.set_title(band, loc="left", fontsize=12, color=figures.MUTED, pad=26, fontweight="normal")
    if len(scenarios) > 1:
        _legend(axes, scenarios)
    return figure


def _levels(tracks: Sequence[Track]) -> str:
    """The medians of an artifact's scenarios, named if there are several, with their common unit."""
    named = [f"{track.scenario} " * (len(tracks) > 1) + text.significant(track.level) for track in tracks]
    return ", ".join(named) + tracks[0].unit


def _draw_track(axes: Axes, track: Track, scale: float, y: Values, series: int, marker: str, filled: bool) -> None:
    """Draw the blocks of each process as a separate line."""
    colour = figures.SERIES[series]
    marks = track.moves.size <= _MOST_POINTS
    for number in np.unique(track.process):
        of = track.process == number
        axes.plot(
            track.seconds[of] / scale,
            y[of],
            color=colour,
            marker=marker if marks else "",
            markersize=3.6,
            markerfacecolor=colour if filled else figures.PAPER,
            linewidth=1.3,
            linestyle="-" if filled else (0, (2, 1.5)),
            zorder=3,
        )


def _limits(found: Sequence[Values]) -> tuple[int, int]:
    """The limits of the strips in percent: round numbers that contain all moves, if possible."""
    low, high = min(float(values.min()) for values in found), max(float(each.max()) for each in found)
    down, up = (next((step for step in _STEPS if step >= most), _STEPS[-1]) for most in (-low, high))
    # Neither side is much smaller than the other, and the lower one does not exceed 100 %.
    return -min(max(down, up // 5), 100), max(up, down // 5)


def _mark_processes(axes: Axes, tracks: Sequence[Track], scale: float) -> None:
    """Draw a line where all artifacts were started again, and the number of the process above each part."""
    processes = sorted({int(number) for track in tracks for number in track.process})
    if len(processes) < 2:
        return
    parts = [np.concatenate([track.seconds[track.process == number] for track in tracks]) for number in processes]
    edges = [(before.max() + after.min()) / 2 for before, after in itertools.pairwise(parts)]
    for edge in edges:
        axes.axvline(edge / scale, color=figures.MUTED, linewidth=1, linestyle=(0, (1, 2.5)), zorder=1.5)
    every = [parts[0].min(), *edges, parts[-1].max()]
    shortest = min(np.diff(every)) / (every[-1] - every[0]) * axes.get_window_extent().width
    for number, (left, right) in zip(processes, itertools.pairwise(every), strict=True):
        spelt = number == processes[0] or shortest > _PROCESS_WIDTH
        axes.annotate(
            f"process {number + 1}" if spelt else str(number + 1),
            ((left + right) / 2 / scale, 1),
            xytext=(0, 6),
            xycoords=axes.get_xaxis_transform(),
            textcoords="offset points",
            ha="center",
            color=figures.MUTED,
            fontsize=11,
        )


def _legend(axes: Axes, scenarios: Sequence[str]) -> None:
    """The legend of the marks, above the strips."""
    handles = []
    for index, scenario in enumerate(scenarios):
        marker, filled = _TIMELINE_MARKS[index % len(_TIMELINE_MARKS)]
        handle = Line2D([], [], linestyle="none", marker=marker, color=figures.MUTED, label=scenario)
        handle.set(markerfacecolor=figures.MUTED if filled else figures.PAPER, markersize=6)
        handles.append(handle)
    figures.mark_legend(axes, handles, right=True, gap=1.5)
