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
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.layout import is_layout
from vitdeploy.graph.analysis.linears import Linear
from vitdeploy.graph.analysis.residual_stream import ResidualStream, Stopped, behind, find_stream, last_axis, reads
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.values import floats_of

Matrix = npt.NDArray[np.float64]


@dataclass(frozen=True)
class _Norm:
    """gamma and beta [width], and the nodes of the linears that read the norm, through selections and averages."""

    gamma: npt.NDArray[np.float32]
    beta: npt.NDArray[np.float32]
    linears: set[ir.Node]


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
    stream = find_stream(editor.linears, model)
    if stream is None:
        return 0
    by_node = {linear.node: linear for linear in editor.linears}
    try:
        norms = {node: _norm(node, by_node, stream.width) for node in stream.norms}
    except Stopped:
        return 0
    if all((norm.gamma == 1).all() and not norm.beta.any() for norm in norms.values()):
        return 0
    _apply(editor, stream, norms, orthogonal(stream.width, seed))
    return len(norms)


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


def _norm(node: ir.Node, by_node: Mapping[ir.Node, Linear], width: int) -> _Norm:
    """Raises Stopped where the norm is over more than the channels, or not only linears read it in the end."""
    value, gamma = node.inputs[0], floats_of(node.inputs[1])
    shift = node.inputs[2] if len(node.inputs) > 2 else None
    beta = np.zeros(width, np.float32) if shift is None else floats_of(shift)
    axis = node.attributes.get_int("axis", -1)
    over_channels = value is not None and axis in (-1, last_axis(value))
    if not over_channels or gamma is None or beta is None or not gamma.shape == beta.shape == (width,):
        raise Stopped
    norm, rest = _Norm(gamma, beta, set()), [(node.outputs[0], last_axis(node.outputs[0]))]
    while rest:
        value, axis = rest.pop()
        if value.is_graph_output():
            raise Stopped
        for reader, index in value.uses():
            linear = by_node.get(reader)
            if linear is not None and reads(linear, value, axis):
                shifted = linear.bias is None and (beta @ linear.weight).any()
                if shifted and linear.output.is_graph_output():  # whose name no Add can take
                    raise Stopped
                norm.linears.add(reader)
            elif is_layout(reader) or reader.op_type == "ReduceMean":  # of a shift they make the same shift
                rest += behind(reader, index, axis, width)
            elif reader.op_type != "Shape":
                raise Stopped
    return norm


def _apply(editor: Editor, stream: ResidualStream, norms: Mapping[ir.Node, _Norm], rotation: Matrix) -> None:
    of_linear = {node: norm for norm in norms.values() for node in norm.linears}
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
        array = floats_of(node.inputs[index])
        assert array is not None
        editor.set_input(node, index, _rotated(array, axis, rotation).astype(np.float32))
    for node, norm in norms.items():
        editor.set_input(node, 1, np.ones_like(norm.gamma))
        if len(node.inputs) > 2 and node.inputs[2] is not None:
            editor.set_input(node, 2, np.zeros_like(norm.beta))


def _rotated(array: npt.NDArray[np.floating], axis: int, rotation: Matrix) -> Matrix:
    return np.moveaxis(np.moveaxis(array, axis, -1) @ rotation, -1, axis)
