"""The weights of attention in a graph: how large they are, which of them say where a model looks, and whose rows."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.attention import Attention, find_attentions
from vitdeploy.graph.analysis.layout import slice_bounds
from vitdeploy.graph.values import ancestors, integers_of


@dataclass(frozen=True)
class Weights:
    """The weights softmax(Q K^T) of one attention: `queries` rows over `keys` columns, for each head.

    windowed: the leading axis holds more than the batch and the heads, so rows see a part of the keys only.
    learned: the queries are parameters, the same for every image (attention pooling, or object queries).
    """

    attention: Attention
    queries: int
    keys: int
    windowed: bool
    learned: bool

    @property
    def name(self) -> str:
        """The module path that the exporter gave it."""
        return str(self.attention.softmax.name).removesuffix("/Softmax")


def find_weights(model: ir.Model) -> list[Weights]:
    """The weights of all attentions whose sizes are known, in graph order. For a graph as `normalise` leaves it."""
    found = []
    batch = model.graph.inputs[0].shape[0] if model.graph.inputs and model.graph.inputs[0].shape else None
    for attention in find_attentions(model):
        shape = attention.softmax.outputs[0].shape
        if shape is None or len(shape) < 3:
            continue
        queries, keys = shape[-2:]
        if not isinstance(queries, int) or not isinstance(keys, int):
            continue
        # [batch, heads, queries, keys], or with batch and heads in one axis; windows are a factor of the first one.
        windowed = len(shape) > 4 or (len(shape) == 4 and shape[0] != batch)
        learned = next(ancestors(attention.query, past_sizes=False), None) is None
        found.append(Weights(attention, queries, keys, windowed, learned))
    return found


def patch_grid(weights: Weights) -> tuple[int, int] | None:
    """(rows, columns) of the patches that the keys come from: the size of what the nearest convolution above gives."""
    for node in ancestors(weights.attention.key):
        shape = node.outputs[0].shape if node.op_type == "Conv" else None
        if shape is not None and len(shape) == 4:
            rows, columns = shape[2], shape[3]
            return (rows, columns) if isinstance(rows, int) and isinstance(columns, int) else None
    return None


def tokens_read(model: ir.Model, weights: Weights, first: int) -> tuple[int, ...]:
    """The tokens among the `first` that are selected one by one after an attention: class token, distillation token.

    () if all tokens are read alike, as in average pooling.
    """
    nodes = list(model.graph)
    rows: set[int] = set()
    for node in nodes[nodes.index(weights.attention.mix) :]:
        value = node.inputs[0] if node.op_type in ("Gather", "Slice") else None
        if value is not None and value.shape is not None and list(value.shape)[1:2] == [weights.queries]:
            picked = _picked(node, weights.queries, len(value.shape))
            rows |= set(picked) if picked and max(picked) < first else set()
    return tuple(sorted(rows))


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


def _picked(node: ir.Node, size: int, rank: int) -> list[int]:
    """The rows along axis 1 that a Gather or Slice by constants reads; [] for any other."""
    if node.op_type == "Gather":
        indices = integers_of(node.inputs[1]) if node.attributes.get_int("axis", 0) % rank == 1 else None
        return [index % size for index in indices or []]
    bounds = slice_bounds(node)
    if bounds is None or len(bounds) != 1 or bounds[0][0] % rank != 1:
        return []
    return list(range(size))[bounds[0][1]]
