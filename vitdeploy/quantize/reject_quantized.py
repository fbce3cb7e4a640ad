"""Graphs that are quantized already are not quantized again: theirs are not the ranges and weights of the model."""

from __future__ import annotations

import onnx_ir as ir

from vitdeploy.errors import GraphError

# In the names of all operators of quantization: QuantizeLinear, QLinearConv, MatMulInteger, MatMulNBits ...
PARTS = ("quantize", "qlinear", "integer", "nbits", "qattention", "qgemm")


def reject_quantized(model: ir.Model, source: str) -> None:
    """Raise GraphError where the graph holds operators of quantization, whoever wrote it."""
    counts: dict[str, int] = {}
    for node in model.graph:
        if any(part in node.op_type.lower() for part in PARTS):
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
    if counts:
        raise GraphError(
            f"{source} is quantized already",
            found=", ".join(f"{count} {operator}" for operator, count in sorted(counts.items())),
            wanted="the float graph that it was made from",
        )
