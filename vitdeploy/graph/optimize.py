"""Rewrites of a float graph, in the order in which they help each other. All but merging tokens are exact."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import onnx_ir as ir

from vitdeploy.graph.biases import drop_key_bias, fold_value_bias
from vitdeploy.graph.class_token import class_token_only
from vitdeploy.graph.fold_scale import fold_attention_scale
from vitdeploy.graph.image_norm import fold_image_normalisation
from vitdeploy.graph.layer_scale import fold_layer_scale
from vitdeploy.graph.qkv import merge_qkv, split_qkv
from vitdeploy.graph.rotation import rotate_residual
from vitdeploy.graph.row_alignment import align_rows
from vitdeploy.graph.token_merging import merge_tokens


@dataclass(frozen=True)
class OptimizeOptions:
    """Which rewrites run. Every one is exact up to the rounding of new float32 weights, but for `token_merging`.

    `qkv`: "merged" gives query, key and value one linear where they read the same tensor, "separate" one each; "keep"
    leaves them as they are, but for the last block where `class_token_only` divides them.
    `token_merging`: (block, how many tokens remain) each, as in `merge_tokens`.
    `align_rows`: how many rows the blocks compute, as in `align_rows`; None: one for each token.
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
    align_rows: int | None = None

    def exact(self) -> OptimizeOptions:
        """The same without what changes the function, and without what comes behind that."""
        return replace(self, token_merging=(), align_rows=None) if self.token_merging else self


def optimize(model: ir.Model, options: OptimizeOptions | None = None) -> dict[str, int]:
    """Run the chosen rewrites, in place. A second run changes nothing, but tokens cannot be merged, nor rows be
    aligned, twice.

    Args:
        model: a graph as `normalise` leaves it: linears as MatMul + Add, constants folded.

    Returns: how many places each rewrite that ran has changed, by its name, in the order of the run.

    Raises:
        GraphError: the tokens cannot be merged, or the rows not be aligned, as `merge_tokens` and `align_rows` say.
    """
    options = options or OptimizeOptions()
    # LayerScale first: then the projection that takes the value's bias is a plain linear, and so is every one that is
    # rotated. The rotation before the folds of biases: it leaves the shifts of norms in them. Folds of merged weights
    # before the class token and qkv, so that they find them in the exporter's form and the division copies the result.
    rewrites: dict[str, tuple[bool, Callable[[ir.Model], int]]] = {
        "fold_layer_scale": (options.fold_layer_scale, fold_layer_scale),
        "rotate_residual": (options.rotate_residual, rotate_residual),
        "fold_attention_scale": (options.fold_attention_scale, fold_attention_scale),
        "drop_key_bias": (options.drop_key_bias, drop_key_bias),
        "fold_value_bias": (options.fold_value_bias, fold_value_bias),
        "fold_image_normalisation": (options.fold_image_normalisation, fold_image_normalisation),
        "class_token_only": (options.class_token_only, class_token_only),
        "merge_qkv": (options.qkv == "merged", merge_qkv),
        "split_qkv": (options.qkv == "separate", split_qkv),
        "merge_tokens": (
            bool(options.token_merging),
            lambda model: len(merge_tokens(model, dict(options.token_merging))) - 1,
        ),
        "align_rows": (options.align_rows is not None, lambda model: align_rows(model, options.align_rows or 0)),
    }
    return {name: rewrite(model) for name, (chosen, rewrite) in rewrites.items() if chosen}
