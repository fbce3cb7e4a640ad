"""Tables of embeddings in INT8, with a scale for each row: in a text tower or a decoder they are most of the bytes.

A token reads one row, so this saves no time; the row is made float again right behind the Gather.
"""

from __future__ import annotations

import onnx_ir as ir

from vitdeploy.graph.analysis.rows import layer_name
from vitdeploy.graph.edit import Names, replace
from vitdeploy.graph.values import floats_of, is_constant
from vitdeploy.quantization.ranges import quantize_weight

# Smaller tables take up no room that matters.
FEW_NUMBERS = 1 << 14


def store_embeddings(model: ir.Model) -> tuple[str, ...]:
    """Store every table whose rows a Gather looks up, float32 [rows, channels], in INT8, in place. Returns the names
    of the Gathers."""
    found = []
    for node in list(model.graph):
        if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0 or is_constant(node.inputs[1]):
            continue
        table, old = floats_of(node.inputs[0]), node.outputs[0]
        if table is None or table.ndim != 2 or table.size < FEW_NUMBERS:
            continue
        codes, scales = quantize_weight(table, 0)
        name, names = layer_name(node), Names(model)
        row = names.node("Gather", [names.constant(codes, f"{name}.int8"), node.inputs[1]], f"{name}/codes")
        scale = names.node(
            "Gather", [names.constant(scales[:, None], f"{name}.scale"), node.inputs[1]], f"{name}/scale"
        )
        real = names.node("Cast", [row.outputs[0]], f"{name}/Cast", {"to": int(ir.DataType.FLOAT)})
        product = names.node("Mul", [real.outputs[0], scale.outputs[0]], f"{name}/Mul")
        for each, kind in ((row, ir.DataType.INT8), (real, ir.DataType.FLOAT), (product, ir.DataType.FLOAT)):
            each.outputs[0].type, each.outputs[0].shape = ir.TensorType(kind), old.shape
        scale.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        if old.shape is not None:
            scale.outputs[0].shape = ir.Shape([*list(old.shape)[:-1], 1])
        replace(model, node, [row, scale, real, product])
        found.append(name)
    return tuple(found)
