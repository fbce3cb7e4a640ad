"""The parts of a page on the machine, on the making of the engines, on confidence, and on the cost of INT8."""

import math
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from vitdeploy.document.bench import ArtifactContext, TimeShares
from vitdeploy.document.engine import EngineFacts, HalfFacts
from vitdeploy.document.report import ORIGINAL, Judgement, MergingFacts, PruningFacts, Report
from vitdeploy.report import figures, page, table, text
from vitdeploy.report.figures import Plot, both_variants
from vitdeploy.search.precision import Cost, Mixed, Sensitivity
from vitdeploy.verification.classes import Reliability, ReliabilityBin

# --- Where the time of each artifact goes: a plot, a line per artifact, and the slowest layers ------------------------


# The number of layer kinds in the first table, and of layers in the folded one.
SHOWN_KINDS, LISTED_LAYERS = 10, 80
# Precisions in the order of their segments; other names of a runtime come after them, in grey.
_PRECISIONS = ("int8", "fp16", "bf16", "fp32")
_COLOURS = dict(zip(_PRECISIONS, figures.PARTS, strict=False))
_OTHERS, _OUTSIDE = "layers without products", "outside the layers"


def time_facts(context: ArtifactContext) -> str:
    """The time of an artifact's layers, and its work, in words; "" if neither is known."""
    work, time = context.work, context.time
    facts = []
    if time:
        slowed = ", slowed down by the profiler" if time.layers_ms > time.latency_ms else ""
        layers, latency = text.significant(time.layers_ms), text.significant(time.latency_ms)
        facts.append(f"its layers take {layers} ms{slowed}; its latency is {latency} ms")
    if work:
        flops = text.significant(sum(work.flops.values()) / 1e9)
        facts.append(f"work per query: {flops} GFLOP, and at least {text.size(work.bytes)} read and written")
    elif context.work_unknown:
        facts.append(f"work unknown: {context.work_unknown}")
    return "; ".join(facts)


def time_plot(artifacts: Sequence[ArtifactContext]) -> Plot | None:
    """The plot with a bar for each artifact with timed layers: products by precision, other layers, the rest."""
    timed = {context.artifact: context.time for context in artifacts if context.time is not None}
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
        "median latency in the same run: time between the layers and the mark is spent outside the layers. A bar that "
        "reaches beyond the mark was slowed down by the profiler."
    )
    return Plot("Where the time goes", caption, wide, narrow)


def _segments(time: TimeShares) -> dict[str, float]:
    """Milliseconds by the segments of a bar, from left to right."""
    shares = time.products
    whole = time.layers_ms / (sum(shares.values()) + sum(time.others.values()) or 1.0)
    order = [*(each for each in _PRECISIONS if each in shares), *(each for each in shares if each not in _PRECISIONS)]
    found = {f"products in {each.upper()}": shares[each] * whole for each in order}
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
    axes.set_xlabel("ms per query")
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


# --- How everything was made and measured: rewrites of graphs, folds, types, and sources ------------------------------


_REWRITES = {
    "shapes": "shapes and constants folded",
    "layer_norm": "layer normalisation fused into one node",
    "gelu": "GELU fused into one node",
    "attention": "attention in canonical form",
    "convolution": "normalisation folded into a convolution",
    "gemm": "Gemm replaced by MatMul and Add",
    "fold_layer_scale": "LayerScale folded into a linear",
    "rotate_residual": "norms folded into linears, residual stream rotated",
    "fold_attention_scale": "attention scale folded into the query",
    "drop_key_bias": "key bias removed",
    "fold_value_bias": "value bias folded into the projection",
    "fold_image_normalisation": "image normalisation folded into the patch embedding",
    "class_token_only": "last block limited to the class token",
    "merge_qkv": "query, key and value merged",
    "split_qkv": "query, key and value split",
    "opset": "converted to a newer opset",
}
_TYPES = {"fp16": "float16", "bf16": "bfloat16"}


def rewrite_name(name: str) -> str:
    """A rewrite of a graph in words; an unknown rewrite keeps its name."""
    return _REWRITES.get(name, name.replace("_", " "))


def merging_words(facts: MergingFacts) -> str:
    """The number of tokens before merging, and the numbers that remain after each merging block."""
    steps = [f"{text.number(tokens, 0)} after block {block}" for block, tokens in facts.remaining.items()]
    return f"{text.number(facts.tokens, 0)} to {', '.join(steps)}"


def pruning_words(facts: PruningFacts) -> str:
    """The pruned share of the MACs, and what remains."""
    parts = [f"{name} {stay} of {count} {kind}" for name, (kind, count, stay) in facts.kept.items()]
    return f"{text.percent(facts.share)} of the MACs pruned; remaining: {', '.join(parts)}"


def half_summary(facts: HalfFacts) -> str:
    """The types of a graph in half precision, in one line."""
    macs = facts.macs
    share = text.percent(macs.float32 / max(macs.half + macs.float32, 1))
    parts = [f"{share} of the MACs in float32", text.count(len(facts.float32), "operator") + " in float32"]
    if facts.residual_exponent:
        parts.append(f"residual stream scaled by 2^-{facts.residual_exponent} (exact)")
    return f"{_TYPES[facts.type]}: {', '.join(parts)}"


def digests(report: Report) -> dict[str, str]:
    """The digests of inputs outside the bundle: the files of the model, and the data."""
    provenance, data = report.provenance, report.provenance.data
    found = {
        **{f"{name} (sha256)": digest for name, digest in provenance.source.sha256.items()},
        "Calibration data": data.calibration if report.calibration else None,
        "Evaluation data": data.evaluation,
    }
    return {name: digest for name, digest in found.items() if digest}


# --- Reliability diagrams: accuracy against confidence, for the original and the recommended engine -------------------


def reliability_plot(report: Report) -> Plot | None:
    """The plot of accuracy against confidence for the original and the leading engine; None without labels."""
    found = report.answers.reliability if report.answers else None
    if not found or ORIGINAL not in found:
        return None
    names = [ORIGINAL, *(name for name in report.focus[:1] if name in found)]
    facts = " ".join(calibration_words(name, found[name]) for name in names)
    wide, narrow = both_variants(
        lambda is_narrow: _reliability_draw(report, {name: found[name] for name in names}, is_narrow),
        "reliability",
        f"Accuracy against confidence. {facts}",
    )
    caption = (
        "Each mark groups answers of similar confidence, with the 95 % interval of their accuracy; larger marks have "
        "more answers. On the dashed line, confidence equals accuracy; below it, the model is over-confident. "
        f"{facts} The error is the mean of |confidence − accuracy| over ten bins."
    )
    return Plot("Confidence against accuracy", caption, wide, narrow)


def calibration_words(name: str, found: Reliability) -> str:
    """The calibration error, and whether it exceeds that of a perfectly calibrated model on this number of answers."""
    error, chance = text.number(found.error), text.number(found.by_chance)
    words = f"{name}: calibration error {error} % (chance level {chance} %)"
    if found.error <= found.by_chance:
        return f"{words}: within chance for this number of answers."
    side = "over-confident" if found.confidence > found.accuracy else "under-confident"
    both = f"{text.number(found.confidence, 1)} % confidence, {text.number(found.accuracy, 1)} % accuracy"
    return f"{words}: overall {side} ({both})."


def _reliability_draw(report: Report, found: Mapping[str, Reliability], narrow: bool) -> Figure:
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
        index, aside = page.colours(report)[name], number - (len(found) - 1) / 2
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
    """Draw the bins of one artifact, slightly offset so that artifacts do not hide each other."""
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


# --- The cost of INT8 in an engine by layer, in sentences and as a plot -----------------------------------------------


SHOWN_LAYERS = 12
_ROW = 22.0  # pixels


def engines_with_costs(report: Judgement) -> list[EngineFacts]:
    """The engines with known costs of their layers."""
    every = [(engine, engine.quantization) for engine in report.engines]
    return [engine for engine, facts in every if facts and facts.sensitivity and facts.sensitivity.layers]


def sensitivity_headline(sensitivity: Sensitivity) -> str:
    """A sentence on the most expensive layer, if the intervals prove it."""
    layers = sensitivity.layers
    if not layers:
        return "No layer is in INT8."
    cost = layers[0].cost
    name, (low, high) = cost.name, cost.ci95
    total = sensitivity.total
    if low <= 0 or total <= 0:
        interval = f"{text.small(cost.distance)} ({text.small(low)} to {text.small(high)})"
        images = text.count(sensitivity.images, "calibration image")
        return f"No layer has a proven INT8 cost: the largest one on {images}, of {name}, is {interval}."
    rest = max((layer.cost.ci95[1] for layer in layers[1:]), default=0.0)
    least, most, median = (text.significant(each) for each in (layers[0].low, layers[0].high, layers[0].median))
    where = f"its input ranges from {least} to {most}, but half of its channels stay within {median}"
    # The share of a sum is as uncertain as the cost itself.
    shares = f"{text.number(100 * low / total, 0)} to {text.number(100 * min(high / total, 1), 0)}"
    what = f"{text.percent(cost.share, 0)} ({shares}) of the INT8 cost"
    if low <= rest:
        return f"{name} causes {what}; other layers may cost as much."
    return f"{name} causes {what}, more than any other layer: {where}."


def sensitivity_summary(sensitivity: Sensitivity) -> str:
    """A description of a sensitivity table."""
    images, distance = text.count(sensitivity.images, "calibration image"), text.small(sensitivity.distance)
    total, operators = text.small(sensitivity.total), ", ".join(sensitivity.impassable)
    measured = f" (measured for layers before {operators}, which pass no gradient)" if operators else ""
    return (
        f"All layers in INT8: {distance} {sensitivity.unit} from the float graph, mean over {images}. A layer’s "
        f"cost is the distance with only that layer in INT8, estimated by gradients{measured}; all costs add up to "
        f"{total}."
    )


def mixed_summary(mixed: Mixed) -> str:
    """The result of the search for mixed precision, in sentences."""
    before, after = mixed.int8, mixed.reached
    overrides, saved = text.count(len(mixed.taken), "override"), text.number(mixed.saved_us, 1)
    price = text.number(sum(each.override.price_us for each in mixed.taken), 1)
    by = f", by {mixed.table}" if mixed.table else ""
    distances = f"distance {text.small(before.distance)} before, {text.small(after.distance)} after"
    agreement, reached = (table.expected(each.expected) for each in (before, after))
    agreements = f"expected agreement {agreement} % before, {reached} % after"
    gain = f"{overrides}, which cost {price} of the {saved} µs that INT8 saves in layers{by}"
    ends = {
        True: "The budget is expected to be met.",
        False: "No further override helps; the budget is not expected to be met.",
        None: "The next override would have cost more time than its reduction of the costs justifies.",
    }
    return f"{gain}. Measured: {distances}; {agreements}. {ends[mixed.met]}"


def sensitivity_plots(report: Judgement) -> list[Plot | None]:
    """The sensitivity plot of each engine with known costs of its layers."""
    return [
        sensitivity_plot(engine.quantization.sensitivity, f"What INT8 costs: {engine.target}", f"sensitivity-{number}")
        for number, engine in enumerate(report.engines)
        if engine.quantization is not None and engine.quantization.sensitivity is not None
    ]


def sensitivity_plot(sensitivity: Sensitivity, title: str, name: str) -> Plot | None:
    """The plot of the most expensive layers with 95 % intervals. `name`: the prefix of the plot's element ids."""
    costs = [layer.cost for layer in sensitivity.layers[:SHOWN_LAYERS]]
    if not costs:
        return None
    facts = "; ".join(f"{cost.name}: {text.percent(cost.share)}" for cost in costs)
    wide, narrow = both_variants(
        lambda is_narrow: _draw_costs(costs, sensitivity.unit, is_narrow),
        name,
        f"The INT8 cost of the {len(costs)} most expensive layers, as shares of all costs. {facts}.",
    )
    caption = (
        f"The distance of the answers from the float graph’s with only one layer in INT8: {sensitivity.unit} over "
        f"{text.count(sensitivity.images, 'calibration image')}, with 95 % intervals."
    )
    return Plot(title, caption, wide, narrow, folded=True)


def _draw_costs(costs: Sequence[Cost], unit: str, narrow: bool) -> Figure:
    """Bars, the longest on top; in the narrow variant with the names above them."""
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
    axes.set_xlabel(f"INT8 cost, {unit}")
    return figure
