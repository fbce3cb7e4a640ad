"""A graph with types of half precision as a float32 graph that rounds and overflows where the half would.

Half-precision *storage* with float32 accumulation: kernels compute in float32, and every tensor that is typed half goes
through a Cast to half and back. ONNX Runtime keeps that pair (OpenVINO removes it), so that infinities, lost small
numbers and roundings are those of the types. How a GPU adds up inside one operation is not emulated.

Where a product takes two dequantized tensors, a GPU multiplies the integers and scales their exact sum; what
DequantizeLinear gives there is not rounded.
"""

from __future__ import annotations

import onnx_ir as ir

from vitdeploy.graph.analysis.layout import is_layout
from vitdeploy.graph.analysis.linears import is_dequantized
from vitdeploy.graph.edit import Names

HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# What gives its input's numbers, or a choice of its inputs' numbers, and so rounds nothing.
_SELECTS = ("Cast", "Concat", "Expand", "Identity", "Max", "MaxPool", "Min", "ReduceMax", "Relu", "Where")


def emulate(model: ir.Model) -> ir.Model:
    """A copy in float32 that gives the same numbers as the typed graph, but for the rounding inside of operations."""
    copy = model.clone()
    names = Names(copy)
    for value in list(copy.graph.initializers.values()):
        if value.dtype in HALVES:
            _widen(copy, value, names)
    typed = {value for node in copy.graph for value in node.outputs if value.dtype in HALVES}
    kinds = {value: value.dtype for value in typed}
    for value in typed:
        value.type = ir.TensorType(ir.DataType.FLOAT)
    for node in list(copy.graph):
        halves = [value for value in node.outputs if value in typed]
        if node.op_type == "Cast" and halves:
            node.attributes["to"] = ir.AttrInt64("to", int(ir.DataType.FLOAT))
        # A Cast rounds what comes in float32; one of pixels, or of what is in half already, rounds nothing twice.
        rounds = not is_layout(node) and (node.op_type not in _SELECTS or node.op_type == "Cast")
        if rounds and not _into_integer_product(node):
            for value in halves:
                _round(node, value, kinds[value], names)
    return copy


def _widen(model: ir.Model, constant: ir.Value, names: Names) -> None:
    """Let everything that reads `constant` read it in float32: by a Cast, so that weights keep their size."""
    readers = list(constant.uses())
    cast = names.node("Cast", [constant], f"{constant.name}/float32", {"to": int(ir.DataType.FLOAT)})
    cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), constant.shape
    model.graph.insert_before(model.graph[0], cast)
    for reader, index in readers:
        reader.replace_input_with(index, cast.outputs[0])


def _round(node: ir.Node, value: ir.Value, kind: ir.DataType | None, names: Names) -> None:
    """Let everything that reads `value` read it rounded to `kind`."""
    assert kind is not None
    readers = list(value.uses())
    down = names.node("Cast", [value], f"{value.name}/round", {"to": int(kind)})
    up = names.node("Cast", [down.outputs[0]], f"{value.name}/rounded", {"to": int(ir.DataType.FLOAT)})
    for made, dtype in ((down, kind), (up, ir.DataType.FLOAT)):
        made.outputs[0].type, made.outputs[0].shape = ir.TensorType(dtype), value.shape
    node.append([down, up])
    for reader, index in readers:
        reader.replace_input_with(index, up.outputs[0])


def _into_integer_product(node: ir.Node) -> bool:
    """A DequantizeLinear whose output is read only by matrix products with another one."""
    readers = [use.node for use in node.outputs[0].uses()]
    return node.op_type == "DequantizeLinear" and all(
        reader.op_type in ("MatMul", "Conv", "Gemm") and all(is_dequantized(value) for value in reader.inputs[:2])
        for reader in readers
    )
