"""Layer normalisation as TensorFlow and Keras write it: one scale and one shift of x, both made of its moments.

x s + (beta - mean s) with s = gamma / sqrt(variance + epsilon), `tf.nn.batch_normalization`'s form. The same function
as gamma (x - mean) / sqrt(variance + epsilon) + beta (arXiv 1607.06450, equation 4), without its cancellation.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.canonical.layer_norm import FLOATS, OPSET, deviation_from_mean, mean_of, square_root
from vitdeploy.graph.edit import Names, replace
from vitdeploy.graph.values import array_of, only_user, operands, producer, scalar_of, stem, with_constant


def fuse_moments(model: ir.Model) -> int:
    """Replace every such normalisation over the last axis by LayerNormalization. Returns how many."""
    if model.graph.opset_imports.get("", 0) < OPSET:
        return 0
    roots = [node for node in model.graph if node.op_type == "Sqrt" and node.domain == ""]
    return sum(_fuse(model, root) for root in roots)


def _fuse(model: ir.Model, root: ir.Node) -> bool:
    shifted = with_constant(producer(root.inputs[0], "Add"), "Add")
    squared = mean_of(shifted[0]) if shifted is not None else None
    x = deviation_from_mean(square_root(squared)) if squared is not None else None
    width = x.shape[-1] if x is not None and x.shape is not None else None
    if shifted is None or x is None or x.dtype not in FLOATS or not isinstance(width, int):
        return False
    for reciprocal in _reciprocals(root.outputs[0]):
        for scale, gamma in ((reciprocal, None), *_scaled(reciprocal, width)):
            for result, beta in _results(x, scale, width):
                _replace(model, result, (x, gamma, beta), width, shifted[1])
                return True
    return False


def _reciprocals(root: ir.Value) -> list[ir.Value]:
    found = []
    for use in root.uses():
        divided = use.node.op_type == "Div" and use.idx == 1 and scalar_of(use.node.inputs[0]) == 1.0
        if use.node.op_type == "Reciprocal" or divided:
            found.append(use.node.outputs[0])
    return found


def _scaled(reciprocal: ir.Value, width: int) -> Iterator[tuple[ir.Value, ir.Value]]:
    """(product, gamma) of the reciprocal root and a constant per channel."""
    for use in reciprocal.uses():
        pair = operands(use.node, "Mul")
        if pair is not None and _per_channel(pair[1 - use.idx], width):
            yield use.node.outputs[0], pair[1 - use.idx]


def _results(x: ir.Value, scale: ir.Value, width: int) -> Iterator[tuple[ir.Node, ir.Value | None]]:
    """(last node, beta) of x scale + (beta - mean scale), or without beta."""
    for use in scale.uses():
        pair = operands(use.node, "Mul")
        product = use.node.outputs[0]
        last = only_user(product) if pair is not None and pair[1 - use.idx] is x else None
        if last is None:
            continue
        both = operands(last, last.op_type)
        if both is None or last.op_type not in ("Add", "Sub"):
            continue
        other = both[1] if both[0] is product else both[0]
        if last.op_type == "Sub":
            if both[0] is product and _is_shift(other, x, scale, negative=False):
                yield last, None
        elif _is_shift(other, x, scale, negative=True):
            yield last, None
        else:
            beta = _beta(other, x, scale, width)
            if beta is not None:
                yield last, beta


def _beta(value: ir.Value, x: ir.Value, scale: ir.Value, width: int) -> ir.Value | None:
    """The beta of beta + (-mean) scale, or of beta - mean scale."""
    for left, right in _sides(value, "Add"):
        if _per_channel(left, width) and _is_shift(right, x, scale, negative=True):
            return left
    pair = operands(producer(value, "Sub"), "Sub")
    if pair is not None and _per_channel(pair[0], width) and _is_shift(pair[1], x, scale, negative=False):
        return pair[0]
    return None


def _is_shift(value: ir.Value, x: ir.Value, scale: ir.Value, *, negative: bool) -> bool:
    """Whether it is mean(x) scale, or (-mean(x)) scale."""
    for left, right in _sides(value, "Mul"):
        negated = producer(left, "Neg")
        mean = negated.inputs[0] if negated is not None else left
        if right is scale and (negated is not None) == negative and mean_of(mean) is x:
            return True
    return False


def _sides(value: ir.Value, operator: str) -> tuple[tuple[ir.Value, ir.Value], ...]:
    pair = operands(producer(value, operator), operator)
    return () if pair is None else (pair, pair[::-1])


def _per_channel(value: ir.Value, width: int) -> bool:
    array = array_of(value)
    return array is not None and array.size == width and array.ndim <= 3 and array.shape[-1:] == (width,)


def _replace(
    model: ir.Model,
    last: ir.Node,
    operands_of: tuple[ir.Value, ir.Value | None, ir.Value | None],
    width: int,
    epsilon: float,
) -> None:
    (x, gamma, beta), names = operands_of, Names(model)
    scale = array_of(gamma)
    if scale is None:
        scale = np.ones(width, np.float32 if x.dtype is None else x.dtype.numpy())
    inputs = [x, names.constant(np.ascontiguousarray(scale.reshape(-1)), f"{stem(last)}.scale")]
    shift = array_of(beta)
    if shift is not None:
        inputs.append(names.constant(np.ascontiguousarray(shift.reshape(-1)), f"{stem(last)}.shift"))
    attributes = {"axis": -1, "epsilon": epsilon, "stash_type": 1}
    name = f"{stem(last)}/LayerNormalization"
    replace(model, last, [ir.node("LayerNormalization", inputs, attributes=attributes, name=name)])
