"""Compute query, key and value with one merged linear, or with one linear each, as the target prefers."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from vitdeploy.graph import edit
from vitdeploy.graph.analysis.attention import Attention, find_attentions
from vitdeploy.graph.analysis.rows import Indices, Leaf, Linear, leaves, origin, static_shape
from vitdeploy.graph.canonical.norms import norm_before_heads


def merge_qkv(model: ir.Model) -> int:
    """One MatMul (and Add) and a Split for the linears of an attention's query, key and value that share their input.

        [x W_q + b_q, x W_k + b_k, x W_v + b_v] = split(x [W_q W_k W_v] + [b_q b_k b_v])

    Exact: every number is computed as before. Two linears are merged where only two share an input: key and value of
    cross-attention, query and key where positions are added to both (DETR).
    Left alone: linears whose result reaches the attention through another linear.
    Returns the number of attentions changed.
    """
    editor, count = edit.Editor(model), 0
    for attention in find_attentions(model):
        groups: dict[ir.Value, list[Linear]] = {}
        for linear in editor.linears:
            if linear.kind == "matmul" and not linear.output.is_graph_output() and roles(linear.output, attention):
                groups.setdefault(linear.input, []).append(linear)
        shared = [group for group in groups.values() if len(group) > 1]
        for group in shared:
            merge(editor, group)
        count += bool(shared)
    if count:
        edit.drop_unused(model)
    return count


def split_qkv(model: ir.Model, expected: Callable[[Attention, Linear], bool] = lambda attention, merged: True) -> int:
    """Split every merged query-key-value linear, whatever its layout, into one linear each.

    Each part gets its columns of the merged weight, one Reshape and one Transpose; the key's Transpose writes K^T at
    once. Exact: every number is computed as before. Left alone: parts that overlap, are not [batch, heads, tokens,
    channels] in some order of the axes, or are read elsewhere in another form; and linears that are not `expected`.
    Returns the number of linears that were split.
    """
    editor, count = edit.Editor(model), 0
    for attention in find_attentions(model):
        merged = editor.linear_behind(origin(attention.value))
        if merged is not None and expected(attention, merged):
            count += bool(separate(editor, merged, attention))
    if count:
        edit.drop_unused(model)
    return count


def merge(editor: edit.Editor, linears: list[Linear]) -> None:
    """Replace MatMuls of the same input by one; their Adds, where any has a bias, by one. The order is kept."""
    widths = [linear.weight.shape[1] for linear in linears]
    name, first = "_".join([linears[0].name, *(one.name.rpartition(".")[2] for one in linears[1:])]), linears[0]
    rows = list(first.node.outputs[0].shape or ())[:-1]
    whole = [*rows, sum(widths)] if rows else None
    weight = editor.constant(np.concatenate([linear.weight for linear in linears], axis=1), f"{name}.weight_t")
    [result] = editor.node(first.node, "MatMul", [first.input, weight], name, whole)
    if any(linear.bias is not None for linear in linears):
        biases = [
            np.zeros(w, np.float32) if one.bias is None else one.bias for one, w in zip(linears, widths, strict=True)
        ]
        vector = editor.constant(np.concatenate(biases), f"{name}.bias")
        [result] = editor.node(first.node, "Add", [result, vector], name, whole)
    sizes = editor.constant(np.array(widths, np.int64), f"{name}.sizes")
    shapes = [linear.output.shape for linear in linears]
    parts = editor.node(first.node, "Split", [result, sizes], name, *shapes, axis=-1)
    for linear, part in zip(linears, parts, strict=True):
        ir.convenience.replace_all_uses_with(linear.output, part)
        _remove(editor, linear)


@dataclass(frozen=True)
class _Part:
    """A leaf of a merged linear: `leaf` is Transpose(`perm`) of [batch, tokens, heads, channels], whose columns of the
    linear are `columns` [heads, channels]."""

    leaf: Leaf
    columns: Indices
    perm: tuple[int, ...]


def separate(editor: edit.Editor, linear: Linear, attention: Attention) -> dict[str, Linear]:
    """Give query, key and value of an attention, the leaves of a merged linear, a linear each.

    Returns: the new linears by "query", "key", "value"; empty, and nothing changed, where it cannot be done.
    """
    shape, found = static_shape(linear.output), leaves(linear.output)
    if linear.kind != "matmul" or shape is None or len(shape) != 3 or found is None or len(found) < 2:
        return {}
    parts: dict[str, _Part] = {}
    for leaf in found:
        part, read_as = _part(leaf, shape), roles(leaf.value, attention)
        if part is None or len(read_as) != 1 or read_as[0] in parts:
            return {}
        parts[read_as[0]] = part
    columns = np.concatenate([part.columns.ravel() for part in parts.values()])
    if len(np.unique(columns)) < len(columns):
        return {}
    made = {role: _linear_of_part(editor, linear, part, f"{linear.name}.{role}") for role, part in parts.items()}
    norm_before_heads(editor.graph)
    return made


def _part(leaf: Leaf, shape: tuple[int, ...]) -> _Part | None:
    if leaf.source.ndim != 4 or leaf.value.is_graph_output():
        return None
    batch, tokens, width = shape
    rows = np.arange(batch * tokens).reshape(batch, tokens, 1, 1)
    matches = []
    for perm in itertools.permutations(range(4)):
        source = leaf.source.transpose(perm)
        columns = source[0, 0]
        if source.shape[:2] == (batch, tokens) and columns.max() < width and (source == rows * width + columns).all():
            matches.append(_Part(leaf, columns, tuple(int(axis) for axis in np.argsort(perm))))
    # Heads before channels: of the two orders that fit, the one that keeps the columns in their own order.
    return min(matches, key=lambda part: int((np.diff(part.columns.ravel()) != 1).sum()), default=None)


def _linear_of_part(editor: edit.Editor, linear: Linear, part: _Part, name: str) -> Linear:
    heads, channels = part.columns.shape
    rows = list(linear.output.shape or ())[:2]
    columns = part.columns.ravel()
    weight, bias, add = linear.weight[:, columns], None, None
    matrix = editor.constant(weight, f"{name}.weight_t")
    [result] = editor.node(linear.node, "MatMul", [linear.input, matrix], name, [*rows, len(columns)])
    product = _producer(result)
    if linear.bias is not None and linear.bias[columns].any():
        bias = linear.bias[columns]
        vector = editor.constant(bias, f"{name}.bias")
        [result] = editor.node(linear.node, "Add", [result, vector], name, [*rows, len(columns)])
        add = _producer(result)
    batch_and_tokens = [-1, rows[1]] if isinstance(rows[1], int) else [0, 0]  # 0 copies the size
    sizes = editor.constant(np.array([*batch_and_tokens, heads, channels], np.int64), f"{name}.sizes")
    split = [*rows, heads, channels]
    [result] = editor.node(linear.node, "Reshape", [result, sizes], name, split)
    moved = [split[axis] for axis in part.perm]
    [result] = editor.node(linear.node, "Transpose", [result], name, moved, perm=list(part.perm))
    ir.convenience.replace_all_uses_with(part.leaf.value, result)
    return Linear(name, "matmul", product, linear.input, weight, 1, bias, add)


def roles(value: ir.Value, attention: Attention) -> list[str]:
    """The operands ("query", "key", "value") as which an attention reads `value`, without another product between."""
    ends = {(attention.scores, 0): "query", (attention.scores, 1): "key", (attention.mix, 1): "value"}
    found, seen, front = [], set(), [value]
    while front:
        for node, index in front.pop().uses():
            if (node, index) in ends:
                found.append(ends[node, index])
            elif node not in seen and node.op_type not in ("MatMul", "Gemm", "Conv", "Softmax"):
                seen.add(node)
                front.extend(node.outputs)
    return found


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node


def _remove(editor: edit.Editor, linear: Linear) -> None:
    if linear.bias_add is not None:
        editor.graph.remove(linear.bias_add, safe=True)
    editor.graph.remove(linear.node, safe=True)
