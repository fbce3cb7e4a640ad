"""Reliability diagrams: accuracy against confidence, for the original and the recommended engine."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from vitdeploy.document.report import Report
from vitdeploy.report import figures, lookup, text
from vitdeploy.report.page import RunPage
from vitdeploy.report.svg import Plot, both_variants
from vitdeploy.verification.classes import Reliability, ReliabilityBin


def reliability_view(page: RunPage) -> list[Plot]:
    """The section; none without labels."""
    plot = reliability_plot(page.report)
    return [plot] if plot is not None else []


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
    """Plot accuracy against confidence and, next to or below it, the number of answers by confidence."""
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
