"""LayerScale, a factor for each channel behind a linear, goes into that linear's weights."""

from __future__ import annotations

import onnx_ir as ir

from vitdeploy.graph.canonical.edit import only_user
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.linears import constant
from vitdeploy.graph.normalise import drop_unused


def fold_layer_scale(model: ir.Model) -> int:
    """gamma * (x W + b) = x (W diag(gamma)) + gamma b, for a constant gamma of one number a channel.

    Exact up to the rounding of the new weights. Left alone: a gamma that is not per channel of the last axis, a linear
    whose own output is read elsewhere or leaves the graph.
    Source of LayerScale: arXiv 2103.17239, section 2.1. Returns the number of Mul nodes that went.
    """
    editor, count = Editor(model), 0
    for linear in editor.linears:
        node = only_user(linear.output)
        if linear.kind != "matmul" or node is None or node.op_type != "Mul" or node.outputs[0].is_graph_output():
            continue
        side = 0 if node.inputs[0] is linear.output else 1
        gamma = constant(node.inputs[1 - side])
        width = linear.weight.shape[1]
        if gamma is None or gamma.size != width or gamma.shape[-1] != width:
            continue
        bias = None if linear.bias is None else linear.bias * gamma.ravel()
        folded = editor.set_linear(linear, linear.weight * gamma.ravel(), bias)
        editor.bypass(node, folded.output)
        count += 1
    if count:
        drop_unused(model)
    return count
