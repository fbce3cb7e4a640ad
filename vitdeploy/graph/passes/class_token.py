"""Compute only the tokens that are read: the last block's queries, projection and MLP for the class token alone.

A classifier reads one token of the last block (DeiT's distilled one two). Every row of a LayerNormalization, a linear,
an activation or a residual sum depends on the same row of its input only, so the selection of rows may move from the
end of the network up through all of them, until attention, where it stops at the queries: keys and values are those of
all tokens still. 6.9 % of the multiplications of a ViT-B/16 at 224 pixels go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.analysis.attention import find_attentions
from vitdeploy.graph.analysis.layout import origin, reshape_sizes, slice_bounds
from vitdeploy.graph.analysis.rowwise import Selected, rows_of_inputs, selected_rows, split_rows
from vitdeploy.graph.edit import Editor, drop_unused
from vitdeploy.graph.passes.qkv import merge, roles, separate
from vitdeploy.graph.values import array_of

_BOUNDS = ("starts", "ends", "axes")


@dataclass(frozen=True)
class _Narrow:
    """A node that needs to compute `wanted` only; `inputs` gives the axis of those rows in each input that has it."""

    wanted: Selected
    inputs: dict[int, int]


def class_token_only(model: ir.Model) -> int:
    """Move selections of rows up through row-wise operations, into the queries of the last attention.

    Exact: each number that is still computed is computed as before (a runtime may sum a product of fewer rows in
    another order). A merged query-key-value linear is divided: the query's columns on the selected rows, key and value
    in one linear on all rows.

    Left alone: a model whose other tokens are read too (average pooling, patch features as an output), selections of
    more than half of the rows, graphs where no attention is reached. Returns the number of attentions that now compute
    fewer rows.
    """
    editor = Editor(model)
    narrow = _plan(model)
    if not _attentions(narrow):
        return 0
    if _divide_merged(editor, model, narrow):
        drop_unused(model)
        narrow = _plan(model)
    _apply(editor, narrow)
    drop_unused(model)
    return _attentions(narrow)


def _attentions(narrow: dict[ir.Node, _Narrow]) -> int:
    return sum(node.op_type == "Softmax" for node in narrow)


def _plan(model: ir.Model) -> dict[ir.Node, _Narrow]:
    """The nodes whose output is read only in some rows, in graph order; nothing is changed."""
    narrow: dict[ir.Node, _Narrow] = {}
    for node in reversed(list(model.graph)):
        outputs = [output for output in node.outputs if list(output.uses()) or output.is_graph_output()]
        wanted = [_wanted(output, narrow) for output in outputs]
        first = wanted[0] if wanted else None
        if first is None or any(one is None or (one.axis, one.size) != (first.axis, first.size) for one in wanted):
            continue
        inputs = rows_of_inputs(node, first.axis, first.size)
        if inputs is not None:
            rows = {row for one in wanted if one is not None for row in one.rows}
            narrow[node] = _Narrow(Selected(first.axis, first.size, tuple(sorted(rows))), inputs)
    return dict(reversed(narrow.items()))


def _wanted(value: ir.Value, narrow: dict[ir.Node, _Narrow]) -> Selected | None:
    """The rows of `value` that its readers read, or None if one of them reads all, or along another axis."""
    if value.is_graph_output():
        return None
    found = []
    for node, index in value.uses():
        if node in narrow:
            wanted = narrow[node].wanted
            axis = narrow[node].inputs.get(index)
            found.append(Selected(axis, wanted.size, wanted.rows) if axis is not None else None)
        else:
            found.append(selected_rows(node) if index == 0 else None)
    first = found[0] if found else None
    if first is None or any(one is None or one.axis != first.axis for one in found):
        return None
    rows = sorted({row for one in found if one is not None for row in one.rows})
    return Selected(first.axis, first.size, tuple(rows)) if 2 * len(rows) <= first.size else None


def _divide_merged(editor: Editor, model: ir.Model, narrow: dict[ir.Node, _Narrow]) -> int:
    """Give queries that will be narrowed a linear of their own, and their key and value one for both."""
    count = 0
    for attention in find_attentions(model):
        merged = editor.linear_behind(origin(attention.value))
        if attention.softmax not in narrow or merged is None or "query" not in roles(merged.output, attention):
            continue
        parts = separate(editor, merged, attention)
        if parts.keys() >= {"key", "value"}:
            merge(editor, [parts["key"], parts["value"]])
        count += bool(parts)
    return count


def _apply(editor: Editor, narrow: dict[ir.Node, _Narrow]) -> None:
    have: dict[ir.Value, Selected] = {}  # what the outputs of narrowed nodes hold
    picked: dict[tuple[ir.Value, int, tuple[int, ...]], ir.Value] = {}

    def pick(before: ir.Node, value: ir.Value, axis: int, rows: Sequence[int], size: int) -> ir.Value:
        """`rows` (of the original numbering) of `value`, which may have been narrowed already."""
        held = have[value].rows if value in have else tuple(range(size))
        if held == tuple(rows):
            return value
        key = (value, axis, tuple(rows))
        if key not in picked:
            picked[key] = _select(editor, before, value, axis, [held.index(row) for row in rows])
        return picked[key]

    for node, plan in narrow.items():
        wanted = plan.wanted
        for index, axis in plan.inputs.items():
            value = node.inputs[index]
            assert value is not None
            node.replace_input_with(index, pick(node, value, axis, wanted.rows, wanted.size))
        if node.op_type == "Reshape":
            sizes = reshape_sizes(node) or []
            if sizes[wanted.axis] > 0:
                sizes[wanted.axis] = len(wanted.rows)
                editor.set_input(node, 1, np.array(sizes, np.int64))
        for output in node.outputs:
            have[output] = wanted
            if output.shape is not None:
                shape = list(output.shape)
                shape[wanted.axis] = len(wanted.rows)
                output.shape = ir.Shape(shape)
    for value in list(have):
        for reader in dict.fromkeys(use.node for use in value.uses()):
            if reader not in narrow:
                _renumber(editor, reader, have[value])


def _renumber(editor: Editor, node: ir.Node, held: Selected) -> None:
    """Let a selection read its rows out of a tensor that holds the rows `held` only."""
    value = node.inputs[0]
    assert value is not None
    if node.op_type == "Gather":
        indices = array_of(node.inputs[1], overridable=True)
        assert indices is not None
        places = [held.rows.index(int(index) % held.size) for index in indices.ravel()]
        editor.set_input(node, 1, np.array(places, np.int64).reshape(indices.shape))
        return
    bounds = slice_bounds(node) if node.op_type == "Slice" else None
    if bounds is not None:
        parts = [(node.outputs[0], list(range(held.size))[bounds[0][1]])]
    else:
        parts = [(output, rows) for output, rows in split_rows(node, held.size) if list(output.uses())]
    for output, rows in parts:
        places = [held.rows.index(row) for row in rows]
        whole = places == list(range(len(held.rows)))
        part = value if whole else _select(editor, node, value, held.axis, places)
        ir.convenience.replace_all_uses_with(output, part)


def _select(editor: Editor, before: ir.Node, value: ir.Value, axis: int, places: list[int]) -> ir.Value:
    """The rows of `value` at `places` along `axis`: a constant for a constant, else a Slice or a Gather."""
    name = str(before.name).rpartition("/")[0] or str(before.name)
    if (array := array_of(value, overridable=True)) is not None:
        return editor.constant(array.take(places, axis), f"{value.name}.rows")
    shape = list(value.shape) if value.shape is not None else None
    if shape is not None:
        shape[axis] = len(places)
    if places == list(range(places[0], places[0] + len(places))):
        bounds = (places[0], places[-1] + 1, axis)
        inputs = [
            editor.constant(np.array([bound], np.int64), f"{name}.{of}")
            for bound, of in zip(bounds, _BOUNDS, strict=True)
        ]
        [result] = editor.node(before, "Slice", [value, *inputs], name, shape)
    else:
        indices = editor.constant(np.array(places, np.int64), f"{name}.rows")
        [result] = editor.node(before, "Gather", [value, indices], name, shape, axis=axis)
    return result
