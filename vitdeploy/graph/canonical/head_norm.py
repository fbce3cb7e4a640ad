"""Queries and keys are normalised before their heads are moved in front of the tokens, which is the same.

The Transpose then stands at the product, where runtimes take it into their attention. Behind it, a normalisation keeps
it out; and with as many tokens as heads OpenVINO 2026.4 takes such a Transpose, which leaves the shape, for nothing.
"""

from __future__ import annotations

import onnx_ir as ir

from vitdeploy.graph.canonical.edit import only_user, producer

HEADS_FIRST = [0, 2, 1, 3]


def norm_before_heads(graph: ir.Graph) -> int:
    """LayerNormalization(Transpose(x)) over each head's channels becomes Transpose(LayerNormalization(x)). In place;
    returns how many."""
    count = 0
    for node in list(graph):
        if node.op_type != "LayerNormalization" or node.domain != "" or len(node.outputs) > 1:
            continue
        moved = node.inputs[0]
        transpose = producer(moved, "Transpose")
        if moved is None or transpose is None or only_user(moved) is not node or node.outputs[0].is_graph_output():
            continue
        over_channels = node.attributes.get_int("axis", -1) in (-1, 3)
        if not over_channels or list(transpose.attributes.get_ints("perm", ())) != HEADS_FIRST:
            continue
        _swap(graph, transpose, node)
        count += 1
    return count


def _swap(graph: ir.Graph, transpose: ir.Node, norm: ir.Node) -> None:
    """Each keeps its name and its value, whose shapes change places."""
    moved, normed, source = transpose.outputs[0], norm.outputs[0], transpose.inputs[0]
    assert source is not None
    readers = list(normed.uses())
    norm.replace_input_with(0, source)
    transpose.replace_input_with(0, normed)
    for reader, index in readers:
        reader.replace_input_with(index, moved)
    moved.shape, normed.shape = normed.shape, source.shape
    graph.remove(transpose)
    graph.insert_after(norm, transpose)
