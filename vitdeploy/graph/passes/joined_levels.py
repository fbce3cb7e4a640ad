"""Feature maps of several levels become one list of tokens: joined as maps and transposed once, instead of each."""

from __future__ import annotations

import onnx_ir as ir

from vitdeploy.graph.analysis.linears import Linear
from vitdeploy.graph.edit import drop_unused, replace
from vitdeploy.graph.values import producer, rank_of


def join_before_transpose(model: ir.Model, linears: list[Linear]) -> int:
    """Concat(Transpose(x), Transpose(y), ...) -> Transpose(Concat(x, y, ...)), where one of `linears` reads it.

    Returns how many there were. Transposes that something else reads stay as they are.
    """
    read, count = {linear.input for linear in linears}, 0
    for node in list(model.graph):
        if node.op_type != "Concat" or node.domain != "" or node.outputs[0] not in read:
            continue
        moved = [producer(value, "Transpose") for value in node.inputs]
        rank, perms = rank_of(node.outputs[0]), [_perm(each) for each in moved]
        if rank is None or perms[0] is None or any(perm != perms[0] for perm in perms):
            continue
        axis = node.attributes.get_int("axis", 0) % rank
        maps = [each.inputs[0] for each in moved if each is not None]
        joined = ir.node("Concat", maps, {"axis": perms[0][axis]}, name=f"{node.name}.maps")
        sizes = list(node.outputs[0].shape or ())
        joined.outputs[0].shape = ir.Shape([sizes[perms[0].index(i)] for i in range(rank)])
        joined.outputs[0].type = node.outputs[0].type
        back = ir.node("Transpose", joined.outputs, {"perm": list(perms[0])}, name=f"{node.name}.tokens")
        back.outputs[0].shape, back.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
        replace(model, node, [joined, back])
        count += 1
    if count:
        drop_unused(model)
    return count


def _perm(transpose: ir.Node | None) -> tuple[int, ...] | None:
    """The order of a Transpose that one node reads; None for any other value."""
    if transpose is None or len(transpose.outputs[0].uses()) != 1 or transpose.outputs[0].is_graph_output():
        return None
    return tuple(transpose.attributes.get_ints("perm", ())) or None
