"""Attention as one operator of ONNX Runtime: no transposition, no table of scores in memory.

com.microsoft.MultiHeadAttention takes query, key and value as linears leave them, [batch, tokens, heads * channels],
and gives [batch, tokens, heads * channels] to the projection. A number that is added to each score goes in as
`attention_bias` [batch or 1, heads or 1, queries, keys]. Specification: onnxruntime/docs/ContribOperators.md.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.analysis.attention import Attention, find_attentions
from vitdeploy.graph.analysis.layout import exclusive, leaves, origin, static_shape
from vitdeploy.graph.analysis.linears import Linear
from vitdeploy.graph.edit import Editor, Names, drop_unused
from vitdeploy.graph.passes.biases import projection_of
from vitdeploy.graph.values import dim

DOMAIN = "com.microsoft"


def fuse_attention(model: ir.Model) -> int:
    """Replace every attention by one operator, in place, where query, key and value come from a linear each, in their
    own order, and no more than one tensor is added to the scores. Exact but for the order of sums. Returns how many
    were replaced."""
    editor, count = Editor(model), 0
    for attention in find_attentions(model):
        found = _operands(editor, attention)
        if found is None:
            continue
        operands, heads, projection = found
        old = projection.input
        producer = old.producer()
        assert producer is not None
        inputs: list[ir.Value | None] = [
            linear.output if rows is None else editor.first(producer, linear.output, 1, rows, linear.name)
            for linear, rows in operands
        ]
        if attention.between:
            inputs += [None, None, _for_each_query(editor, attention, producer)]  # no bias, no padded keys
        node = Names(model).node(
            "MultiHeadAttention",
            inputs,
            f"{str(attention.softmax.name).removesuffix('/Softmax')}/MultiHeadAttention",
            {"num_heads": heads, "scale": 1.0},
            domain=DOMAIN,
        )
        ir.convenience.replace_nodes_and_values(model.graph, producer, [producer], [node], [old], node.outputs)
        count += 1
    if count:
        model.opset_imports[DOMAIN] = 1
        drop_unused(model)
    return count


def _operands(editor: Editor, attention: Attention) -> tuple[list[tuple[Linear, int | None]], int, Linear] | None:
    """(query, key and value, each with the number of first rows that is read, None for all; the number of heads; the
    projection behind them)."""
    if attention.between and _added(attention) is None:
        return None
    ends = ((attention.query, attention.scores), (attention.key, attention.scores), (attention.value, attention.mix))
    operands: list[tuple[Linear, int | None]] = []
    columns = []
    for (value, reader), axes in zip(ends, ((2, 1, 3), (3, 1, 2), (2, 1, 3)), strict=True):
        linear = editor.linear_behind(origin(value))
        found = leaves(linear.output) if linear is not None else None
        if linear is None or found is None or linear.output.shape is None or len(linear.output.shape) != 3:
            return None
        own = exclusive(found, value, reader, linear.weight.shape[1])
        if own is None or own.ndim != 4:
            return None
        [source] = [leaf.source for leaf in found if leaf.value is value]
        rows = source.transpose(0, *axes).reshape(source.shape[0], source.shape[axes[0]], -1)
        whole = np.arange(np.prod(static_shape(linear.output) or ())).reshape(len(rows), -1, linear.weight.shape[1])
        first = rows.shape[1] if rows.shape[1] < whole.shape[1] else None
        if not np.array_equal(rows, whole[:, :first]) or (first is not None and dim(linear.output, 1) is None):
            return None
        operands.append((linear, first))
        columns.append(own)
    behind = projection_of(editor, attention, columns[2][..., :1, :])
    if behind is None or (behind[1] != np.arange(len(behind[1]))).any():
        return None
    projection, heads = behind[0], columns[0].shape[1]
    alone = [node for node, _ in projection.input.uses()] == [projection.node]
    distinct = len({linear.node for linear, _ in operands}) == len(operands)
    return (operands, heads, projection) if alone and distinct else None


def _added(attention: Attention) -> ir.Value | None:
    """The tensor [batch or 1, heads or 1, queries or 1, keys] that is added to the scores, where that is all."""
    scores = attention.scores.outputs[0]
    if len(attention.between) != 1 or attention.between[0].op_type != "Add" or scores.shape is None:
        return None
    added = next((each for each in attention.between[0].inputs if each is not None and each is not scores), None)
    if added is None or added.shape is None or added.dtype != ir.DataType.FLOAT:
        return None
    wanted, found = list(scores.shape), list(added.shape)
    if len(wanted) != 4 or len(found) != 4 or not isinstance(wanted[2], int):
        return None
    fits = found[3] == wanted[3] and all(own in (1, whole) for own, whole in zip(found, wanted, strict=True))
    return added if fits else None


def _for_each_query(editor: Editor, attention: Attention, before: ir.Node) -> ir.Value:
    """The addend of the scores, with a row for each query: the operator broadcasts it only over images and heads."""
    added, queries = _added(attention), dim(attention.scores.outputs[0], 2)
    assert added is not None and added.shape is not None and queries is not None
    if added.shape[2] == queries:
        return added
    name = f"{str(attention.softmax.name).removesuffix('/Softmax')}.bias"
    sizes = editor.constant(np.array([1, 1, queries, 1], np.int64), f"{name}.sizes")
    shape = [*list(added.shape)[:2], queries, added.shape[3]]
    return editor.node(before, "Expand", [added, sizes], name, shape)[0]
