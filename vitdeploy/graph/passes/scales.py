"""Factors behind or between linears go into their weights: LayerScale, and the 1 / sqrt(d) of attention."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.analysis.attention import Attention, find_attentions
from vitdeploy.graph.analysis.layout import exclusive, is_layout, leaves, origin, scaled_input, static_shape
from vitdeploy.graph.edit import Editor, bypass, drop_unused
from vitdeploy.graph.values import floats_of, only_user


def fold_layer_scale(model: ir.Model) -> int:
    """gamma * (x W + b) = x (W diag(gamma)) + gamma b, for a constant gamma of one number a channel.

    Exact up to the rounding of the new weights. Left alone: a gamma that is not per channel of the last axis, a linear
    whose own output is read elsewhere or leaves the graph.
    Source of LayerScale: arXiv 2103.17239, section 2.1. Returns the number of Mul nodes that went.
    """
    editor, count = Editor(model), 0
    for linear in editor.linears:
        node = only_user(linear.output)
        if linear.kind != "matmul" or node is None or node.op_type != "Mul" or node.outputs[0].is_graph_output():
            continue
        side = 0 if node.inputs[0] is linear.output else 1
        gamma = floats_of(node.inputs[1 - side])
        width = linear.weight.shape[1]
        if gamma is None or gamma.size != width or gamma.shape[-1] != width:
            continue
        bias = None if linear.bias is None else linear.bias * gamma.ravel()
        folded = editor.set_linear(linear, linear.weight * gamma.ravel(), bias)
        bypass(node, folded.output)
        count += 1
    if count:
        drop_unused(model)
    return count


def fold_attention_scale(model: ir.Model) -> int:
    """Fold scalar factors of the query, the key or the scores into the linear (or the norm) that made query or key.

        (s q) k^T = q (s k)^T = s (q k^T)        and s (x W + b) = x (s W) + s b

    Exact up to the rounding of the new weights, and bit-exact where s is a power of two (head widths 4, 16, 64, 256).
    Of a merged linear only the columns of the query change. With a LayerNormalization between linear and product
    (qk-norm), its gain and bias take the factor.

    Left alone: a factor that is computed or not a scalar; columns that something else reads too; queries that reach
    the product through anything but layout (rotary positions); factors after a mask was added; scores that leave the
    graph. Returns the number of Mul and Div nodes that went.
    """
    editor, count = Editor(model), 0
    for attention in find_attentions(model):
        while _fold_one(editor, attention):
            count += 1
    if count:
        drop_unused(model)
    return count


def _fold_one(editor: Editor, attention: Attention) -> bool:
    for node, takers in _factors(attention):
        found = scaled_input(node)
        if found is not None and any(_absorb(editor, *taker, found[1]) for taker in takers):
            still = scaled_input(node)  # an all-zero bias may have taken its Add away
            assert still is not None
            bypass(node, still[0])
            return True
    return False


def _factors(attention: Attention) -> Iterator[tuple[ir.Node, list[tuple[ir.Value, ir.Node]]]]:
    """Each node with a scalar factor, and the (operand, reader) pairs that could take it instead."""
    operands = [(attention.query, attention.scores), (attention.key, attention.scores)]
    for operand, _ in operands:
        value: ir.Value | None = operand
        while value is not None and (node := value.producer()) is not None:
            found = scaled_input(node)
            if found is not None and not node.outputs[0].is_graph_output():
                yield node, [(found[0], node)]
            if found is None and not is_layout(node):
                break
            value = found[0] if found is not None else node.inputs[0]
    node = attention.scores
    while len(uses := list(node.outputs[0].uses())) == 1 and scaled_input(node := uses[0].node) is not None:
        yield node, operands


def _absorb(editor: Editor, operand: ir.Value, reader: ir.Node, factor: float) -> bool:
    """Multiply the columns that `reader` reads as `operand` by `factor`, in the weights that made them."""
    source = origin(operand)
    found, shape = leaves(source), static_shape(source)
    if found is None or not shape:
        return False
    columns = exclusive(found, operand, reader, shape[-1])
    if columns is None:
        return False
    factors = np.ones(shape[-1])
    factors[columns] = factor
    if (linear := editor.linear_behind(source)) is not None:
        bias = None if linear.bias is None else linear.bias * factors
        editor.set_linear(linear, linear.weight * factors, bias)
        return True
    return _absorb_into_norm(editor, source.producer(), factors)


def _absorb_into_norm(editor: Editor, norm: ir.Node | None, factors: np.ndarray) -> bool:
    if norm is None or norm.op_type != "LayerNormalization":
        return False
    gain_and_bias = [floats_of(value) for value in norm.inputs[1:]]
    if not all(array is not None and array.shape == factors.shape for array in gain_and_bias):
        return False
    for index, array in enumerate(gain_and_bias, start=1):
        assert array is not None
        editor.set_input(norm, index, (array * factors).astype(np.float32))
    return True
