"""An orthogonal rotation of the residual stream: the same function, with channels that quantize otherwise.

A few channels of the residual stream are much larger than the others. In a rotated basis every channel holds some of
each, so none stands out. Rows may be rotated before a LayerNormalization instead of after, if the rotation Q keeps the
mean over the channels (Q 1 = 1): it then keeps the centred row's length too, so that n(x Q) = n(x) Q for the norm n
without scale and shift. What writes into the stream is multiplied by Q, what reads it by the transpose:

    W' = W Q and b' = b Q (writers, the patch embedding, tokens and positions)
    W' = Q^T diag(gamma) W and b' = b + beta W (linears behind a norm, whose gamma becomes 1 and beta 0)

Source: QuaRot (arXiv 2404.00456, section 4) and SliceGPT (arXiv 2401.15024, section 3.1), both for norms that do not
subtract the mean, or where the mean is subtracted by a linear; Q 1 = 1 is what keeps the mean where it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.attention import find_attentions
from vitdeploy.graph.canonical.edit import scalar_of
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.layout import integers, is_layout
from vitdeploy.graph.linears import Linear, constant
from vitdeploy.graph.rowwise import Rows, dim, rows_of_inputs
from vitdeploy.graph.tokens import residual

Matrix = npt.NDArray[np.float64]

# Beside layout operations: what is linear, and the same for each channel.
_LINEAR = ("Add", "Concat", "Expand", "Pad", "ReduceMean", "ReduceSum", "Sub")


@dataclass
class _Stream:
    """Everything that is rotated together. `axes`: of every tensor the axis of its channels; `constants`: the inputs of
    nodes that are constants, with that axis; `writers` and `readers`: the linears, by node, whose outputs and inputs
    are such tensors; `norms`: with gamma and beta, and the linears behind each."""

    width: int
    axes: dict[ir.Value, int]
    constants: dict[tuple[ir.Node, int], int] = field(default_factory=dict)
    writers: set[ir.Node] = field(default_factory=set)
    readers: set[ir.Node] = field(default_factory=set)
    norms: dict[ir.Node, _Norm] = field(default_factory=dict)


@dataclass(frozen=True)
class _Norm:
    """gamma and beta [width], and the nodes of the linears that read the norm, through selections and averages."""

    gamma: npt.NDArray[np.float32]
    beta: npt.NDArray[np.float32]
    linears: set[ir.Node]


class _Stopped(Exception):
    """Something reads or writes the stream that is not known to commute with a rotation."""


def rotate_residual(model: ir.Model, seed: int = 0) -> int:
    """Rotate the channels of the residual stream by a random orthogonal matrix, in place.

    Exact up to the rounding of the new weights. Comes behind `fold_layer_scale`: a factor for each channel between a
    linear and the stream does not commute with a rotation. Before the folds of biases, as beta goes into them.

    Left alone: a stream that anything but norms with linears behind them, and linears, reads (an output of the graph, a
    concatenation of channels), or anything but linears, convolutions and constants writes (norms behind the sum, or in
    front of the first block); a graph without self-attention over a fixed number of tokens; and one whose norms have
    neither scale nor shift, as this leaves them.

    Args:
        model: as `normalise` leaves it.
        seed: of the rotation, see `orthogonal`.

    Returns: the number of norms whose scale and shift went into the linears behind them.
    """
    editor = Editor(model)
    start = next((found[0] for each in find_attentions(model) if (found := residual(each)) is not None), None)
    width = dim(start, -1)
    if start is None or width is None:
        return 0
    try:
        stream = _follow(editor, start, width)
    except _Stopped:
        return 0
    if all((norm.gamma == 1).all() and not norm.beta.any() for norm in stream.norms.values()):
        return 0
    _apply(editor, stream, orthogonal(width, seed))
    return len(stream.norms)


def orthogonal(width: int, seed: int) -> Matrix:
    """A random orthogonal matrix [width, width] with Q 1 = 1, uniform among these.

    Uniform on the complement of the vector of ones, whose basis is a Householder reflection's: the QR decomposition of
    a normal matrix, with the signs of R's diagonal (Mezzadri, arXiv math-ph/0609050, section 5).
    """
    reflected = np.full(width, -1 / np.sqrt(width))
    reflected[0] += 1
    basis = np.eye(width)[:, 1:]
    if width > 1:
        basis = basis - 2 * np.outer(reflected, reflected[1:]) / (reflected @ reflected)
    inner, triangle = np.linalg.qr(np.random.default_rng(seed).standard_normal((width - 1, width - 1)))
    found: Matrix = np.full((width, width), 1 / width) + basis @ (inner * np.sign(np.diag(triangle))) @ basis.T
    return found


def _follow(editor: Editor, start: ir.Value, width: int) -> _Stream:
    """Everything that is rotated if `start` [..., width] is."""
    by_output = {linear.output: linear for linear in editor.linears}
    by_node = {linear.node: linear for linear in editor.linears}
    stream, rest = _Stream(width, {}), [(start, len(start.shape or ()) - 1)]
    while rest:
        value, axis = rest.pop()
        if value in stream.axes:
            if stream.axes[value] != axis:
                raise _Stopped
            continue
        stream.axes[value] = axis
        if value.is_graph_output():
            raise _Stopped
        linear = by_output.get(value)
        rest += _written(stream, value, axis) if linear is None else []
        if linear is not None:
            if axis != (1 if linear.kind == "conv" else _last(value)) or linear.groups > 1:
                raise _Stopped
            stream.writers.add(linear.node)
        for node, index in value.uses():
            if node.op_type == "LayerNormalization" and index == 0 and axis == _last(value):
                stream.norms[node] = _norm(node, by_node, width)
            elif _reads(by_node.get(node), value, axis):
                stream.readers.add(node)
            elif node.op_type != "Shape":
                rest += _behind(node, index, axis, width)
    return stream


def _written(stream: _Stream, value: ir.Value, axis: int) -> list[tuple[ir.Value, int]]:
    """The tensors, with the axes of their channels, of which an operation makes `value`; constants are noted."""
    node = value.producer()
    rows = _commutes(node, axis, stream.width) if node is not None else None
    if node is None or rows is None:
        raise _Stopped
    operands = [(output, axis) for output in node.outputs]
    for index, own in rows.items():
        operand = node.inputs[index]
        assert operand is not None
        if operand.const_value is None:
            operands.append((operand, own))
        elif constant(operand) is not None and dim(operand, own) == stream.width:
            stream.constants[node, index] = own
        else:
            raise _Stopped
    return operands


def _behind(node: ir.Node, index: int, axis: int, width: int) -> list[tuple[ir.Value, int]]:
    """The outputs of a node that commutes with a rotation of one input's channels, with the axis of theirs."""
    for out in range(len(node.outputs[0].shape or ())):
        rows = _commutes(node, out, width) if dim(node.outputs[0], out) == width else None
        if rows is not None and rows.get(index) == axis:
            return [(output, out) for output in node.outputs]
    raise _Stopped


def _commutes(node: ir.Node, axis: int, width: int) -> Rows | None:
    """The axes of the inputs' channels, if the operation does the same to any combination of channels."""
    if node.domain or not (is_layout(node) or node.op_type in _LINEAR):
        return None
    if node.op_type == "Expand":
        ranks = [len(value.shape or ()) if value is not None else 0 for value in (node.inputs[0], node.outputs[0])]
        own = axis + ranks[0] - ranks[1]
        return {0: own} if dim(node.inputs[0], own) == width and own >= 0 else None
    if node.op_type == "Pad":
        pads = integers(node.inputs[1]) if len(node.inputs) < 4 else None
        filled = len(node.inputs) > 2 and node.inputs[2] is not None and scalar_of(node.inputs[2]) != 0
        inside = pads is not None and pads[axis] == pads[axis + len(pads) // 2] == 0
        return {0: axis} if inside and not filled else None
    rows = rows_of_inputs(node, axis, width)
    broadcast = node.op_type in ("Add", "Sub") and rows is not None and len(rows) < len(node.inputs)
    return None if broadcast else rows


def _norm(node: ir.Node, by_node: Mapping[ir.Node, Linear], width: int) -> _Norm:
    """Raises _Stopped where the norm is over more than the channels, or not only linears read it in the end."""
    value, gamma = node.inputs[0], constant(node.inputs[1])
    shift = node.inputs[2] if len(node.inputs) > 2 else None
    beta = np.zeros(width, np.float32) if shift is None else constant(shift)
    axis = node.attributes.get_int("axis", -1)
    over_channels = value is not None and axis in (-1, _last(value))
    if not over_channels or gamma is None or beta is None or not gamma.shape == beta.shape == (width,):
        raise _Stopped
    norm, rest = _Norm(gamma, beta, set()), [(node.outputs[0], _last(node.outputs[0]))]
    while rest:
        value, axis = rest.pop()
        if value.is_graph_output():
            raise _Stopped
        for reader, index in value.uses():
            linear = by_node.get(reader)
            if linear is not None and _reads(linear, value, axis):
                shifted = linear.bias is None and (beta @ linear.weight).any()
                if shifted and linear.output.is_graph_output():  # whose name no Add can take
                    raise _Stopped
                norm.linears.add(reader)
            elif is_layout(reader) or reader.op_type == "ReduceMean":  # of a shift they make the same shift
                rest += _behind(reader, index, axis, width)
            elif reader.op_type != "Shape":
                raise _Stopped
    return norm


def _reads(linear: Linear | None, value: ir.Value, axis: int) -> bool:
    return linear is not None and linear.kind == "matmul" and linear.input is value and axis == _last(value)


def _last(value: ir.Value) -> int:
    return len(value.shape or ()) - 1


def _apply(editor: Editor, stream: _Stream, rotation: Matrix) -> None:
    of_linear = {node: norm for norm in stream.norms.values() for node in norm.linears}
    for linear in editor.linears:
        norm = of_linear.get(linear.node)
        if norm is None and linear.node not in stream.writers | stream.readers:
            continue
        weight = linear.weight.astype(np.float64)
        bias = None if linear.bias is None else linear.bias.astype(np.float64)
        if norm is not None:
            bias = norm.beta @ weight + (0 if bias is None else bias)
            weight = norm.gamma[:, None] * weight
        if norm is not None or linear.node in stream.readers:
            weight = rotation.T @ weight
        if linear.node in stream.writers:
            weight = _rotated(weight, linear.out_axis, rotation)
            bias = None if bias is None else bias @ rotation
        editor.set_linear(linear, weight, bias)
    for (node, index), axis in stream.constants.items():
        array = constant(node.inputs[index])
        assert array is not None
        editor.set_input(node, index, _rotated(array, axis, rotation).astype(np.float32))
    for node, norm in stream.norms.items():
        editor.set_input(node, 1, np.ones_like(norm.gamma))
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            editor.set_input(node, 2, np.zeros_like(norm.beta))


def _rotated(array: npt.NDArray[np.floating], axis: int, rotation: Matrix) -> Matrix:
    return np.moveaxis(np.moveaxis(array, axis, -1) @ rotation, -1, axis)
