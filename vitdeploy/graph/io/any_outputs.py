"""Whatever outputs a graph has, for the task of last resort."""

from __future__ import annotations

import onnx_ir as ir

from vitdeploy.graph.io.output_row import Found, GraphOutputs, Values
from vitdeploy.spec import TensorsSpec

FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
INPUT = "image"
OTHERS = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.BOOL)


def _tensors(outputs: Values, asked: bool) -> Found | None:
    """All of them, by their own names, where each is of numbers and has an axis for the batch."""
    for value in outputs.values():
        if value.dtype not in (*FLOATS, *OTHERS) or value.shape is None or not len(value.shape):
            return None
    own = {INPUT + "_" if value.name == INPUT else str(value.name): value for value in outputs.values()}
    return own, TensorsSpec(tuple(name for name, value in own.items() if value.dtype in OTHERS))


ROW = GraphOutputs("tensors", _tensors, "any numbers [batch, ...] (--task tensors)")
