"""How an output of somebody else's graph ends: in probabilities, in what only embeddings end in, or in logits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.edit import Names
from vitdeploy.graph.io.meanings import Ending
from vitdeploy.graph.values import array_of, producer

# Nodes that keep all numbers of a row; those that keep or average some of them.
_VIEWS = ("Identity", "Cast", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Dropout")
_PARTS = (*_VIEWS, "Gather", "Slice", "Transpose", "ReduceMean", "GlobalAveragePool")
_SIGMOIDS = ("Sigmoid", "HardSigmoid")
_NORMS = ("LayerNormalization", "BatchNormalization", "LpNormalization", "RMSNormalization", "Tanh")
_LENGTHS = ("ReduceL2", "Sqrt", "ReduceSumSquare")
_DEPTH = 12


def ending_of(output: ir.Value) -> Ending:
    """Of an output [batch, width]."""
    if _row_sum(output) == 1:
        return "softmax"
    node, views = _below(output, _VIEWS)
    if node is None:
        return ""
    if node.op_type in _SIGMOIDS or _is_logistic(node) or (node.op_type == "Softmax" and views):
        return "sigmoid"
    if node.op_type == "LogSoftmax":
        return "log"
    unbiased = node.op_type == "MatMul" or (node.op_type == "Gemm" and len(node.inputs) < 3)
    node, _ = _below(output, _PARTS)
    return "vector" if unbiased or (node is not None and _is_normalised(node)) else ""


def as_logits(model: ir.Model, output: ir.Value) -> tuple[ir.Value, Literal["softmax", "sigmoid"] | None]:
    """The output without the softmax or the sigmoid at its end, and which of them there was; in place.

    Of probabilities that end in neither, as a mean of softmaxes, the logarithm: a softmax of it gives them back.
    """
    value: ir.Value | None = output
    reader: ir.Node | None = None
    while value is not None and (node := value.producer()) is not None:
        if (source := _before_scores(node)) is not None:
            if reader is None:
                source.type, source.shape = output.type, output.shape
                output = source
            else:
                reader.replace_input_with(0, source)
            return output, "sigmoid" if node.op_type == "Sigmoid" else "softmax"
        if node.op_type not in _VIEWS:
            break
        value, reader = node.inputs[0], node
    if _row_sum(output) != 1:
        return output, None
    names = Names(model)
    least = names.constant(np.array(np.finfo(np.float32).tiny), "scores.least")
    nodes = [names.node("Max", [output, least], "scores/Max")]
    nodes.append(names.node("Log", [nodes[0].outputs[0]], "scores/Log"))
    for node in nodes:
        node.outputs[0].type, node.outputs[0].shape = output.type, output.shape
    model.graph.extend(nodes)
    return nodes[-1].outputs[0], "softmax"


def computed_of(output: ir.Value, kept: ir.Value) -> bool:
    """Whether an output only restates another one: its softmax, its best classes."""
    above = {kept, *_chain(kept, (*_VIEWS, "Softmax"))}
    steps = (*_VIEWS, "Softmax", "Sigmoid", "ArgMax", "TopK", "Gather")
    return any(value in above for value in (output, *_chain(output, steps)))


def _chain(value: ir.Value, operators: tuple[str, ...]) -> Iterator[ir.Value]:
    node = value.producer()
    while node is not None and node.op_type in operators and node.inputs and node.inputs[0] is not None:
        yield node.inputs[0]
        node = node.inputs[0].producer()


def _below(value: ir.Value | None, operators: tuple[str, ...]) -> tuple[ir.Node | None, bool]:
    """The node that computes a value, below nodes of these operators; and whether these change the shape of rows."""
    node, reshaped = value.producer() if value is not None else None, False
    while node is not None and node.op_type in operators and node.inputs and node.inputs[0] is not None:
        reshaped |= node.op_type in ("Reshape", "Flatten")
        node = node.inputs[0].producer()
    return (None if node is None or node.domain != "" else node), reshaped


def _before_scores(node: ir.Node) -> ir.Value | None:
    """The logits that a node makes scores of, also where an exporter writes a softmax out; None if it makes none."""
    if node.op_type in ("Softmax", "Sigmoid"):
        return node.inputs[0]
    exponential = producer(node.inputs[0], "Exp") if _is_share(node) else None
    return exponential.inputs[0] if exponential is not None else None


def _is_share(node: ir.Node) -> bool:
    """Whether it is x / ReduceSum(x)."""
    total = producer(node.inputs[1], "ReduceSum") if node.op_type == "Div" else None
    return total is not None and total.inputs[0] is node.inputs[0]


def _row_sum(value: ir.Value | None, depth: int = _DEPTH) -> float:
    """What the numbers of a row add up to as its nodes show it, of numbers that are all positive; NaN where unknown."""
    node, reshaped = _below(value, _VIEWS)
    if node is None or not depth:
        return math.nan
    if node.op_type == "Softmax" or _is_share(node):
        parts = reshaped and node.op_type == "Softmax" and node.attributes.get_int("axis", -1) == -1
        return math.nan if parts else 1.0
    sums = [_row_sum(each, depth - 1) for each in node.inputs if each is not None and _number(each) is None]
    numbers = [number for each in node.inputs if (number := _number(each)) is not None]
    if node.op_type in ("Add", "Sum", "Mean") and not numbers:
        return round(math.fsum(sums) / (len(sums) if node.op_type == "Mean" else 1), 6)
    if node.op_type in ("Mul", "Div") and len(sums) == len(numbers) == 1 and numbers[0].size == 1:
        factor = float(numbers[0].item())
        return round(sums[0] * factor if node.op_type == "Mul" else sums[0] / factor, 6)
    if node.op_type == "ReduceMean":  # of several crops or models, whose rows stay rows
        return sums[0]
    return 1.0 if node.op_type == "Concat" and _is_complement(*node.inputs) else math.nan


def _is_complement(*parts: ir.Value | None) -> bool:
    """Whether two parts are p and 1 - p of a sigmoid p."""
    for p, other in (parts, parts[::-1]) if len(parts) == 2 else ():
        node = producer(other, "Sub")
        one = _number(node.inputs[0]) if node is not None and node.inputs[1] is p else None
        if one is not None and np.all(one == 1) and (below := _below(p, _VIEWS)[0]) is not None:
            return below.op_type == "Sigmoid"
    return False


def _is_logistic(node: ir.Node) -> bool:
    """Whether it is 1 / (1 + Exp(-x))."""
    below = node.inputs[-1] if node.op_type in ("Div", "Reciprocal") else None
    total = producer(below, "Add")
    return total is not None and any(producer(each, "Exp") is not None for each in total.inputs)


def _is_normalised(node: ir.Node) -> bool:
    """Whether a node divides by a length or a deviation, at most followed by a scale and a shift."""
    for operator in ("Add", "Mul"):
        if node.op_type == operator and any(_number(each) is not None for each in node.inputs):
            above = next((each for each in node.inputs if _number(each) is None), None)
            below = above.producer() if above is not None else None
            if below is None or below.op_type not in ("Mul", "Div", *_NORMS):
                return False
            node = below
    if node.op_type in _NORMS:
        return True
    divided = node.inputs[1:] if node.op_type == "Div" else node.inputs if node.op_type == "Mul" else ()
    steps = ("Max", "Clip", "Add", "Expand", "Reciprocal", "Unsqueeze", "Pow", "Identity", "Cast")
    lengths = (_below(each, steps)[0] for each in divided)
    return any(each is not None and each.op_type in _LENGTHS for each in lengths)


def _number(value: ir.Value | None) -> np.ndarray | None:
    """The value of a constant, also of a Constant node: nothing has lifted them yet."""
    node = producer(value, "Constant")
    tensor = node.attributes.get("value") if node is not None else None
    return array_of(value, overridable=True) if tensor is None else tensor.as_tensor().numpy()
