"""Show where the time of each artifact goes, and its bounds: one plot, one line each, the slowest layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from vitdeploy.document.bench import Bench
from vitdeploy.document.context import ArtifactContext, LayerGroup, LayerTime, TimeShares
from vitdeploy.report import figures, text
from vitdeploy.report.svg import Plot, both_variants

# Kinds of layers that are shown at once, and layers that are listed one by one.
SHOWN_KINDS, LISTED_LAYERS = 10, 80
# Precisions in the order of their segments; what else a runtime names comes after them, in grey.
_PRECISIONS = ("int8", "fp16", "bf16", "fp32")
_COLOURS = dict(zip(_PRECISIONS, figures.PARTS, strict=False))
_OTHERS, _OUTSIDE = "layers without products", "outside of the layers"


@dataclass(frozen=True)
class LayerRow:
    """The same layer of all blocks: what it is and how often, the precision that it ran in, milliseconds in all, and
    the share of all layers."""

    name: str
    kind: str
    precision: str
    milliseconds: str
    share: str


@dataclass(frozen=True)
class Held:
    """One artifact: what stops it in one line, its layers' time and its work, its slowest layers, and how many faster
    ones there are. `layers`: each of them by itself, the slowest first, and how many of them are not listed."""

    artifact: str
    line: str
    facts: str
    rows: list[LayerRow]
    left: int
    layers: list[LayerRow]
    unlisted: int


@dataclass(frozen=True)
class ContextView:
    """The section. `machine`: its rates in a line. `missing`: what was not measured."""

    machine: str
    missing: list[str]
    artifacts: list[Held]
    plot: Plot | None


def context_view(bench: Bench | None) -> list[ContextView]:
    """Nothing where a bench has no context."""
    context = bench.context if bench else None
    if context is None or not context.machine:
        return []
    missing = [f"{each.what}: {each.why}" for each in context.left_out]
    held = [_held(each) for each in context.artifacts if each.line is not None or each.layers]
    return [ContextView(context.machine, missing, held, _plot(context.artifacts))]


def _held(found: ArtifactContext) -> Held:
    work, time = found.work, found.time
    facts = []
    if time:
        both = [text.significant(each) for each in (time.layers_ms, time.latency_ms)]
        facts.append(f"layers {both[0]} ms of a latency of {both[1]} ms")
    if work:
        facts.append(f"{_giga(sum(work.flops.values()))} GFLOP and at least {text.size(work.bytes)} a query")
    elif found.work_unknown:
        facts.append(f"work unknown: {found.work_unknown}")
    rows = [_row(group, group.count) for group in found.groups[:SHOWN_KINDS]]
    left = sum(group.count for group in found.groups[SHOWN_KINDS:])
    layers = sorted(found.layers, key=lambda layer: -layer.ms)
    return Held(
        found.artifact,
        found.line or text.MISSING,
        "; ".join(facts),
        rows,
        left,
        [_row(layer) for layer in layers[:LISTED_LAYERS]],
        max(0, len(layers) - LISTED_LAYERS),
    )


def _row(found: LayerGroup | LayerTime, count: int = 1) -> LayerRow:
    return LayerRow(
        found.name,
        found.kind if count == 1 else f"{count} × {found.kind}",
        _precision(found.precision),
        text.significant(found.ms),
        text.percent(found.share),
    )


def _precision(name: str) -> str:
    return name.upper()


def _giga(value: float) -> str:
    return text.significant(value / 1e9)


def _plot(artifacts: Sequence[ArtifactContext]) -> Plot | None:
    """A bar for each artifact with timed layers, cut into matrix products by precision, other layers, the rest."""
    timed = {each.artifact: each.time for each in artifacts if each.time is not None}
    if not timed:
        return None
    facts = "; ".join(
        f"{artifact}: " + ", ".join(f"{name} {text.significant(value)} ms" for name, value in _segments(time).items())
        for artifact, time in timed.items()
    )
    wide, narrow = both_variants(
        lambda is_narrow: _draw(timed, is_narrow), "time", f"Where the time of each artifact goes. {facts}."
    )
    caption = (
        "Products are matrix products, convolutions and attention, by the precision that they ran in. The mark is the "
        "median latency at that moment: what lies between the layers and the mark is spent outside of them; a bar that "
        "reaches beyond it was slowed by the profiler."
    )
    return Plot("Where the time goes", caption, wide, narrow)


def _segments(time: TimeShares) -> dict[str, float]:
    """Milliseconds by what they were spent on, from left to right."""
    shares = time.products
    whole = time.layers_ms / (sum(shares.values()) + sum(time.others.values()) or 1.0)
    order = [*(each for each in _PRECISIONS if each in shares), *(each for each in shares if each not in _PRECISIONS)]
    found = {f"products in {_precision(each)}": shares[each] * whole for each in order}
    found[_OTHERS] = sum(time.others.values()) * whole
    if time.outside_ms > 0:
        found[_OUTSIDE] = time.outside_ms
    return {name: value for name, value in found.items() if value > 0}


def _colour(segment: str) -> str:
    if segment == _OUTSIDE:
        return figures.RULE
    return _COLOURS.get(segment.removeprefix("products in ").lower(), figures.PARTS[-1])


def _draw(artifacts: Mapping[str, TimeShares], narrow: bool) -> Figure:
    names = list(dict.fromkeys(name for time in artifacts.values() for name in _segments(time)))
    width, row, columns = (360, 58, 1) if narrow else (840, 46, 4)
    above = 20 * -(-len(names) // columns) + 18
    figure = figures.new_figure(width, row * len(artifacts) + above + 48)
    axes = figures.axes_in(figure, left=10, right=16, bottom=44, top=above)
    for index, (artifact, time) in enumerate(artifacts.items()):
        _draw_bar(axes, artifact, time, -index)
    axes.set_ylim(-len(artifacts) + 0.55, 0.72)
    axes.set_xlim(left=0)
    axes.set_yticks([])
    axes.spines.left.set_visible(False)
    axes.set_xlabel("ms a query")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=5 if narrow else 8))
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.legend(
        handles=[Patch(color=_colour(name), label=name) for name in names],
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        borderaxespad=0.4,
        borderpad=0,
        ncols=columns,
        frameon=False,
        labelcolor=figures.MUTED,
        handlelength=0.9,
        handleheight=0.9,
        handletextpad=0.5,
        columnspacing=1.4,
    )
    return figure


def _draw_bar(axes: Axes, artifact: str, time: TimeShares, base: float) -> None:
    left = 0.0
    for name, value in _segments(time).items():
        axes.barh(base, value, left=left, height=0.34, color=_colour(name), edgecolor=figures.PAPER, linewidth=0.8)
        left += value
    axes.plot([time.latency_ms] * 2, [base - 0.26, base + 0.26], color=figures.INK, linewidth=1.6)
    axes.text(
        *(0, base + 0.3, text.shorten(artifact, 44)),
        color=figures.INK,
        va="bottom",
        ha="left",
        parse_math=False,
    )
