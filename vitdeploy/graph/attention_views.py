"""Which attentions of a graph say where a model looks, and whose rows of them."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.mark import Weights, find_weights, patch_grid, tokens_read


@dataclass(frozen=True)
class AttentionViews:
    """The attentions of a graph that maps are made of. Rows `rows` of the last one are looked at.

    grid: (rows, columns) of patches; prefix: how many tokens come before them. reader: whose rows these are, in words.
    """

    blocks: tuple[Weights, ...]
    grid: tuple[int, int]
    prefix: int
    rows: tuple[int, ...]
    reader: str

    @property
    def last(self) -> Weights:
        return self.blocks[-1]


def token_views(model: ir.Model, name: str) -> AttentionViews:
    """The blocks of a model whose tokens are patches, after a few of its own (class, distillation, registers).

    Args:
        model: as `normalise` leaves it. name: of the bundle, for errors.

    Raises:
        GraphError: no attention over one grid of patches: none at all, inside windows, or over changing tokens.
    """
    found = find_weights(model)
    grid = patch_grid(found[0]) if found else None
    if not found or grid is None:
        raise GraphError(
            f"{name} has no attention over patches of the image",
            found="no patch embedding by a convolution" if found else "no attention (Softmax between two MatMul)",
            wanted="a Vision Transformer",
        )
    *before, last = found
    tokens, patches = last.keys, grid[0] * grid[1]
    small = [each for each in found if each.windowed or found[0].keys < patches]
    if small:
        raise GraphError(
            f"{name} attends inside windows, so no token's attention covers the image",
            found=f"{small[0].name}: rows of {small[0].keys} tokens, for {grid[0]}x{grid[1]} patches",
            wanted="attention of every token to all patches, as in ViT, DeiT, DINOv2, CLIP or DETR",
            fix="for Swin and its kin use occlusion or gradients on the PyTorch model instead",
        )
    if any(each.keys != tokens or (each is not last and each.queries != tokens) for each in found):
        sizes = ", ".join(f"{each.queries}x{each.keys}" for each in found)
        merged, aligned = tokens < found[0].keys, any(each.queries > each.keys for each in found)
        options = [f"optimize.{name}" for name, on in (("token_merging", merged), ("align_rows", aligned)) if on]
        raise GraphError(
            f"the attentions of {name} are over different tokens, so there is no one map",
            found=f"queries x keys: {sizes}",
            wanted="the same tokens in every block",
            fix=f"explain a bundle made without {' and '.join(options)}" if options else "",
        )
    prefix = tokens - patches
    rows, reader = _rows_of_interest(model, last, prefix)
    return AttentionViews((*before, last), grid, prefix, rows, reader)


def _rows_of_interest(model: ir.Model, last: Weights, prefix: int) -> tuple[tuple[int, ...], str]:
    """The queries whose attention makes the answer. Where `optimize` left some rows only, it is these."""
    if last.learned:
        return tuple(range(last.queries)), "last attention, read by the pooling query"
    rows = tuple(range(last.queries)) if last.queries < last.keys else tokens_read(model, last, prefix)
    if rows:
        return rows, "last attention, read by the class token" if len(
            rows
        ) == 1 else f"last attention, read by {len(rows)} tokens"
    return tuple(range(prefix, last.keys)), "last attention, read by all patches"


def object_views(model: ir.Model, name: str) -> AttentionViews:
    """The last attention from a decoder's object queries (arXiv 2005.12872) to the features of the image.

    Raises:
        GraphError: the object queries attend to points, or to nothing.
    """
    boxes = next((each for each in model.graph.outputs if each.name == "boxes"), None)
    queries = boxes.shape[1] if boxes is not None and boxes.shape is not None else None
    for weights in reversed(find_weights(model)):
        grid = patch_grid(weights)
        if (
            grid is not None
            and not weights.windowed
            and (weights.queries, weights.keys) == (queries, grid[0] * grid[1])
        ):
            return AttentionViews(
                (weights,), grid, 0, tuple(range(weights.queries)), "the decoder's last look at the image"
            )
    raise GraphError(
        f"the decoder of {name} has no attention over the whole image",
        found="no Softmax over all positions for each object query (deformable attention samples points)",
        wanted="cross-attention as in DETR",
    )
