"""Find attention: softmax over the keys of a product of two computed tensors, then its product with the values.

    mix = softmax(f(Q K^T)) V          f: masks, position biases, factors that are equal along a row

Source: arXiv 1706.03762, equation 1. The form is MatMul, Softmax, MatMul, as exporters write it; how the three operands
come from linears is the business of `layout.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.analysis.layout import reshape_sizes
from vitdeploy.graph.values import floats_of, only_user


@dataclass(frozen=True)
class Attention:
    """The three nodes of one attention, and what lies between the first two.

    `scores` is MatMul(Q, K^T) [..., queries, keys], `softmax` is over its last axis, `mix` is MatMul(softmax, V).
    `between` are the nodes from the scores (first) to the softmax; nothing else reads their values. Each keeps a
    number that is added to a whole row of the scores a number that is added to a whole row, so that it has no effect.
    """

    scores: ir.Node
    between: tuple[ir.Node, ...]
    softmax: ir.Node
    mix: ir.Node

    @property
    def query(self) -> ir.Value:
        return _input(self.scores, 0)

    @property
    def key(self) -> ir.Value:
        """K^T: [..., channels, keys]."""
        return _input(self.scores, 1)

    @property
    def value(self) -> ir.Value:
        return _input(self.mix, 1)


def find_attentions(model: ir.Model) -> list[Attention]:
    """All attentions of the main graph, in graph order."""
    found = []
    for node in model.graph:
        if node.op_type == "Softmax" and over_last_axis(node):
            way = _to_scores(_input(node, 0))
            mixes = [use.node for use in node.outputs[0].uses() if use.node.op_type == "MatMul" and use.idx == 0]
            if way is not None and len(mixes) == 1:
                found.append(Attention(way[0], tuple(way[1:]), node, mixes[0]))
    return found


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    assert value is not None
    return value


def over_last_axis(node: ir.Node) -> bool:
    """Whether a Softmax runs over the last axis of its input."""
    axis, shape = node.attributes.get_int("axis", -1), node.outputs[0].shape or _input(node, 0).shape
    return axis == -1 or (shape is not None and axis == len(shape) - 1)


def _to_scores(value: ir.Value) -> list[ir.Node] | None:
    """The nodes from MatMul(Q, K^T) to `value`, in graph order; None if there is no such way."""
    node = value.producer()
    if node is None or only_user(value) is None:
        return None
    if node.op_type == "MatMul":
        return [node] if floats_of(node.inputs[1]) is None else None
    for operand in _row_operands(node):
        way = _to_scores(operand)
        if way is not None:
            return [*way, node]
    return None


def _row_operands(node: ir.Node) -> list[ir.Value]:
    """The inputs to which a number could be added along a row, with the same effect as adding one to the output."""
    inputs = [value for value in node.inputs if value is not None]
    if node.op_type == "Add":
        return [value for value in inputs if floats_of(value) is None]
    if node.op_type in ("Mul", "Div"):
        [left, right] = inputs
        if _equal_along_rows(right):
            return [left]
        return [right] if node.op_type == "Mul" and _equal_along_rows(left) else []
    if node.op_type == "Where":
        [_, kept, other] = inputs
        return [kept] if _minus_infinity(other) else [other] if _minus_infinity(kept) else []
    if node.op_type == "Reshape":
        [before, _] = inputs
        sizes, shape = reshape_sizes(node), before.shape
        return [before] if sizes and shape is not None and isinstance(shape[-1], int) and sizes[-1] == shape[-1] else []
    return []


def _minus_infinity(value: ir.Value) -> bool:
    """The value that a boolean mask substitutes for a score; a finite one would not follow a shift of its row."""
    array = floats_of(value)
    return array is not None and bool(np.isneginf(array).all())


def _equal_along_rows(value: ir.Value) -> bool:
    array = floats_of(value)
    return array is not None and (array.ndim == 0 or array.shape[-1] == 1)
