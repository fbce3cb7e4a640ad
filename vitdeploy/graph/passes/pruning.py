"""Remove whole structures, hidden channels or heads, in front of a linear; the caller makes up for what they gave."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.analysis.prunable import Prunable
from vitdeploy.graph.analysis.rows import reshape_sizes, split_sizes
from vitdeploy.graph.edit import Editor, Numbers


def prune(editor: Editor, prunable: Prunable, kept: Sequence[int], weight: Numbers, bias: Numbers) -> None:
    """Keep some structures in front of a linear, in place; they keep their order.

    Args:
        prunable: of this graph as it is now.
        kept: numbers of the structures that stay, ascending, at least one.
        weight, bias: of the reader from now on, [channels that stay, out] and [out].
    """
    for linear, columns in prunable.columns:
        stay = np.sort(columns[list(kept)].ravel())
        editor.set_linear(linear, linear.weight[:, stay], None if linear.bias is None else linear.bias[stay])
    for node in prunable.splits:
        first = node.inputs[0]
        assert first is not None and first.shape is not None
        whole = first.shape[prunable.axes[first]]
        assert isinstance(whole, int)
        sizes = [_left(prunable, kept, size) for size in split_sizes(node, whole) or ()]
        if len(node.inputs) > 1 and node.inputs[1] is not None:
            editor.set_input(node, 1, np.array(sizes, np.int64))
    for value, axis in prunable.axes.items():
        _shrink(editor, value, axis, prunable, kept)
    editor.set_linear(prunable.reader, weight, bias)


def _shrink(editor: Editor, value: ir.Value, axis: int, prunable: Prunable, kept: Sequence[int]) -> None:
    node = value.producer()
    sizes = reshape_sizes(node) if node is not None and node.op_type == "Reshape" else None
    if node is not None and sizes is not None and sizes[axis] > 0:
        sizes[axis] = _left(prunable, kept, sizes[axis])
        editor.set_input(node, 1, np.array(sizes, np.int64))
    shape = list(value.shape or ())
    size = shape[axis] if shape else None
    if isinstance(size, int):
        shape[axis] = _left(prunable, kept, size)
        value.shape = ir.Shape(shape)


def _left(prunable: Prunable, kept: Sequence[int], size: int) -> int:
    return size // prunable.count * len(kept)
