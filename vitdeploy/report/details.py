"""Show how everything was made and measured: rewrites of graphs, folds, types, and sources."""

from __future__ import annotations

import json
from dataclasses import dataclass

from vitdeploy.document.engine import HalfFacts
from vitdeploy.document.report import MergingFacts, OptimizeFacts, PruningFacts, Report
from vitdeploy.report import measures, quantization, text
from vitdeploy.report.measures import Measure
from vitdeploy.report.page import RunPage
from vitdeploy.report.quantization import Quantized

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
