"""What a layer is to its model: how much it computes, and whether its outputs are ranked."""

from __future__ import annotations

import math

import onnx_ir as ir

from vitdeploy.graph.linears import Linear

# What lies between a score and its rank: arithmetic on each score, or other layouts.
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Sigmoid", "Softmax", "LogSoftmax", "ReduceMax", "Max", "Clip", "Cast")
_LAYOUT = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split", "Gather", "Concat", "Identity")


def multiplications(model: ir.Model, linear: Linear) -> int | None:
    """How many products of two numbers a layer sums up, at batch 1 where the batch is free; None where the size of its
    output depends on more than that."""
    batch = model.graph.inputs[0].shape
    free = batch[0].value if batch is not None and len(batch) and isinstance(batch[0], ir.SymbolicDim) else None
    if linear.output.shape is None:
        return None
    factors = [each for size in linear.output.shape for each in _factors(size) if each != free]
    if not all(each.isdecimal() for each in factors):
        return None
    return math.prod(map(int, factors)) * linear.weight.size // linear.weight.shape[linear.out_axis]


def _factors(size: int | ir.SymbolicDim) -> list[str]:
    """Of a product as shape inference writes it: "4*batch"."""
    return str(size if isinstance(size, int) else size.value).replace(" ", "").split("*")


def is_ranked(linear: Linear) -> bool:
    """Whether a TopK ranks what a layer computes, with nothing but arithmetic on each score and layout between."""
    seen, waiting = set[ir.Node](), [linear.output]
    while waiting:
        for node, index in waiting.pop().uses():
            if node.op_type == "TopK" and index == 0:
                return True
            if node.op_type in _ARITHMETIC + _LAYOUT and node not in seen:
                seen.add(node)
                waiting += node.outputs
    return False
