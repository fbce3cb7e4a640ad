"""One part of a stack of tensors is that tensor: DETR's decoders stack what each layer says, and give the last."""

from __future__ import annotations

import onnx_ir as ir

from vitdeploy.graph.edit import bypass
from vitdeploy.graph.values import integers_of, producer, rank_of


def unstack(model: ir.Model) -> int:
    """Bypass every Gather of one part of a Concat of Unsqueezes along one axis, in place; returns how many there were.

    What only the other parts need is then dead code.
    """
    return sum(
        node.op_type == "Gather" and (part := _part(node)) is not None and bypass(node, part)
        for node in list(model.graph)
    )


def _part(gather: ir.Node) -> ir.Value | None:
    """The tensor that `gather` takes out of a stack; None if it does something else."""
    stack, index = producer(gather.inputs[0], "Concat"), gather.inputs[1]
    chosen, rank = integers_of(index), rank_of(gather.inputs[0])
    if stack is None or chosen is None or len(chosen) != 1 or rank is None or rank_of(index) != 0:
        return None
    axis = stack.attributes.get_int("axis", 0) % rank
    parts = [producer(value, "Unsqueeze") for value in stack.inputs]
    if gather.attributes.get_int("axis", 0) % rank != axis or not -len(parts) <= chosen[0] < len(parts):
        return None
    if any(part is None or [a % rank for a in integers_of(part.inputs[1]) or ()] != [axis] for part in parts):
        return None
    part = parts[chosen[0]]
    return part.inputs[0] if part is not None else None
