"""The least work of a graph (MACs and bytes moved), counted from its nodes and shapes, as a reference for latencies.

Counted are the MACs of MatMul, Gemm, convolutions and attention. A MAC is two operations (FLOPs), as in the roofline
model (Williams, Waterman and Patterson 2009), whatever its type. Norms, softmax, activations and sums are not counted:
they are a percent or two of a ViT's operations. What cannot be counted exactly is an error: a wrong count is worse than
none.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.linears import Linear
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.values import weight_bytes

# The position of the second operand.
MATMULS = {"MatMul": 1, "MatMulInteger": 1, "QLinearMatMul": 3, "MatMulIntegerToFloat": 1}
# Rows are quantized to INT8 by the kernel, whose products are those of INT8.
GROUPED = "MatMulNBits"
CONVOLUTIONS = {"Conv": 1, "ConvInteger": 1, "QLinearConv": 3}
INTEGER = {"MatMulInteger", "QLinearMatMul", "MatMulIntegerToFloat", "ConvInteger", "QLinearConv"}
# Operators of ONNX with MACs, or with graphs, inside that are not counted.
UNCOUNTED = {"Attention", "DeformConv", "Einsum", "GRU", "If", "LSTM", "Loop", "RNN", "Scan", "SequenceMap"}
STANDARD = ("", "ai.onnx")
OURS = {("com.microsoft", kind) for kind in ("MatMulIntegerToFloat", "MultiHeadAttention", GROUPED)}
STORED = {
    ir.DataType.INT8: "int8",
    ir.DataType.UINT8: "int8",
    ir.DataType.FLOAT8E4M3FN: "fp8",
    ir.DataType.INT4: "int4",
}
FLOATS = {ir.DataType.FLOAT: "fp32", ir.DataType.FLOAT16: "fp16", ir.DataType.BFLOAT16: "bf16"}


@dataclass(frozen=True)
class Work:
    """The work of one query of `batch` images.

    `flops` by the precision that MACs are placed in: "int8" by weights in INT8 or INT4 (also as Q/DQ), else the type of
    their result. Bytes are those that have to be read or written at least once: weights and constants as they are
    stored in the graph, inputs, outputs. What flows between layers is not in them: it may stay in a cache.
    """

    batch: int
    flops: dict[str, int]
    weight_bytes: int
    input_bytes: int
    output_bytes: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.input_bytes + self.output_bytes


def count_work(model: ir.Model, batch: int) -> Work:
    """The work of `model` at a batch, which its free leading axis gets; shapes that it lacks are inferred, in place.

    Raises:
        GraphError: a size depends on more than the batch, or an operator with MACs is none of the known ones.
    """
    flops = _try(model, batch)
    if flops is None:
        Inference(model)
        flops = _try(model, batch)
    sides = [sum(_nbytes(model, value, batch) for value in side) for side in (model.graph.inputs, model.graph.outputs)]
    if flops is None:
        raise GraphError("the graph's operations cannot be counted", found="sizes that depend on more than the batch")
    return Work(batch, dict(sorted(flops.items())), weight_bytes(model), *sides)


def layer_macs(model: ir.Model, linear: Linear) -> int | None:
    """The MACs of a layer, at batch 1 if the batch is free; None if the size of its output depends on more than
    that."""
    try:
        count = math.prod(_Sizes(model, 1)(linear.output))
    except UnknownSize:
        return None
    return count * linear.weight.size // linear.weight.shape[linear.out_axis]


def node_macs(model: ir.Model, node: ir.Node) -> int | None:
    """The same of any MatMul or Conv, also of two computed tensors; 0 for other operations."""
    if node.domain or node.op_type not in ("MatMul", "Conv"):
        return 0
    try:
        return macs_of(node, _Sizes(model, 1))
    except UnknownSize:
        return None


def _try(model: ir.Model, batch: int) -> Counter[str] | None:
    """FLOPs by precision; None if a size is not known."""
    sizes, found = _Sizes(model, batch), Counter[str]()
    for node in model.graph:
        domain = "" if node.domain in STANDARD else node.domain
        if (domain and (domain, node.op_type) not in OURS) or (not domain and node.op_type in UNCOUNTED):
            raise GraphError("the graph's operations cannot be counted", found=f"{node.op_type} {node.name}")
        try:
            macs = macs_of(node, sizes)
        except UnknownSize:
            return None
        if macs:
            found[_precision(node)] += 2 * macs
    return found


class UnknownSize(Exception):
    """A size is not known."""


class _Sizes:
    """The sizes of values as numbers, with the free batch axis of the first input set to a number."""

    def __init__(self, model: ir.Model, batch: int) -> None:
        shape = model.graph.inputs[0].shape if model.graph.inputs else None
        first = shape[0] if shape is not None and len(shape) else None
        self._free = {str(first.value): batch} if isinstance(first, ir.SymbolicDim) and first.value else {}

    def __call__(self, value: ir.Value | None) -> list[int]:
        """
        Raises:
            UnknownSize: of at least one axis.
        """
        if value is None:
            raise UnknownSize
        if value.shape is not None:
            return [size if isinstance(size, int) else self._number(size) for size in value.shape]
        if value.const_value is not None:
            return [int(size) for size in value.const_value.shape.numpy()]
        raise UnknownSize

    def _number(self, size: ir.SymbolicDim) -> int:
        """The number in a product as shape inference writes it: "4*batch"."""
        factors = str(size.value).replace(" ", "").split("*")
        if not all(factor.isdecimal() or factor in self._free for factor in factors):
            raise UnknownSize
        return math.prod(self._free[factor] if factor in self._free else int(factor) for factor in factors)


def macs_of(node: ir.Node, sizes: Callable[[ir.Value | None], list[int]]) -> int:
    """The number of MACs of a node; 0 of one that is not counted here.

    `sizes` raises UnknownSize for a value of unknown shape.
    """
    kind, inputs = node.op_type, node.inputs
    if kind in MATMULS:
        return math.prod(sizes(node.outputs[0])) * (sizes(inputs[MATMULS[kind]])[-2:])[0]
    if kind == GROUPED:
        return math.prod(sizes(node.outputs[0])) * (node.attributes.get_int("K", 0) or 0)
    if kind == "Gemm":
        return math.prod(sizes(node.outputs[0])) * sizes(inputs[0])[0 if node.attributes.get_int("transA", 0) else 1]
    if kind in CONVOLUTIONS:
        return math.prod(sizes(node.outputs[0])) * math.prod(sizes(inputs[CONVOLUTIONS[kind]])[1:])
    if kind == "ConvTranspose":
        return math.prod(sizes(inputs[0])) * math.prod(sizes(inputs[1])[1:])
    if kind == "MultiHeadAttention":
        (batch, rows, width), (_, keys, _), (_, _, out) = (sizes(each) for each in _query_key_value(node))
        return batch * rows * keys * (width + out)
    return 0


def _query_key_value(node: ir.Node) -> list[ir.Value | None]:
    """
    Raises:
        UnknownSize: they come in another form than as three tensors [batch, tokens, heads * channels].
    """
    found = list(node.inputs[:3])
    if len(found) < 3 or any(value is None or value.shape is None or len(value.shape) != 3 for value in found):
        raise UnknownSize
    return found


def _precision(node: ir.Node) -> str:
    stored = [_stored(value) for value in node.inputs[:2]]
    # A float input of weights in INT8 or INT4 is quantized by the runtime.
    if node.op_type in INTEGER or node.op_type == GROUPED or stored[1:] in (["int8"], ["int4"]):
        return "int8"
    if stored[0] is not None and stored[0] == stored[1]:
        return stored[0]
    dtype = node.outputs[0].dtype or next((value.dtype for value in node.inputs if value is not None), None)
    return FLOATS.get(dtype, dtype.name.lower()) if dtype is not None else "fp32"


def _stored(value: ir.Value | None) -> str | None:
    """The precision that a value is stored in before DequantizeLinear makes floats of it; None if nothing does."""
    producer = value.producer() if value is not None else None
    if producer is None or producer.op_type != "DequantizeLinear" or producer.inputs[0] is None:
        return None
    source = producer.inputs[0]
    dtype = source.const_value.dtype if source.const_value is not None else source.dtype
    if dtype is None:  # of QuantizeLinear: that of its zero point
        before = source.producer()
        zero = before.inputs[2] if before is not None and len(before.inputs) > 2 else None
        dtype = zero.dtype if zero is not None else ir.DataType.UINT8
    return STORED.get(dtype) if dtype is not None else "int8"


def _nbytes(model: ir.Model, value: ir.Value, batch: int) -> int:
    """
    Raises:
        GraphError: its size depends on more than the batch.
    """
    try:
        return math.ceil(math.prod(_Sizes(model, batch)(value)) * (value.dtype.itemsize if value.dtype else 0))
    except UnknownSize:
        raise GraphError("the graph's bytes cannot be counted", found=f"{value.name}: {value.shape}") from None
