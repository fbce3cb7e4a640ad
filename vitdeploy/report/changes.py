"""What was rewritten in the graphs between the export and the engines."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.document.report import MergingFacts, OptimizeFacts
from vitdeploy.report import text

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


@dataclass(frozen=True)
class GraphChanges:
    """One graph: how many nodes it had and has, the largest difference, and each exact rewrite with its number of
    places; how many tokens were merged, where any were."""

    graph: str
    nodes: str
    difference: str
    rewrites: list[tuple[str, str]]
    merging: str


def graph_changes(facts: OptimizeFacts) -> list[GraphChanges]:
    """What `optimize` did to each graph, by its own record. A rewrite that is not known goes by its own name."""
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
        )
        for graph, counts in facts.rewrites.items()
    ]


def _merging(found: MergingFacts | None) -> str:
    if found is None:
        return ""
    steps = [f"{text.number(tokens, 0)} behind block {block}" for block, tokens in found.remaining.items()]
    return f"{text.number(found.tokens, 0)} to {', '.join(steps)}"
