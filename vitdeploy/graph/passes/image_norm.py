"""The normalisation of pixels goes into the weights of the patch embedding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.layout import is_layout
from vitdeploy.graph.analysis.linears import Linear
from vitdeploy.graph.edit import Editor, bypass, drop_unused
from vitdeploy.graph.values import floats_of, only_user

Vector = npt.NDArray[np.float64]
MOVED = ("Cast", "Transpose", "Gather")


@dataclass(frozen=True)
class _Affine:
    """`node` computes value * scale + shift, both [channels]."""

    node: ir.Node
    value: ir.Value
    scale: Vector
    shift: Vector


def fold_image_normalisation(model: ir.Model) -> int:
    """Fold multiplications and additions of one constant a channel in front of a convolution into its weights.

        conv(s x + t, W) + b = conv(x, s W) + (b + sum over channel and kernel of W t)

    Exact up to the rounding of the new weights, where the convolution pads nothing: padding puts zeros after the
    normalisation, which are not the pixels -t / s. The chain may cross a Transpose; a Cast of uint8 pixels ends it,
    and then the convolution reads raw pixels 0 ... 255.

    Left alone: a convolution that pads or is not the first layer, constants that are not per channel, values that are
    read elsewhere. Returns the number of convolutions that took in a chain.
    """
    editor, count = Editor(model), 0
    for linear in editor.linears:
        if linear.kind != "conv" or linear.padded:
            continue
        chain = _chain(linear.input, linear.weight.shape[1])
        if not chain:
            continue
        scale, shift = _composed(chain, linear.weight.shape[1])
        weight = linear.weight.astype(np.float64)
        bias = np.zeros(len(weight)) if linear.bias is None else linear.bias
        bias = bias + np.einsum("oihw,i->o", weight, shift)
        editor.set_linear(linear, weight * scale[:, None, None], bias)
        for step in chain:
            bypass(step.node, step.value)
        count += 1
    if count:
        drop_unused(model)
    return count


def image_bounds(linear: Linear) -> tuple[Vector, Vector] | None:
    """The least and the largest value that each channel of a convolution's input can take, [channels] each.

    None if that input is anything but uint8 pixels, scaled and shifted by constants at most.
    """
    if linear.kind != "conv":
        return None
    channels = linear.weight.shape[1] * linear.groups
    chain = _chain(linear.input, channels)
    image = _image(chain[-1].value if chain else linear.input)
    if image is None or image.dtype != ir.DataType.UINT8:
        return None
    scale, shift = _composed(chain, channels)
    ends = shift, 255 * scale + shift
    return np.minimum(*ends), np.maximum(*ends)


def _composed(chain: Sequence[_Affine], channels: int) -> tuple[Vector, Vector]:
    """(scale, shift), [channels] each, of all steps, the nearest to the convolution first: scale (s x + t) + shift."""
    scale, shift = np.ones(channels), np.zeros(channels)
    for step in chain:
        scale, shift = scale * step.scale, shift + scale * step.shift
    return scale, shift


def _chain(value: ir.Value, channels: int) -> list[_Affine]:
    """The steps above `value` [batch, channels, height, width], nearest first."""
    axis, chain = 1, []
    while (node := value.producer()) is not None and only_user(value) is not None:
        if node.op_type == "Transpose" and node.inputs[0] is not None:
            axis = node.attributes.get_ints("perm", ())[axis] if "perm" in node.attributes else 3 - axis
            value = node.inputs[0]
            continue
        step = _affine(node, axis, channels)
        if step is None:
            break
        chain.append(step)
        value = step.value
    return chain if _image(value) is not None else []


def _image(value: ir.Value) -> ir.Value | None:
    """The input of the graph that `value` is, cast, moved and with its channels in another order at most."""
    while (node := value.producer()) is not None and (node.op_type == "Cast" or is_layout(node)):
        operand = node.inputs[0]
        assert operand is not None
        value = operand
    return value if value.is_graph_input() else None


def _affine(node: ir.Node, axis: int, channels: int) -> _Affine | None:
    if node.op_type not in ("Mul", "Div", "Add", "Sub"):
        return None
    left, right = node.inputs
    first, second = (_per_channel(value, axis, channels) for value in (left, right))
    one, zero = np.ones(channels), np.zeros(channels)
    if left is not None and first is None and second is not None:
        if node.op_type == "Mul":
            return _Affine(node, left, second, zero)
        if node.op_type == "Div":
            return _Affine(node, left, 1 / second, zero) if second.all() else None
        return _Affine(node, left, one, second if node.op_type == "Add" else -second)
    if right is not None and second is None and first is not None and node.op_type in ("Mul", "Add"):
        return _Affine(node, right, first, zero) if node.op_type == "Mul" else _Affine(node, right, one, first)
    return None


def _per_channel(value: ir.Value | None, axis: int, channels: int) -> Vector | None:
    """A constant that broadcasts to 4 axes and varies along `axis` alone, as [channels]."""
    array = floats_of(value)
    if array is None or array.ndim > 4:
        return None
    shape = (1,) * (4 - array.ndim) + array.shape
    if array.size not in (1, channels) or shape[axis] != array.size:
        return None
    return np.broadcast_to(array.astype(np.float64).ravel(), (channels,))


def takes_pixels(linear: Linear) -> bool:
    """The layer reads uint8 pixels, cast to float, moved, and with their channels in another order at most."""
    source: ir.Value | None = linear.input
    while source is not None and (move := source.producer()) is not None and move.op_type in MOVED:
        source = move.inputs[0]
    return source is not None and source.dtype == ir.DataType.UINT8
