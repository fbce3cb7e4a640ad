"""What a page says of the machine and of how it was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from vitdeploy.benchmark.summary import Row
from vitdeploy.document.bench import Bench, Ratio
from vitdeploy.document.context import ArtifactContext, LayerGroup, LayerTime, TimeShares
from vitdeploy.document.engine import HalfFacts
from vitdeploy.document.report import MergingFacts, OptimizeFacts, PruningFacts, Report
from vitdeploy.document.selftest import SelftestDocument, SelftestEngine, SelftestModel, StepFacts, StepStatus
from vitdeploy.report import figures, lookup, measures, quantization, table, text
from vitdeploy.report.figures import Plot, both_variants
from vitdeploy.report.measures import Cell
from vitdeploy.report.page import RunPage
from vitdeploy.report.quantization import Quantized
from vitdeploy.tasks.answers import Measure
from vitdeploy.verification.classes import Reliability, ReliabilityBin

# --- Show where the time of each artifact goes, and its bounds: one plot, one line each, the slowest layers -----------


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


# --- Show how everything was made and measured: rewrites of graphs, folds, types, and sources -------------------------


_REWRITES = {
    "shapes": "shapes and constants settled",
    "layer_norm": "layer normalisation as one node",
    "gelu": "GELU as one node",
    "attention": "attention in one form",
    "convolution": "normalisation folded into a convolution",
    "gemm": "Gemm as MatMul and Add",
    "fold_layer_scale": "LayerScale folded into a linear",
    "rotate_residual": "norms folded into linears, residual stream rotated",
    "fold_attention_scale": "attention scale folded into the query",
    "drop_key_bias": "key bias dropped",
    "fold_value_bias": "value bias folded into the projection",
    "fold_image_normalisation": "image normalisation folded into the patch embedding",
    "class_token_only": "last block for the class token only",
    "merge_qkv": "query, key and value merged",
    "split_qkv": "query, key and value split",
    "align_rows": "linears of more rows than tokens",
    "opset": "raised to another opset",
}
_TYPES = {"fp16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True)
class GraphChanges:
    """One graph: its number of nodes before and after, the largest difference, and each exact rewrite with its number
    of places; how many tokens were merged, if any."""

    graph: str
    nodes: str
    difference: str
    rewrites: list[tuple[str, str]]
    merging: str
    pruning: str


@dataclass(frozen=True)
class HalfTyped:
    """One engine: a line of summary, the operations in float32 with the reason of each, and the tensors that lose most
    of their numbers to zero, each with the share that it loses."""

    artifact: str
    summary: str
    float32: dict[str, str]
    underflow: dict[str, str]


@dataclass(frozen=True)
class DetailsView:
    """The section. `measures`: the task's own numbers; `digests` of what is no file of the bundle, by what it is."""

    report: Report
    measures: list[Measure]
    changes: list[GraphChanges]
    quantized: list[Quantized]
    half: list[HalfTyped]
    digests: dict[str, str]
    recipe: str


def details_view(page: RunPage) -> list[DetailsView]:
    """The section."""
    report = page.report
    recipe = json.dumps(report.provenance.recipe, indent=2, ensure_ascii=False)
    return [
        DetailsView(
            report,
            measures.columns(report),
            graph_changes(report.optimize),
            quantization.quantized_engines(report),
            half_engines(report),
            _digests(report),
            recipe,
        )
    ]


def graph_changes(facts: OptimizeFacts) -> list[GraphChanges]:
    """The changes that `optimize` recorded for each graph. An unknown rewrite is shown under its own name."""
    return [
        GraphChanges(
            graph,
            " to ".join(text.number(count, 0) for count in facts.nodes[graph]),
            text.small(facts.difference[graph]),
            [
                (_REWRITES.get(name, name.replace("_", " ")), text.count(count, "place"))
                for name, count in counts.items()
                if count
            ],
            _merging((facts.token_merging or {}).get(graph)),
            _pruning((facts.pruning or {}).get(graph)),
        )
        for graph, counts in facts.rewrites.items()
    ]


def _merging(found: MergingFacts | None) -> str:
    if found is None:
        return ""
    steps = [f"{text.number(tokens, 0)} behind block {block}" for block, tokens in found.remaining.items()]
    return f"{text.number(found.tokens, 0)} to {', '.join(steps)}"


def _pruning(found: PruningFacts | None) -> str:
    if found is None:
        return ""
    parts = [f"{name} {stay} of {count} {kind}" for name, (kind, count, stay) in found.kept.items()]
    return f"{text.percent(found.share)} of the products gone; what stays: {', '.join(parts)}"


def half_engines(report: Report) -> list[HalfTyped]:
    """Every engine whose graph has types of half precision."""
    return [_typed(engine.artifact, engine.half) for engine in report.engines if engine.half is not None]


def _typed(artifact: str, facts: HalfFacts) -> HalfTyped:
    macs = facts.macs
    share = text.percent(macs.float32 / max(macs.half + macs.float32, 1))
    parts = [f"{share} of the products in float32", text.count(len(facts.float32), "operation") + " in float32"]
    if facts.residual_exponent:
        parts.append(f"residual stream scaled by 2^-{facts.residual_exponent}, exactly")
    underflow = {name: text.percent(lost) for name, lost in facts.underflow.items()}
    return HalfTyped(artifact, f"{_TYPES[facts.type]}: {', '.join(parts)}", dict(facts.float32), underflow)


def _digests(report: Report) -> dict[str, str]:
    """The digests that are not those of a bundle file: what the model was read from, and the data."""
    provenance, data = report.provenance, report.provenance.data
    digests = {
        **{f"{name} (sha256)": digest for name, digest in provenance.source.sha256.items()},
        "Calibration data": data.calibration if report.calibration else None,
        "Evaluation data": data.evaluation,
    }
    return {name: digest for name, digest in digests.items() if digest}


# --- The rows of a self-test's page -----------------------------------------------------------------------------------


# How a step ended, by the class of its chip.
CHIPS: dict[StepStatus, str] = {"done": "pass", "failed": "fail", "not run": "none"}


@dataclass(frozen=True)
class EngineRow:
    """One artifact of a model: an engine, or PyTorch, which has times alone."""

    artifact: str
    kernels: str
    provider: str
    agreement: Cell
    difference: str
    p50: str
    p99: str
    throughput: str
    ratio: Cell
    size: str
    flags: list[str]


@dataclass(frozen=True)
class ModelView:
    """One model; `reference`: what the ratios are to, None without any."""

    name: str
    trained: bool
    rows: list[EngineRow]
    reference: str | None


@dataclass(frozen=True)
class StepsView:
    """The section of the steps; `chips`: how each way to end is coloured."""

    steps: tuple[StepFacts, ...]
    chips: dict[StepStatus, str]


def steps_view(document: SelftestDocument) -> list[StepsView]:
    """The section of the steps."""
    return [StepsView(document.steps, CHIPS)]


def model_views(document: SelftestDocument) -> list[ModelView]:
    """A section for each model."""
    return [_model_view(model) for model in document.models]


def _model_view(model: SelftestModel) -> ModelView:
    ratios = model.bench.ratios if model.bench else ()
    return ModelView(model.name, model.trained, engine_rows(model), ratios[0].b if ratios else None)


def engine_rows(model: SelftestModel) -> list[EngineRow]:
    """Every artifact of a model, the one that the others are compared with first, where there is one."""
    bench = model.bench
    times = {row.artifact: row for row in bench.results} if bench else {}
    ratios = {ratio.a: ratio for ratio in bench.ratios if ratio.metric == "latency"} if bench else {}
    engines = {engine.artifact: engine for engine in model.engines}
    names = list(dict.fromkeys([*times, *engines]))
    return [_selftest_row(name, engines.get(name), times.get(name), ratios.get(name)) for name in names]


def _selftest_row(name: str, engine: SelftestEngine | None, times: Row | None, ratio: Ratio | None) -> EngineRow:
    verify = engine.verify if engine else None
    kernels = engine.kernels if engine else {}
    source = engine or times
    latency = times.latency_ms if times else None
    return EngineRow(
        artifact=name,
        kernels=", ".join(f"{count} in {kind}" for kind, count in kernels.items()) or text.MISSING,
        provider=source.provider if source else text.MISSING,
        agreement=table.agreement(verify) if verify else Cell(text.MISSING),
        difference=text.small(verify.max_difference) if verify else text.MISSING,
        p50=text.significant(latency.p50 if latency else None),
        p99=text.significant(latency.p99 if latency else None),
        throughput=text.significant(times.throughput) if times else text.MISSING,
        ratio=Cell(
            text.MISSING if ratio is None else text.significant(ratio.ratio) if ratio.decided else "not decided",
            text.ratio_interval(ratio.ci95) if ratio and ratio.decided else "",
        ),
        size=text.megabytes(engine.bytes) if engine else text.MISSING,
        flags=list(times.flags) if times else [],
    )


# --- Reliability diagrams: accuracy against confidence, for the original and the recommended engine -------------------


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
        lambda is_narrow: _reliability_draw(report, {name: found[name] for name in names}, is_narrow),
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
