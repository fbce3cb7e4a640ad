"""Make the weights of attention outputs of a float graph, for a run that looks at them.

Never for a graph that ships: a second reader of the softmax keeps every runtime from fusing the attention around it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.attention import Attention, find_attentions
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.layout import integers, slice_bounds


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
    """Which of the `first` tokens are picked out one by one behind an attention: a class token, a distillation token.

    () where all tokens are read alike, as in average pooling.
    """
    nodes = list(model.graph)
    rows: set[int] = set()
    for node in nodes[nodes.index(weights.attention.mix) :]:
        value = node.inputs[0] if node.op_type in ("Gather", "Slice") else None
        if value is not None and value.shape is not None and list(value.shape)[1:2] == [weights.queries]:
            picked = _picked(node, weights.queries, len(value.shape))
            rows |= set(picked) if picked and max(picked) < first else set()
    return tuple(sorted(rows))


def mark(model: ir.Model, weights: Weights) -> str:
    """Make the weights, [batch, heads, queries, keys], an output of the graph; returns its name. In place."""
    return _output(model, weights.attention.softmax.outputs[0])


def mark_mean(model: ir.Model, weights: Weights) -> str:
    """The same, of the mean over the heads, [batch, queries, keys]: a large model's weights of all heads and blocks
    would fill the memory."""
    editor, name = Editor(model), weights.name
    axis = editor.constant(np.array([-3], np.int64), f"{name}.heads")
    softmax = weights.attention.softmax.outputs[0]
    shape = [*list(softmax.shape or ())[:-3], weights.queries, weights.keys]
    [mean] = editor.node(weights.attention.mix, "ReduceMean", [softmax, axis], name, shape, keepdims=0)
    return _output(model, mean)


def _output(model: ir.Model, value: ir.Value) -> str:
    if not value.is_graph_output():
        value.type = value.type or ir.TensorType(ir.DataType.FLOAT)
        model.graph.outputs.append(value)
    return str(value.name)


def _picked(node: ir.Node, size: int, rank: int) -> list[int]:
    """The rows along axis 1 that a Gather or Slice by constants reads; [] for any other."""
    if node.op_type == "Gather":
        indices = integers(node.inputs[1]) if node.attributes.get_int("axis", 0) % rank == 1 else None
        return [index % size for index in indices or []]
    bounds = slice_bounds(node)
    if bounds is None or len(bounds) != 1 or bounds[0][0] % rank != 1:
        return []
    return list(range(size))[bounds[0][1]]


def ancestors(value: ir.Value, *, past_sizes: bool = True) -> Iterator[ir.Node]:
    """The nodes that a value is computed from, nearest first. Without `past_sizes`, only those that depend on what an
    input holds: not what a Shape node makes of its size."""
    seen: set[ir.Node] = set()
    queue = deque([value])
    while queue:
        node = queue.popleft().producer()
        if node is None or node in seen or (node.op_type == "Shape" and not past_sizes):
            continue
        seen.add(node)
        yield node
        queue.extend(each for each in node.inputs if each is not None)
