"""Graphs in float16 or bfloat16, computed in float32: which precision an engine has is chosen later, by measurement."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

HALF = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# Attributes that name the type of what a node makes.
TYPES = ("to", "dtype", "output_dtype")
# The constants of GELU (arXiv 1606.08415): as float16 they would keep three digits, and GELU would be none.
EXACT = (math.sqrt(2), math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715, math.sqrt(2 / math.pi) * 0.044715)


def widened(model: ir.Model) -> list[str]:
    """Let weights, casts, inputs and outputs in half precision be float32, in place; the weights' values stay.

    The graph then computes what the file's weights mean, without the rounding of each of its steps. Returns a note on
    it, or none where nothing is in half precision.
    """
    counts = Counter[str]()
    for graph in (model.graph, *_subgraphs(model)):
        for value in graph.initializers.values():
            tensor = value.const_value
            if tensor is not None and tensor.dtype in HALF:
                counts[tensor.dtype.name.lower()] += 1
                value.const_value = ir.tensor(_float32(tensor), name=value.name)
                value.type = ir.TensorType(ir.DataType.FLOAT)
        for value in (*graph.inputs, *graph.outputs):
            _widen_value(value)
    for node in model.graph.all_nodes():
        counts.update(_widen_node(node))
        for value in node.outputs:
            _widen_value(value)
    if not counts:
        return []
    [(name, _)] = counts.most_common(1)
    return [f"the graph is in {name}: it is computed in float32, with the same weights"]


def _widen_value(value: ir.Value) -> None:
    if value.dtype in HALF:
        value.type = ir.TensorType(ir.DataType.FLOAT)


def _widen_node(node: ir.Node) -> list[str]:
    """The half precision of tensors in attributes, and of the type that Cast, EyeLike and others make."""
    found = []
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and (tensor := attribute.as_tensor()).dtype in HALF:
            found.append(tensor.dtype.name.lower())
            node.attributes[name] = ir.AttrTensor(name, ir.tensor(_float32(tensor)))
        elif name in TYPES and attribute.type == ir.AttributeType.INT and attribute.as_int() in map(int, HALF):
            found.append(ir.DataType(attribute.as_int()).name.lower())
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))
    return found


def _float32(tensor: ir.TensorProtocol) -> npt.NDArray[np.float32]:
    """The values; those constants that a single number is the rounding of, as they were before it."""
    array = tensor.numpy()
    if array.size == 1:
        for constant in EXACT:
            if array.item() == np.array(constant).astype(array.dtype).item():
                return np.full(array.shape, constant, np.float32)
    return array.astype(np.float32)


def _subgraphs(model: ir.Model) -> list[ir.Graph]:
    return [graph for graph in model.graphs() if graph is not model.graph]
