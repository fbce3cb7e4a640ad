"""Every variant that a search tried, as rows and as the plot of distance against latency."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from vitdeploy.document.sweep import TuneDocument, VariantFacts
from vitdeploy.report import figures, lookup, text
from vitdeploy.report import figures as labels
from vitdeploy.report.figures import Plot, both_variants
from vitdeploy.report.measures import Cell
from vitdeploy.search.rows import RowTiming, Schedule

# Below this share of the largest distance all variants answer alike; a logarithmic axis would show little else.
FLOOR = 1e-4


@dataclass(frozen=True)
class VariantRow:
    """One variant. `state`: what became of it, in a word or two."""

    number: int
    name: str
    series: int
    distance: Cell
    expected: str
    latency: str
    size: str
    state: str
    chosen: bool


@dataclass(frozen=True)
class ScheduleRow:
    """One schedule of token merging that was looked at."""

    merges: str
    time: str
    distance: str
    expected: str


@dataclass(frozen=True)
class RowsRow:
    """The model with this many rows: its median latency, and the ratio to that with one row per token."""

    rows: int
    latency: str
    ratio: Cell


@dataclass(frozen=True)
class VariantsView:
    """The section of all variants. `targets`: the colour of each; `title`: of the plot."""

    title: str
    calibration_images: int
    unit: str
    targets: dict[str, int]
    plot: Plot
    rows: list[VariantRow]


@dataclass(frozen=True)
class RowsView:
    """The section on numbers of rows, by target; `tokens`: how many the model has."""

    targets: dict[str, list[RowsRow]]
    tokens: dict[str, int]


@dataclass(frozen=True)
class MergingView:
    """The section on token merging, by target; `tokens`: without it."""

    unit: str
    targets: dict[str, list[ScheduleRow]]
    tokens: dict[str, int]


@dataclass(frozen=True)
class PruningRow:
    """One trial of pruning. `kept`: the widths of the parts that lose something."""

    share: str
    kept: str
    distance: str
    expected: str


@dataclass(frozen=True)
class PruningView:
    """The section on pruning."""

    unit: str
    rows: list[PruningRow]


@dataclass(frozen=True)
class LeftOutView:
    """The section on what was not tried: (what, why)."""

    rows: list[tuple[str, str]]


def variants_view(document: TuneDocument) -> list[VariantsView]:
    """The section of all variants."""
    plot, images = pareto_plot(document), document.data.calibration_images
    colours = lookup.target_colours(document)
    return [VariantsView(plot.title, images, document.unit, colours, plot, variant_rows(document))]


def rows_view(document: TuneDocument) -> list[RowsView]:
    """The section on numbers of rows; none where no target was asked."""
    found = aligned_rows(document)
    return [RowsView(found, {name: each.tokens for name, each in document.rows.items()})] if found else []


def merging_view(document: TuneDocument) -> list[MergingView]:
    """The section on token merging; none where no schedule was looked at."""
    found, tokens = schedule_rows(document), {name: each.tokens for name, each in document.merging.items()}
    return [MergingView(document.unit, found, tokens)] if found else []


def pruning_view(document: TuneDocument) -> list[PruningView]:
    """The section on pruning; none where it was not tried."""
    rows = [
        PruningRow(
            text.percent(each.share, 0),
            ", ".join(f"{name} {width}" for name, width in each.widths.items()),
            text.small(each.distance),
            text.MISSING if each.expected is None else text.number(each.expected.agreement),
        )
        for each in document.pruning or ()
    ]
    return [PruningView(document.unit, rows)] if rows else []


def left_out_view(document: TuneDocument) -> list[LeftOutView]:
    """The section on what was not tried; none where everything was."""
    found = left_out(document)
    return [LeftOutView(found)] if found else []


def variant_rows(document: TuneDocument) -> list[VariantRow]:
    """All variants, the nearest to the original first."""
    return [_row(document, number, each) for number, each in enumerate(_ordered(document), start=1)]


def _ordered(document: TuneDocument) -> list[VariantFacts]:
    return sorted(document.variants, key=lambda each: (each.distance, each.latency_ms))


def _row(document: TuneDocument, number: int, variant: VariantFacts) -> VariantRow:
    low, high = variant.ci95
    expected = variant.expected
    chosen = variant.name == lookup.starred(document)
    return VariantRow(
        number,
        variant.name,
        lookup.colours(document)[variant.name],
        Cell(text.small(variant.distance), f"{text.small(max(low, 0.0))} to {text.small(high)}"),
        text.MISSING if expected is None else text.number(expected.agreement),
        text.significant(variant.latency_ms),
        text.megabytes(variant.bytes),
        _state(document, variant),
        chosen,
    )


def _state(document: TuneDocument, variant: VariantFacts) -> str:
    verdict, name = document.verdict, variant.name
    if not variant.finalist:
        return "another was measured nearer and faster"
    if name in verdict.confirmed:
        best = name == verdict.recommended != lookup.starred(document)
        return "finalist, confirmed; the best found" if best else "finalist, confirmed"
    if name != verdict.stopped:
        return "finalist, not considered"
    return "finalist, not confirmed; the best found" if name == verdict.recommended else "finalist, not confirmed"


def aligned_rows(document: TuneDocument) -> dict[str, list[RowsRow]]:
    """Aligned rows by target, one row per token first."""
    return {target: [_aligned(each) for each in found.timings] for target, found in document.rows.items()}


def _aligned(timing: RowTiming) -> RowsRow:
    rounds = sorted(timing.rounds_ms)
    ratio = Cell(text.significant(timing.ratio), text.ratio_interval((timing.low, timing.high)))
    return RowsRow(timing.rows, text.significant(rounds[len(rounds) // 2]), ratio)


def schedule_rows(document: TuneDocument) -> dict[str, list[ScheduleRow]]:
    """Schedules by target, the fastest first."""
    return {
        target: [_schedule(each) for each in sorted(found.schedules, key=lambda each: each.time)]
        for target, found in document.merging.items()
        if found.schedules
    }


def _schedule(schedule: Schedule) -> ScheduleRow:
    expected = schedule.expected
    return ScheduleRow(
        ", ".join(f"{count} from block {block} on" for block, count in schedule.merges),
        text.percent(schedule.time, 0),
        text.small(schedule.distance),
        text.MISSING if expected is None else text.number(expected.agreement),
    )


def pareto_plot(document: TuneDocument) -> Plot:
    """Distance (down is nearer) against latency (left is faster), with the front as a line."""
    facts = "; ".join(
        f"{row.number}, {row.name}: {row.distance.value} at {row.latency} ms" for row in variant_rows(document)
    )
    wide, narrow = both_variants(
        lambda is_narrow: _draw(document, is_narrow),
        "pareto",
        f"Distance from the original against latency of {len(document.variants)} variants. {facts}.",
    )
    caption = (
        "Further down is nearer to the original, further left is faster. The line is the Pareto front: nothing was "
        "measured both nearer and faster; its variants were judged on the evaluation data. Numbers are those of the "
        f"table. Distances: {document.unit}, mean over the calibration images; near zero they are drawn at the edge."
    )
    return Plot("All variants", caption, wide, narrow)


def _draw(document: TuneDocument, narrow: bool) -> Figure:
    variants = _ordered(document)
    floor = max(FLOOR * max(each.distance for each in variants), 1e-15)
    places = [(each.latency_ms, max(each.distance, floor)) for each in variants]
    figure = figures.new_figure(360 if narrow else 840, 360)
    axes = figures.axes_in(figure, left=58, right=14, bottom=48, top=28)
    axes.set_xlabel("latency, ms (median)")
    axes.set_title(f"Distance: {document.unit}", loc="left", fontsize=12, color=figures.MUTED, pad=12)
    axes.set_yscale("log")
    axes.set_ylim(floor / 2, 3 * max(y for _, y in places))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text.small(value, 1)))
    axes.tick_params(axis="y", length=0)
    figures.limit_latency(axes, [x for x, _ in places], padding=0.12)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    corners = figures.draw_front(axes, [place for place, each in zip(places, variants, strict=True) if each.finalist])
    colours = lookup.colours(document)
    for place, each in zip(places, variants, strict=True):
        figures.mark_point(axes, place, colours[each.name], each.name == lookup.starred(document))
    _number(axes, places, corners)
    return figure


def _number(axes: Axes, places: Sequence[figures.Place], corners: Sequence[figures.Place]) -> None:
    texts = [axes.text(*place, str(number), color=figures.INK) for number, place in enumerate(places, start=1)]
    pixels = axes.transData.transform(places)
    obstacles = [labels.Box(x - 7, y - 7, x + 7, y + 7) for x, y in pixels.tolist()]
    ends = [(float(x), float(y)) for x, y in axes.transData.transform(corners)]
    labels.label_points(axes, places, texts, obstacles, list(itertools.pairwise(ends)))


def left_out(document: TuneDocument) -> list[tuple[str, str]]:
    """The untried variants, grouped by reason: (what, why)."""
    reasons: dict[str, list[str]] = {}
    for each in document.left_out:
        reasons.setdefault(each.why, []).append(each.what)
    return [(", ".join(what), why) for why, what in reasons.items()]
