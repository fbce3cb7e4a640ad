"""A rewrite of a graph: a Transpose of a Transpose is one Transpose, or none."""

import onnx_ir as ir

from vitdeploy.graph.canonical.normalise import Pass
from vitdeploy.graph.edit import bypass, drop_unused
from vitdeploy.graph.passes.optimize import exact
from vitdeploy.graph.values import producer


def merge_transposes(model):
    """Returns how many places changed. Without `perm` a Transpose reverses the axes."""
    count = 0
    for node in list(model.graph):
        inner = producer(node.inputs[0], "Transpose") if node.op_type == "Transpose" else None
        if inner is None:
            continue
        rank = len(node.outputs[0].shape)
        first, second = (list(each.attributes.get_ints("perm", range(rank)[::-1])) for each in (inner, node))
        perm = [first[axis] for axis in second]
        node.replace_input_with(0, inner.inputs[0])
        node.attributes["perm"] = ir.AttrInt64s("perm", perm)
        if perm == sorted(perm):
            bypass(node, node.inputs[0])
        count += 1
    if count:
        drop_unused(model)
    return count


REWRITE = exact(merge_transposes, "numbers")
PASS = Pass("transposes", merge_transposes, "no Transpose reads a Transpose")
