"""What a layer is to its model: how much it computes, whether of the image, and whether its outputs are ranked."""

from __future__ import annotations

import math

import onnx_ir as ir

from vitdeploy.graph.linears import Linear

# What lies between a score and its rank: arithmetic on each score, or other layouts.
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Sigmoid", "Softmax", "LogSoftmax", "ReduceMax", "Max", "Clip", "Cast")
_LAYOUT = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split", "Gather", "Concat", "Identity")


def layer_macs(model: ir.Model, linear: Linear) -> int | None:
    """How many MACs a layer takes, at batch 1 where the batch is free; None where the size of its
    output depends on more than that."""
    count = _elements(model, linear.output)
    return None if count is None else count * linear.weight.size // linear.weight.shape[linear.out_axis]


def node_macs(model: ir.Model, node: ir.Node) -> int | None:
    """The same of any MatMul or Conv, also of two computed tensors; 0 for other operations."""
    if node.domain or node.op_type not in ("MatMul", "Conv"):
        return 0
    right, count = node.inputs[1], _elements(model, node.outputs[0])
    shape = list(right.shape) if right is not None and right.shape is not None else []
    summed = shape[1:] if node.op_type == "Conv" else shape[-2:-1] or shape
    if count is None or not summed or not all(isinstance(size, int) for size in summed):
        return None
    return count * math.prod(size for size in summed if isinstance(size, int))


def _elements(model: ir.Model, value: ir.Value) -> int | None:
    """How many numbers a tensor holds for one image."""
    batch = model.graph.inputs[0].shape
    free = batch[0].value if batch is not None and len(batch) and isinstance(batch[0], ir.SymbolicDim) else None
    if value.shape is None:
        return None
    factors = [each for size in value.shape for each in _factors(size) if each != free]
    return math.prod(map(int, factors)) if all(each.isdecimal() for each in factors) else None


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


def reads_image(linear: Linear) -> bool:
    """Whether what a layer reads depends on what an image shows: learned queries do not before they see one."""
    seen, waiting = set[ir.Value](), [linear.input]
    while waiting:
        value = waiting.pop()
        if value.is_graph_input():
            return True
        node = value.producer()
        if value not in seen and node is not None and node.op_type != "Shape":
            waiting += [each for each in node.inputs if each is not None]
        seen.add(value)
    return False
