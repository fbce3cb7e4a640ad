"""Biases of key and value that softmax makes superfluous."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.attention import Attention, find_attentions
from vitdeploy.graph.analysis.layout import Indices, exclusive, leaves, origin, static_shape
from vitdeploy.graph.analysis.linears import Linear
from vitdeploy.graph.edit import Editor, drop_unused


def drop_key_bias(model: ir.Model) -> int:
    """Set the bias of every attention's key to zero: it adds one number, q . b_k, to a whole row of the scores.

    softmax(s + c 1^T) = softmax(s), also with masks and position biases added and with factors along the way: exact.

    Left alone: keys that pass a norm or rotary positions after the bias; scores or keys that something else reads.
    Where the linear has no other bias left, its Add goes. Returns the number of attentions whose key lost its bias.
    """
    editor, count = Editor(model), 0
    for attention in find_attentions(model):
        linear = editor.linear_behind(origin(attention.key, through_scales=True))
        if linear is None or linear.bias is None:
            continue
        found = leaves(linear.output, through_scales=True)
        columns = exclusive(found, attention.key, attention.scores, len(linear.bias)) if found is not None else None
        # One column along the last axis, the keys: only then is the same number added to every score of a row.
        if columns is None or (columns != columns[..., :1]).any():
            continue
        count += _clear(editor, linear, linear.bias, columns)
    if count:
        drop_unused(model)
    return count


def fold_value_bias(model: ir.Model) -> int:
    """Move the bias of every attention's value into the linear behind it: rows of softmax sum to one.

        P (V + 1 b_v^T) = P V + 1 b_v^T        and so b_proj' = b_proj + b_v W_proj

    Exact up to the rounding of the new bias, with any mask. Left alone: attention whose result reaches anything but
    one linear, or reaches it through more than layout (a norm, a gate); values that something else reads.
    Returns the number of attentions whose value lost its bias.
    """
    editor, count = Editor(model), 0
    for attention in find_attentions(model):
        linear = editor.linear_behind(origin(attention.value))
        if linear is None or linear.bias is None:
            continue
        found = leaves(linear.output)
        columns = exclusive(found, attention.value, attention.mix, len(linear.bias)) if found is not None else None
        # One column along the last axis but one, the keys: only then is the bias a vector added to every value.
        if columns is None or (columns != columns[..., :1, :]).any() or not linear.bias[columns].any():
            continue
        behind = projection_of(editor, attention, columns[..., :1, :])
        if behind is None:
            continue
        projection, channels = behind
        shift = linear.bias[channels].astype(np.float64) @ projection.weight
        bias = np.zeros_like(shift) if projection.bias is None else projection.bias
        editor.set_linear(projection, bias=bias + shift)
        count += _clear(editor, linear, linear.bias, columns)
    if count:
        drop_unused(model)
    return count


def _clear(editor: Editor, linear: Linear, bias: npt.NDArray[np.float32], columns: Indices) -> bool:
    if not bias[columns].any():
        return False
    cleared = bias.copy()
    cleared[columns] = 0
    editor.set_linear(linear, bias=cleared)
    return True


def projection_of(editor: Editor, attention: Attention, columns: Indices) -> tuple[Linear, Indices] | None:
    """The linear that reads the mixed values, and the value column that each of its input channels comes from."""
    mixed = attention.mix.outputs[0]
    shape = static_shape(mixed)
    if shape is None or len(shape) != columns.ndim:
        return None
    # The values say which size stands for a dynamic batch: the same here, but not the same axis ("8 * batch").
    shape = (*columns.shape[:-2], shape[-2], columns.shape[-1])
    if any(isinstance(own, int) and own != size for own, size in zip(mixed.shape or (), shape, strict=True)):
        return None  # values of another batch than the scores
    found = leaves(mixed, shape)
    if found is None or len(found) != 1 or len(found[0].readers) != 1:
        return None
    [reader] = found[0].readers
    linear = next((linear for linear in editor.linears if linear.node is reader), None)
    if (
        linear is None
        or linear.kind != "matmul"
        or linear.input is not found[0].value
        or found[0].value.is_graph_output()
    ):
        return None
    if linear.bias_add is None and linear.output.is_graph_output():
        return None
    of_mixed = np.broadcast_to(columns, shape)
    channels = of_mixed.ravel()[found[0].source]
    rows = channels.reshape(-1, channels.shape[-1])
    return (linear, rows[0]) if (rows == rows[0]).all() else None
