"""Views of an engine's quantization: folds, the layers that cost most, overrides of mixed precision."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitdeploy.document.engine import EngineFacts, Quantization
from vitdeploy.document.report import Judgement
from vitdeploy.report import figures, text
from vitdeploy.report.figures import Plot, both_variants
from vitdeploy.report.measures import Cell
from vitdeploy.search.mixed import Cost, Sensitivity
from vitdeploy.search.trials import Mixed, Reached, Taken

SHOWN_LAYERS = 12
_ROW = 22.0  # pixels


@dataclass(frozen=True)
class Folded:
    """One fold: its layers, its kind, and the factor by which it divides their expected squared error."""

    layers: str
    what: str
    gain: str


@dataclass(frozen=True)
class SensitiveTensor:
    """One layer or group in the table of sensitivity. `reads`: the tensor with its extremes."""

    name: str
    cost: Cell
    share: str
    reads: Cell
    folds: str


@dataclass(frozen=True)
class AppliedOverride:
    """One override of mixed precision, and where it led."""

    what: str
    price: str
    distance: str
    agreement: str


@dataclass(frozen=True)
class Quantized:
    """All of one engine; a part of it is empty where it was not searched for. `weight_bits`: of INT8 weights."""

    artifact: str
    weight_bits: int
    folds: list[Folded]
    float_layers: dict[str, str]
    summary: str
    unit: str
    layers: list[SensitiveTensor]
    groups: list[SensitiveTensor]
    overrides: list[AppliedOverride]
    mixed: str
    shown: int = SHOWN_LAYERS


def quantized_engines(report: Judgement) -> list[Quantized]:
    """Every engine that the report has a record of quantization of."""
    return [_quantized(engine, engine.quantization) for engine in report.engines if engine.quantization is not None]


def costs_view(report: Judgement) -> list[Quantized]:
    """The engines of whose layers it is known what each costs."""
    return [engine for engine in quantized_engines(report) if engine.layers]


def _quantized(engine: EngineFacts, facts: Quantization) -> Quantized:
    sensitivity, mixed = facts.sensitivity, facts.mixed
    layers, groups = sensitivity_rows(sensitivity) if sensitivity else ([], [])
    return Quantized(
        engine.artifact,
        engine.weight_bits or 8,
        _folds(facts),
        dict(facts.float),
        sensitivity_summary(sensitivity) if sensitivity else "",
        sensitivity.unit if sensitivity else "",
        layers,
        groups,
        [_applied(each) for each in mixed.taken] if mixed else [],
        _mixed(mixed) if mixed else "",
    )


def _folds(facts: Quantization) -> list[Folded]:
    found = [(", ".join(fold.layers), fold.what, fold.gain) for fold in facts.folds]
    found += [(each.layer, each.what, each.gain) for each in facts.hidden]
    return [Folded(layers, what, f"{text.significant(gain)}×") for layers, what, gain in found]


def headline(sensitivity: Sensitivity) -> str:
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


def sensitivity_rows(sensitivity: Sensitivity) -> tuple[list[SensitiveTensor], list[SensitiveTensor]]:
    """Layers and groups of layers, the most costly first."""
    layers = [
        SensitiveTensor(
            each.cost.name,
            _cost(each.cost),
            text.percent(each.cost.share),
            Cell(
                f"{text.significant(each.low)} to {text.significant(each.high)}",
                f"99.9 % within {text.significant(each.upper)}, median channel {text.significant(each.median)}, "
                f"furthest: {each.channel}",
            ),
            ", ".join(each.folds),
        )
        for each in sensitivity.layers
    ]
    groups = [
        SensitiveTensor(each.name, _cost(each), text.percent(each.share), Cell(text.count(each.layers, "layer")), "")
        for each in sensitivity.groups
    ]
    return layers, groups


def _cost(cost: Cost) -> Cell:
    low, high = cost.ci95
    return Cell(text.small(cost.distance), f"{text.small(low)} to {text.small(high)}")


def _applied(taken: Taken) -> AppliedOverride:
    override, reached = taken.override, taken.reached
    what = {
        "float": "in float",
        "scaled": "hidden channels scaled",
        "clipped": f"{text.percent(override.share, 0)} of its range",
    }[override.kind]
    return AppliedOverride(
        f"{override.layer}: {what}",
        text.number(override.price_us, 1),
        text.small(reached.distance),
        _agreement(reached),
    )


def _agreement(reached: Reached) -> str:
    return text.number(reached.expected.agreement) if reached.expected else text.MISSING


def _mixed(mixed: Mixed) -> str:
    """How the search ended, in a sentence."""
    before, after = mixed.int8, mixed.reached
    overrides, saved = text.count(len(mixed.taken), "override"), text.number(mixed.saved_us, 1)
    price = text.number(sum(each.override.price_us for each in mixed.taken), 1)
    distances = f"distance {text.small(before.distance)} before, {text.small(after.distance)} after"
    agreements = f"expected agreement {_agreement(before)} % before, {_agreement(after)} % after"
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
