"""The residual stream of a Transformer: everything that is added up in it, and what reads it.

Followed from one tensor of the stream through operations that do the same to any combination of its channels, to what
writes it (linears, convolutions, constants) and to what reads it (norms, linears).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import onnx_ir as ir

from vitdeploy.graph.analysis.attention import find_attentions
from vitdeploy.graph.analysis.layout import is_layout
from vitdeploy.graph.analysis.linears import Linear
from vitdeploy.graph.analysis.rowwise import Rows, rows_of_inputs
from vitdeploy.graph.analysis.tokens import residual
from vitdeploy.graph.values import dim, floats_of, integers_of, is_constant, scalar_of

# Beside layout operations: what is linear, and the same for each channel.
_LINEAR = ("Add", "Concat", "Expand", "Pad", "ReduceMean", "ReduceSum", "Sub")


@dataclass
class ResidualStream:
    """`axes`: of every tensor the axis of its channels; `constants`: the inputs of nodes that are constants, with that
    axis; `writers` and `readers`: the linears and convolutions, by node, whose outputs and inputs are such tensors;
    `norms`: the layer normalisations over the channels."""

    width: int
    axes: dict[ir.Value, int]
    constants: dict[tuple[ir.Node, int], int] = field(default_factory=dict)
    writers: set[ir.Node] = field(default_factory=set)
    readers: set[ir.Node] = field(default_factory=set)
    norms: list[ir.Node] = field(default_factory=list)


class Stopped(Exception):
    """Something reads or writes the stream that is not known to treat all its channels alike."""


def find_stream(linears: Sequence[Linear], model: ir.Model) -> ResidualStream | None:
    """The residual stream of the blocks with self-attention, as a whole; None if there is none over a fixed number
    of tokens, or where anything but norms and linears reads it (an output of the graph, a concatenation of channels),
    or anything but linears, convolutions and constants writes it (norms behind the sum, or in front of the first
    block)."""
    start = next((found[0] for each in find_attentions(model) if (found := residual(each)) is not None), None)
    width = dim(start, -1)
    if start is None or width is None:
        return None
    try:
        return _follow(linears, start, width)
    except Stopped:
        return None


def _follow(linears: Sequence[Linear], start: ir.Value, width: int) -> ResidualStream:
    """Everything that is part of the stream if `start` [..., width] is."""
    by_output = {linear.output: linear for linear in linears}
    by_node = {linear.node: linear for linear in linears}
    stream, rest = ResidualStream(width, {}), [(start, len(start.shape or ()) - 1)]
    while rest:
        value, axis = rest.pop()
        if value in stream.axes:
            if stream.axes[value] != axis:
                raise Stopped
            continue
        stream.axes[value] = axis
        if value.is_graph_output():
            raise Stopped
        linear = by_output.get(value)
        rest += _written(stream, value, axis) if linear is None else []
        if linear is not None:
            if axis != (1 if linear.kind == "conv" else last_axis(value)) or linear.groups > 1:
                raise Stopped
            stream.writers.add(linear.node)
        for node, index in value.uses():
            if node.op_type == "LayerNormalization" and index == 0 and axis == last_axis(value):
                stream.norms.append(node)
            elif reads(by_node.get(node), value, axis):
                stream.readers.add(node)
            elif node.op_type != "Shape":
                rest += behind(node, index, axis, width)
    return stream


def _written(stream: ResidualStream, value: ir.Value, axis: int) -> list[tuple[ir.Value, int]]:
    """The tensors, with their channel axes, from which an operation computes `value`; constants are noted."""
    node = value.producer()
    rows = _commutes(node, axis, stream.width) if node is not None else None
    if node is None or rows is None:
        raise Stopped
    operands = [(output, axis) for output in node.outputs]
    for index, own in rows.items():
        operand = node.inputs[index]
        assert operand is not None
        if not is_constant(operand, overridable=True):
            operands.append((operand, own))
        elif floats_of(operand) is not None and dim(operand, own) == stream.width:
            stream.constants[node, index] = own
        else:
            raise Stopped
    return operands


def behind(node: ir.Node, index: int, axis: int, width: int) -> list[tuple[ir.Value, int]]:
    """The outputs of a node that does the same to any combination of one input's channels, with the axis of theirs.

    Raises:
        Stopped: it does not.
    """
    for out in range(len(node.outputs[0].shape or ())):
        rows = _commutes(node, out, width) if dim(node.outputs[0], out) == width else None
        if rows is not None and rows.get(index) == axis:
            return [(output, out) for output in node.outputs]
    raise Stopped


def _commutes(node: ir.Node, axis: int, width: int) -> Rows | None:
    """The axes of the inputs' channels, if the operation does the same to any combination of channels."""
    if node.domain or not (is_layout(node) or node.op_type in _LINEAR):
        return None
    if node.op_type == "Expand":
        ranks = [len(value.shape or ()) if value is not None else 0 for value in (node.inputs[0], node.outputs[0])]
        own = axis + ranks[0] - ranks[1]
        return {0: own} if dim(node.inputs[0], own) == width and own >= 0 else None
    if node.op_type == "Pad":
        pads = integers_of(node.inputs[1]) if len(node.inputs) < 4 else None
        filled = len(node.inputs) > 2 and node.inputs[2] is not None and scalar_of(node.inputs[2]) != 0
        inside = pads is not None and pads[axis] == pads[axis + len(pads) // 2] == 0
        return {0: axis} if inside and not filled else None
    rows = rows_of_inputs(node, axis, width)
    broadcast = node.op_type in ("Add", "Sub") and rows is not None and len(rows) < len(node.inputs)
    return None if broadcast else rows


def reads(linear: Linear | None, value: ir.Value, axis: int) -> bool:
    """Whether a linear sums up along this axis of the value."""
    return linear is not None and linear.kind == "matmul" and linear.input is value and axis == last_axis(value)


def last_axis(value: ir.Value) -> int:
    return len(value.shape or ()) - 1
