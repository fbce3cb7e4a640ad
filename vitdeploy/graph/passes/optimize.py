"""Rewrites of a float graph that a recipe selects, in an order in which they help each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import onnx_ir as ir

from vitdeploy.graph.passes.folds import (
    drop_key_bias,
    fold_attention_scale,
    fold_image_normalisation,
    fold_layer_scale,
    fold_value_bias,
    rotate_residual,
)
from vitdeploy.graph.passes.qkv import merge_qkv, split_qkv
from vitdeploy.graph.passes.tokens import class_token_only, merge_tokens


@dataclass(frozen=True)
class OptimizeOptions:
    """The rewrites to run. All except `token_merging` are exact up to the rounding of new float32 weights.

    `qkv`: "merged" gives query, key and value one linear if they read the same tensor, "separate" one each; "keep"
    leaves them unchanged, except in the last block, where `class_token_only` divides them.
    `token_merging`: pairs (block, number of remaining tokens), as in `merge_tokens`.
    """

    fold_layer_scale: bool = True
    rotate_residual: bool = False
    fold_attention_scale: bool = True
    drop_key_bias: bool = True
    fold_value_bias: bool = True
    fold_image_normalisation: bool = True
    class_token_only: bool = True
    qkv: Literal["keep", "merged", "separate"] = "keep"
    token_merging: tuple[tuple[int, int], ...] = ()


def optimize(model: ir.Model, options: OptimizeOptions | None = None) -> dict[str, int]:
    """Run the selected rewrites, in place. A second run changes nothing, except that tokens cannot be merged twice.

    Args:
        model: a graph in canonical form: linears as MatMul + Add, constants folded.

    Returns: the number of changes by each rewrite, by its name, in run order.

    Raises:
        GraphError: the tokens cannot be merged, see `merge_tokens`.
    """
    options = options or OptimizeOptions()
    return {rewrite.name: rewrite.run(model, options) for rewrite in REWRITES if rewrite.chosen(options)}


class Rewrite(NamedTuple):
    """`run` changes a graph in place and returns the number of changes; `chosen`: whether the options select it.

    keeps: "numbers", every number that is still computed; "function", the function up to the rounding of new float32
    weights; "shapes", the shapes of the outputs only.
    """

    name: str
    run: Callable[[ir.Model, OptimizeOptions], int]
    keeps: Literal["numbers", "function", "shapes"]
    chosen: Callable[[OptimizeOptions], bool]


def exact(rewrite: Callable[[ir.Model], int], keeps: Literal["numbers", "function"]) -> Rewrite:
    """A rewrite that needs only the graph. It runs unless the option of its name is off."""
    name = rewrite.__name__
    return Rewrite(name, lambda model, _: rewrite(model), keeps, lambda options: getattr(options, name, True))


# LayerScale first: the projections that take a value's bias or are rotated are then plain linears. The rotation before
# the folds of biases: it moves the shifts of norms into biases. Folds of merged weights before the class token and qkv:
# they find the weights in the exporter's form, and the division copies the result.
REWRITES = (
    exact(fold_layer_scale, "function"),
    exact(rotate_residual, "function"),
    exact(fold_attention_scale, "function"),
    exact(drop_key_bias, "function"),
    exact(fold_value_bias, "function"),
    exact(fold_image_normalisation, "function"),
    exact(class_token_only, "numbers"),
    Rewrite("merge_qkv", lambda model, _: merge_qkv(model), "numbers", lambda options: options.qkv == "merged"),
    Rewrite("split_qkv", lambda model, _: split_qkv(model), "numbers", lambda options: options.qkv == "separate"),
    Rewrite(
        "merge_tokens",
        lambda model, options: len(merge_tokens(model, dict(options.token_merging))) - 1,
        "shapes",
        lambda options: bool(options.token_merging),
    ),
)
