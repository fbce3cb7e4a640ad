"""Find the layers that quantization is about, linears and convolutions with constant weights, and what they are for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.values import floats_of

# Operators whose constant inputs of two axes or more are weights.
WEIGHTED = ("Conv", "ConvTranspose", "Einsum", "GRU", "Gemm", "LSTM", "MatMul", "RNN")
# What lies between a score and its rank: arithmetic on each score, or other layouts.
_ARITHMETIC = ("Add", "Sub", "Mul", "Div", "Sigmoid", "Softmax", "LogSoftmax", "ReduceMax", "Max", "Clip", "Cast")
_LAYOUT = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Split", "Gather", "Concat", "Identity")
# What lies between an offset or a box and the place that is sampled: also the choice of queries, and a logit.
_PLACING = (*_ARITHMETIC, *_LAYOUT, "Exp", "Expand", "GatherElements", "GatherND", "Log", "Neg", "Tanh", "Where")
# Which input of an operator says where it reads.
PLACES = {"GridSample": 1, "RoiAlign": 1}


@dataclass(frozen=True)
class Linear:
    """One linear (MatMul, with its bias Add where there is one) or one convolution.

    `weight` is [in, out] for "matmul" and [out, in, height, width] for "conv"; `out_axis` is its output-channel axis.
    `bias` is [out], from the Add or from the convolution; None without one.
    """

    name: str
    kind: Literal["matmul", "conv"]
    node: ir.Node
    input: ir.Value
    weight: npt.NDArray[np.float32]
    out_axis: int
    bias: npt.NDArray[np.float32] | None
    bias_add: ir.Node | None

    @property
    def output(self) -> ir.Value:
        return (self.bias_add or self.node).outputs[0]

    @property
    def groups(self) -> int:
        """The number of groups of a convolution; 1 for a linear."""
        return (self.node.attributes.get_int("group", 1) or 1) if self.kind == "conv" else 1

    @property
    def padded(self) -> bool:
        """Whether it is a convolution that reads zeros around its input."""
        attributes = self.node.attributes
        automatic = attributes.get_string("auto_pad", "NOTSET")
        padded = any(attributes.get_ints("pads", ()) or ()) if automatic == "NOTSET" else automatic != "VALID"
        return self.kind == "conv" and padded


def find_linears(model: ir.Model) -> list[Linear]:
    """All linears and convolutions of the main graph, in graph order."""
    found = []
    for node in model.graph:
        if node.op_type == "MatMul":
            weight = floats_of(node.inputs[1])
            if weight is not None and weight.ndim == 2 and node.inputs[0] is not None:
                product, width = node.outputs[0], weight.shape[1]
                bias_add = _bias_add(product, width)
                bias = _bias_of(bias_add, product, width) if bias_add is not None else None
                found.append(Linear(layer_name(node), "matmul", node, node.inputs[0], weight, 1, bias, bias_add))
        elif node.op_type == "Conv":
            weight = floats_of(node.inputs[1])
            if weight is not None and node.inputs[0] is not None and not _computed_bias(node):
                bias = floats_of(node.inputs[2]) if len(node.inputs) > 2 else None
                found.append(Linear(layer_name(node), "conv", node, node.inputs[0], weight, 0, bias, None))
    return found


def unplaced_weights(model: ir.Model) -> dict[str, str]:
    """Nodes that multiply by constant weights but are none of `find_linears`, by name, with the reason: what INT8 does
    not reach. Weights are floats with two axes or more."""
    known = {linear.node for linear in find_linears(model)}
    found = {}
    for node in model.graph.all_nodes():
        if node in known or node.domain != "" or node.op_type not in WEIGHTED:
            continue
        weights = [value for value in node.inputs if value is not None and _is_weight(value)]
        if weights:
            inside = node.graph is not model.graph
            found[layer_name(node)] = "it is in a branch or loop" if inside else _why(node, weights[0])
    return found


def _is_weight(value: ir.Value) -> bool:
    tensor = value.const_value
    return tensor is not None and tensor.dtype.is_floating_point() and len(tensor.shape) >= 2


def _why(node: ir.Node, weight: ir.Value) -> str:
    tensor = weight.const_value
    assert tensor is not None
    if node.op_type not in ("MatMul", "Conv"):
        return f"{node.op_type} is not quantized"
    if tensor.dtype != ir.DataType.FLOAT:
        return f"its weights are {tensor.dtype.name.lower()}, not float32"
    if node.inputs[1] is not weight:
        return "its weights are multiplied from the left"
    if node.op_type == "Conv" and _computed_bias(node):
        return "its bias is computed"
    return f"its weights have {len(tensor.shape)} axes"


def layer_name(node: ir.Node) -> str:
    """The module path that the exporter gave the node ("blocks.0.attn.qkv/MatMul"), or the node's own, unique name."""
    return str(node.name).removesuffix(f"/{node.op_type}")  # ".../MatMul_1" keeps its number: it tells two apart


def name_apart(model: ir.Model) -> None:
    """Rename nodes, whose names differ already, until their `layer_name` do too: a module may hold a product and a
    convolution, "m/MatMul" and "m/Conv"."""
    nodes = [node for node in model.graph if node.op_type in WEIGHTED]
    names, taken = {str(node.name) for node in model.graph}, set[str]()
    for node in nodes:
        name, count = str(node.name), 1
        while layer_name(node) in taken:
            count += 1
            if f"{name}_{count}" not in names:
                node.name = f"{name}_{count}"
        taken.add(layer_name(node))


def _computed_bias(conv: ir.Node) -> bool:
    return len(conv.inputs) > 2 and conv.inputs[2] is not None and floats_of(conv.inputs[2]) is None


def _bias_add(value: ir.Value, width: int) -> ir.Node | None:
    uses = list(value.uses())
    if value.is_graph_output() or len(uses) != 1 or uses[0].node.op_type != "Add":
        return None
    return uses[0].node if _bias_of(uses[0].node, value, width) is not None else None


def _bias_of(add: ir.Node, product: ir.Value, width: int) -> npt.NDArray[np.float32] | None:
    """Anything but [width] is no bias: more numbers than output channels would make more channels of one."""
    other = add.inputs[1] if add.inputs[0] is product else add.inputs[0]
    bias = floats_of(other)
    return bias if bias is not None and bias.shape == (width,) else None


def count_int8(model: ir.Model) -> int:
    """The number of linears and convolutions that a placement computes in INT8, in any form of placement; the input of
    a linear may be left to the runtime to quantize."""
    fused = sum(node.op_type == "MatMulIntegerToFloat" for node in model.graph)
    explicit = sum(
        (node.op_type == "MatMul" or (node.op_type == "Conv" and is_dequantized(node.inputs[0])))
        and is_dequantized(node.inputs[1])
        and not _is_int4(node.inputs[1])
        for node in model.graph
    )
    return fused + explicit


def count_int4(model: ir.Model) -> int:
    """The number of linears whose weights a placement has in INT4, in either form of placement."""
    explicit = sum(node.op_type == "MatMul" and _is_int4(node.inputs[1]) for node in model.graph)
    return explicit + sum(node.op_type == "MatMulNBits" for node in model.graph)


def _is_int4(value: ir.Value | None) -> bool:
    """Whether a DequantizeLinear makes `value` of constants of int4."""
    producer = value.producer() if value is not None else None
    codes = producer.inputs[0] if producer is not None and producer.op_type == "DequantizeLinear" else None
    return codes is not None and codes.const_value is not None and codes.const_value.dtype == ir.DataType.INT4


def is_dequantized(value: ir.Value | None) -> bool:
    """Whether a DequantizeLinear of any domain computes `value`."""
    producer = value.producer() if value is not None else None
    return producer is not None and producer.op_type == "DequantizeLinear"


def is_ranked(linear: Linear) -> bool:
    """Whether a TopK ranks a layer's output, with only elementwise arithmetic and layout operations in between."""
    return _reaches(linear.output, {"TopK": 0}, _ARITHMETIC + _LAYOUT)


def is_place(linear: Linear) -> bool:
    """Whether a layer's output says where features are sampled: offsets, and the boxes that become reference points."""
    return _reaches(linear.output, PLACES, _PLACING)


def _reaches(value: ir.Value, inputs: Mapping[str, int], through: Collection[str]) -> bool:
    """Whether `value` is that input of one of these operators, with only operators of `through` in between."""
    seen, waiting = set[ir.Node](), [value]
    while waiting:
        for node, index in waiting.pop().uses():
            if inputs.get(node.op_type) == index:
                return True
            if node.op_type in through and node not in seen:
                seen.add(node)
                waiting += node.outputs
    return False


def reads_image(linear: Linear) -> bool:
    """Whether a layer's input depends on the image: learned queries do not until they attend to it."""
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
