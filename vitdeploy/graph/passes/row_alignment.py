"""More rows than tokens, where a runtime's kernels are faster with them: exact, for nothing reads the further rows.

A linear over 197 tokens may take longer than one over 200 or 208, whose rows fill the tiles of the kernel. So further
rows, copies of the last tokens in reverse order, are added to the residual stream in front of the first block. What
works on each row alone makes further rows of them; whatever depends on all tokens reads the first rows only: attention
its keys and values, an average over the tokens, an output. Which number is fast is a property of the runtime, the CPU
and the width; `search.rows` measures it.

A copy keeps the values that it is a copy of all the way, as its query meets the same keys. So no tensor takes a value
that it does not take without the further rows: ranges of activations stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.attention import Attention, find_attentions
from vitdeploy.graph.analysis.layout import is_layout
from vitdeploy.graph.analysis.linears import is_dequantized
from vitdeploy.graph.analysis.rowwise import Rows, rows_of_inputs
from vitdeploy.graph.analysis.tokens import TOKENS, reads_first, residual
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.values import array_of, dim, is_constant

Use = tuple[ir.Node, int]


@dataclass
class _Flow:
    """Everything that gets further rows. `axes`: the row axis of every such tensor; `through`: the inputs of nodes that
    work on each row alone; `constants`: their inputs that hold something for each row, with the axis; `ends`: the
    inputs that read all rows of such a tensor together, in graph order."""

    axes: dict[ir.Value, int]
    through: list[Use] = field(default_factory=list)
    constants: list[tuple[ir.Node, int, int]] = field(default_factory=list)
    ends: list[Use] = field(default_factory=list)


def align_rows(model: ir.Model, rows: int) -> int:
    """Let the linears of the blocks compute `rows` rows per image, the tokens first; in place.

    Exact: every number that is read is computed as before (a runtime may sum a product of more rows in another order).
    If tokens are merged, `rows` applies in front of the first merge. Comes after all other rewrites.

    Args:
        model: in canonical form, or placed, with the shapes of what is quantized (`row_split.complete_shapes`).
        rows: at least the number of tokens, including class and register tokens, and less than twice as many.

    Returns: the number of linears that compute further rows; 0 if there are already `rows` tokens.

    Raises:
        GraphError: no such blocks, or something in them that is not known to work on each row alone; or an invalid
            number of rows.
    """
    attentions = find_attentions(model)
    stream, count = token_stream(attentions)
    if rows == count:
        return 0
    if not count < rows < 2 * count:
        raise GraphError(
            f"{count} tokens cannot be aligned to {rows} rows",
            wanted=f"{count} to {2 * count - 1}",
            fix="choose a number in this range, or leave align_rows out",
        )
    flow = _follow(model, stream, count)
    _check(attentions, flow, count)
    editor = Editor(model)
    linears = sum(index == 0 and _has_weight(node) for node, index in flow.through)
    ends = _raised(flow, stream)
    _extend(editor, flow, stream, count, rows)
    for value, axis in flow.axes.items():
        if value is not stream:
            editor.resize(value, (axis,), rows)
    ends.pop(stream, None)  # which still has its tokens alone
    _shorten(editor, flow, ends, count)
    return linears


def token_stream(attentions: Iterable[Attention]) -> tuple[ir.Value, int]:
    """The residual stream in front of the first self-attention [batch, tokens, channels], and how many tokens it has.

    Raises:
        GraphError: there is none.
    """
    for attention in attentions:
        count, stream = dim(attention.softmax.outputs[0], -1), residual(attention)
        if count is not None and stream is not None:
            return stream[0], count
    raise _refused("no self-attention over a fixed number of tokens with a residual sum behind it", "blocks of a ViT")


def _follow(model: ir.Model, stream: ir.Value, count: int) -> _Flow:
    flow = _Flow({stream: TOKENS})
    for node in model.graph:
        reads = {i: value for i, value in enumerate(node.inputs) if value is not None and value in flow.axes}
        found = _row_wise(node, flow.axes, count) if reads else None
        if found is not None:
            axis, inputs = found
            flow.axes.update((output, axis) for output in node.outputs)
            flow.through += [(node, i) for i in inputs if i in reads]
            flow.constants += [(node, i, own) for i, own in inputs.items() if i not in reads]
        flow.ends += [
            (node, i)
            for i, value in reads.items()
            if (found is None or i not in found[1]) and not (i == 0 and reads_first(node, flow.axes[value], count))
        ]
    return flow


def _row_wise(node: ir.Node, axes: dict[ir.Value, int], count: int) -> tuple[int, Rows] | None:
    """(axis of the outputs, axes of the inputs) where a node makes further rows of further rows, and of constants."""
    if any(output.is_graph_output() for output in node.outputs):  # outputs keep their names and shapes
        return None
    for axis in range(len(node.outputs[0].shape or ())):
        rows = rows_of_inputs(node, axis, count) if dim(node.outputs[0], axis) == count else None
        operands = [(node.inputs[i], own) for i, own in (rows or {}).items()]
        held = [value is not None and axes.get(value) == own for value, own in operands]
        known = [is_constant(value, overridable=True) for value, _ in operands]
        if rows and any(held) and all(one or other for one, other in zip(held, known, strict=True)):
            return axis, rows
    return None


def _check(attentions: Iterable[Attention], flow: _Flow, count: int) -> None:
    """Check that every attention over this number of tokens is one over these tokens."""
    operands = {(each.scores, 1) for each in attentions} | {(each.mix, 1) for each in attentions}
    for attention in attentions:
        if dim(attention.softmax.outputs[0], -1) == count and attention.key not in flow.axes:
            ends = [f"{node.name} ({node.op_type})" for node, index in flow.ends if (node, index) not in operands]
            reason = f"{ends[0]}, which is not known to work on each row alone" if ends else "other tokens"
            raise _refused(f"{reason}, in front of {attention.softmax.name}", "row-wise operations between attentions")


def _raised(flow: _Flow, stream: ir.Value) -> dict[ir.Value, list[Use]]:
    """The tensors whose first rows are wanted, with the uses of these: each as near to the start as layout operations
    allow that lead nowhere else. What lies behind gets no further rows."""
    ends: dict[ir.Value, list[Use]] = {}
    for node, index in flow.ends:
        value = node.inputs[index]
        assert value is not None
        use = (node, index)
        while len(list(value.uses())) == 1 and (producer := value.producer()) is not None:
            source = producer.inputs[0] if is_layout(producer) and len(producer.outputs) == 1 else None
            if source is None or source is stream or source not in flow.axes or len(list(source.uses())) > 1:
                break
            del flow.axes[value]
            value, use = source, (producer, 0)
        ends.setdefault(value, []).append(use)
    return ends


def _extend(editor: Editor, flow: _Flow, stream: ir.Value, count: int, rows: int) -> None:
    """Let the stream, and the constants that hold something of each row, have `rows` of them."""
    uses = [(node, index) for node, index in flow.through if node.inputs[index] is stream]
    shape = list(stream.shape or ())
    shape[TOKENS] = rows
    pads = editor.constant(np.array([0, 0, 0, 0, rows - count, 0], np.int64), "rows.pads")
    [extended] = editor.node(uses[0][0], "Pad", [stream, pads], "rows", shape, mode="reflect")
    for node, index in uses:
        node.replace_input_with(index, extended)
    for node, index, axis in flow.constants:
        array = array_of(node.inputs[index], overridable=True)
        assert array is not None
        widths = [(0, rows - count if own == axis else 0) for own in range(array.ndim)]
        editor.set_input(node, index, np.pad(array, widths, mode="reflect"))


def _has_weight(node: ir.Node) -> bool:
    """Whether it is the product of a linear, with a weight of its own, maybe one in INT8."""
    weight = node.inputs[1] if node.op_type == "MatMul" else None
    return weight is not None and (is_constant(weight, overridable=True) or is_dequantized(weight))


def _shorten(editor: Editor, flow: _Flow, ends: dict[ir.Value, list[Use]], count: int) -> None:
    """Let uses of tensors with further rows read the first `count` only."""
    for value, uses in ends.items():
        first = editor.first(uses[0][0], value, flow.axes[value], count, f"{value.name}.tokens")
        for node, index in uses:
            node.replace_input_with(index, first)


def _refused(found: str, wanted: str) -> GraphError:
    return GraphError(
        "the rows of this graph cannot be aligned", found=found, wanted=wanted, fix="leave align_rows out"
    )
