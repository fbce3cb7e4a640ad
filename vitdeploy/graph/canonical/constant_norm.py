"""Layer normalisations of constants, which onnxscript's folding leaves: it computes no operator with several outputs.

DETR's first decoder block begins so: its queries see each other before they see an image.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.canonical.edit import add_constant, array_of


def fold_constant_norms(model: ir.Model) -> int:
    """LayerNormalization of constants becomes a constant. In place; returns how many.

    Source: the ONNX operator's specification, y = (x - mean) / sqrt(variance + epsilon) * scale + bias over the axes
    from `axis` on, computed in float64 here.
    """
    changed = 0
    for node in list(model.graph):
        if node.op_type != "LayerNormalization" or node.domain != "":
            continue
        x, scale, *rest = (array_of(value) for value in node.inputs)
        bias = rest[0] if rest else None
        whole = (
            x is not None and scale is not None and (len(node.inputs) < 3 or node.inputs[2] is None or bias is not None)
        )
        if not whole or any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
            continue
        assert x is not None and scale is not None
        axis = node.attributes.get_int("axis", -1) % x.ndim
        axes, values = tuple(range(axis, x.ndim)), x.astype(np.float64)
        centred = values - values.mean(axis=axes, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=axes, keepdims=True) + node.attributes.get_float("epsilon", 1e-5))
        result = centred / deviation * scale + (0 if bias is None else bias)
        folded = add_constant(model, result.astype(x.dtype), f"{node.name}.folded")
        ir.convenience.replace_all_uses_with(node.outputs[0], folded, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        changed += 1
    return changed
