"""Add outputs to a graph that show where the model looks: the attention weights, or their rollout over the patches.

A second reader of the softmax keeps every runtime from fusing the attention around it. So the weights are for analysis
runs, never for a graph that ships; the rollout itself costs little: it computes only rows of matrices, from the last
block to the first.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.analysis.attention_views import AttentionViews, Weights
from vitdeploy.graph.edit import Editor

OUTPUT = "attention"


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


def add_rollout(model: ir.Model, views: AttentionViews) -> str:
    """Add the rollout (Abnar & Zuidema, arXiv 2005.00928, section 3) of the tokens that are looked at, over the
    patches; returns the name of the output, float32 [batch, rows, columns]. In place.

    It is the mean over `views.rows` of what `pipeline.rollout` computes whole. The sum of a map is the share that goes
    to patches; the rest goes to the tokens before them.

    Args:
        views: those of `model`, as `token_views` finds them. Where the batch and the heads share an axis, the map is
            right for batch 1 only.
    """
    editor = Editor(model)
    end = views.last.attention.mix
    before, last = views.blocks[:-1], views.last
    flow = _rows_read(editor, last, views.rows)
    for number, weights in enumerate(reversed(before)):
        name = f"{OUTPUT}/{len(before) - 1 - number}"
        softmax = weights.attention.softmax.outputs[0]
        [mixed] = editor.node(end, "MatMul", [flow, softmax], name, None)
        flow = _half_and_half(editor, end, _over_heads(editor, end, mixed, name), flow, name)
    start = editor.constant(np.array([views.prefix], np.int64), f"{OUTPUT}/start")
    stop = editor.constant(np.array([last.keys], np.int64), f"{OUTPUT}/stop")
    axis = editor.constant(np.array([-1], np.int64), f"{OUTPUT}/axis")
    [patches] = editor.node(end, "Slice", [flow, start, stop, axis], OUTPUT, None)
    sizes = editor.constant(np.array([-1, *views.grid], np.int64), f"{OUTPUT}/sizes")
    [grid] = editor.node(end, "Reshape", [patches, sizes], OUTPUT, [_batch(model), *views.grid])
    grid.name = OUTPUT
    grid.type = ir.TensorType(ir.DataType.FLOAT)
    model.graph.outputs.append(grid)
    return OUTPUT


def _rows_read(editor: Editor, last: Weights, rows: tuple[int, ...]) -> ir.Value:
    """The mean of some rows of the last block's matrix, [..., 1, keys]: a pooling query has no residual connection."""
    name, end, softmax = f"{OUTPUT}/last", last.attention.mix, last.attention.softmax.outputs[0]
    read = softmax
    if len(rows) < last.queries:
        picked = editor.constant(np.array(rows, np.int64), f"{name}/rows")
        [read] = editor.node(end, "Gather", [softmax, picked], name, None, axis=len(softmax.shape or ()) - 2)
    axes = editor.constant(np.array([-3, -2], np.int64), f"{name}/axes")
    [mean] = editor.node(end, "ReduceMean", [read, axes], name, None, keepdims=1)
    if last.learned:
        return mean
    itself = editor.constant(np.eye(last.queries, last.keys, dtype=np.float32)[list(rows)].mean(0)[None], f"{name}/eye")
    return _half_and_half(editor, end, mean, itself, name)


def _over_heads(editor: Editor, end: ir.Node, value: ir.Value, name: str) -> ir.Value:
    axes = editor.constant(np.array([-3], np.int64), f"{name}/heads")
    return editor.node(end, "ReduceMean", [value, axes], name, None, keepdims=1)[0]


def _half_and_half(editor: Editor, end: ir.Node, attended: ir.Value, itself: ir.Value, name: str) -> ir.Value:
    """A block's matrix is half attention and half its residual connection."""
    half = editor.constant(np.array(0.5, np.float32), f"{name}/half")
    [both] = editor.node(end, "Add", [attended, itself], name, None)
    return editor.node(end, "Mul", [both, half], name, None)[0]


def _batch(model: ir.Model) -> int | ir.SymbolicDim | None:
    """The leading axis of the input."""
    shape = model.graph.inputs[0].shape
    return shape[0] if shape is not None else None
