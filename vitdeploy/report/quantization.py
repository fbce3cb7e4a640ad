"""What INT8 costs in an engine, layer by layer, in sentences and as a plot."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitdeploy.document.engine import EngineFacts
from vitdeploy.document.report import Judgement
from vitdeploy.report import figures, table, text
from vitdeploy.report.figures import Plot, both_variants
from vitdeploy.search.precision import Cost, Mixed, Sensitivity

SHOWN_LAYERS = 12
_ROW = 22.0  # pixels


def engines_with_costs(report: Judgement) -> list[EngineFacts]:
    """The engines of whose layers it is known what each costs."""
    every = [(engine, engine.quantization) for engine in report.engines]
    return [engine for engine, facts in every if facts and facts.sensitivity and facts.sensitivity.layers]


def sensitivity_headline(sensitivity: Sensitivity) -> str:
    """The layer that costs most, in a sentence, if the intervals prove it."""
    layers = sensitivity.layers
    if not layers:
        return "No layer is in INT8."
    cost = layers[0].cost
    name, (low, high) = cost.name, cost.ci95
    total = sensitivity.total
    if low <= 0 or total <= 0:
        interval = f"{text.small(cost.distance)} ({text.small(low)} to {text.small(high)})"
        images = text.count(sensitivity.images, "calibration image")
        return f"No layer provably costs anything in INT8: the largest cost on {images}, of {name}, is {interval}."
    rest = max((each.cost.ci95[1] for each in layers[1:]), default=0.0)
    least, most, median = (text.significant(each) for each in (layers[0].low, layers[0].high, layers[0].median))
    where = f"it reads {least} to {most}, and half of its channels stay within {median}"
    # A share of a sum is no surer than the cost itself.
    shares = f"{text.number(100 * low / total, 0)} to {text.number(100 * min(high / total, 1), 0)}"
    what = f"{text.percent(cost.share, 0)} ({shares}) of what INT8 loses"
    if low <= rest:
        return f"{name} costs {what}; others may cost as much."
    return f"{name} costs {what}, more than any other layer: {where}."


def sensitivity_summary(sensitivity: Sensitivity) -> str:
    """Describe a table of sensitivity in sentences."""
    images, distance = text.count(sensitivity.images, "calibration image"), text.small(sensitivity.distance)
    total = text.small(sensitivity.total)
    return (
        f"All layers in INT8: {distance} {sensitivity.unit} from the float graph, mean over {images}. A layer’s "
        f"cost is the distance with that layer alone in INT8; all costs add up to {total}."
    )


def mixed_summary(mixed: Mixed) -> str:
    """How the search ended, in a sentence."""
    before, after = mixed.int8, mixed.reached
    overrides, saved = text.count(len(mixed.taken), "override"), text.number(mixed.saved_us, 1)
    price = text.number(sum(each.override.price_us for each in mixed.taken), 1)
    distances = f"distance {text.small(before.distance)} before, {text.small(after.distance)} after"
    agreement, reached = (table.expected(each.expected) for each in (before, after))
    agreements = f"expected agreement {agreement} % before, {reached} % after"
    found = f"{overrides} for {price} of the {saved} µs that INT8 saves in layers. Measured: {distances}; {agreements}."
    ends = {
        True: "The budget is expected to be met.",
        False: "No further override helps; the budget is not expected to be met.",
        None: "The next override would have cost a larger share of the time than it takes off the costs.",
    }
    return f"{found} {ends[mixed.met]}"


def sensitivity_plots(report: Judgement) -> list[Plot | None]:
    """One for each engine whose layers were asked about."""
    return [
        sensitivity_plot(engine.quantization.sensitivity, f"What INT8 costs: {engine.target}", f"sensitivity-{number}")
        for number, engine in enumerate(report.engines)
        if engine.quantization is not None and engine.quantization.sensitivity is not None
    ]


def sensitivity_plot(sensitivity: Sensitivity, title: str, name: str) -> Plot | None:
    """The layers that cost most, each with the 95 % interval of its cost. `name`: of the plot's element ids."""
    costs = [each.cost for each in sensitivity.layers[:SHOWN_LAYERS]]
    if not costs:
        return None
    facts = "; ".join(f"{cost.name}: {text.percent(cost.share)}" for cost in costs)
    wide, narrow = both_variants(
        lambda is_narrow: _draw(costs, sensitivity.unit, is_narrow),
        name,
        f"What INT8 costs in the {len(costs)} layers that cost most, as shares of all costs. {facts}.",
    )
    caption = (
        f"How far the answers are from those of the float graph with one layer alone in INT8: {sensitivity.unit} "
        f"over {text.count(sensitivity.images, 'calibration image')}, with its 95 % interval."
    )
    return Plot(title, caption, wide, narrow)


def _draw(costs: Sequence[Cost], unit: str, narrow: bool) -> Figure:
    """Bars, the longest on top; on a phone each is named above itself."""
    row = _ROW + 16 if narrow else _ROW
    figure = figures.new_figure(360 if narrow else 840, len(costs) * row + 60)
    axes = figures.axes_in(figure, left=12 if narrow else 230, right=16, bottom=48, top=12)
    for index, each in enumerate(costs):
        low, high = each.ci95
        axes.barh(-index, each.distance, height=0.38 if narrow else 0.62, color=figures.PARTS[0], zorder=2)
        axes.plot([low, high], [-index, -index], color=figures.INK, linewidth=1.2, zorder=3)
        label = text.shorten(each.name, 40 if narrow else 32)
        if narrow:
            place, side = (0.0, -index + 0.28), "left"
        else:
            place, side = (-0.015, -index - 0.2), "right"
        transform = axes.get_yaxis_transform()
        axes.text(*place, label, transform=transform, ha=side, color=figures.INK, parse_math=False)
    axes.axvline(0, color=figures.MUTED, linewidth=1)
    axes.set_ylim(-len(costs) + 0.4, 0.8)
    axes.set_yticks([])
    axes.spines.left.set_visible(False)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=4 if narrow else 7))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text.small(value)))
    axes.set_xlabel(f"cost of INT8, {unit}")
    return figure
