"""Layer normalisation as one node, where runtimes want it.

Before opset 17 exporters write seven to eleven nodes for it.

Source: arXiv 1607.06450, equations 3 and 4; ONNX LayerNormalization-17. As one node it is computed in float32 in a half
precision graph too: written out, its squares overflow float16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.edit import Names, replace
from vitdeploy.graph.values import array_of, only_user, operands, producer, rank_of, scalar_of, stem, with_constant

OPSET = 17
# The Transpose of queries and keys.
HEADS_FIRST = [0, 2, 1, 3]
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True)
class _Normalised:
    """(x - mean) / sqrt(variance + epsilon) over the last axis, as it was found; `value` is the result."""

    x: ir.Value
    epsilon: float
    value: ir.Value


def fuse_layer_norm(model: ir.Model) -> int:
    """Replace every written-out layer normalisation over the last axis. Returns how many; none below opset 17."""
    if model.graph.opset_imports.get("", 0) < OPSET:
        return 0
    count = 0
    for node in list(model.graph):
        if node.op_type == "Sqrt" and node.domain == "":
            found = _normalised(node)
            count += found is not None and _fuse(model, found)
    return count


def _normalised(root: ir.Node) -> _Normalised | None:
    shifted = with_constant(producer(uncast(root.inputs[0]), "Add"), "Add")
    if shifted is None:
        return None
    variance, epsilon = shifted
    squared = mean_of(variance)
    deviation = square_root(squared) if squared is not None else None
    x = deviation_from_mean(deviation)
    if x is None:
        return None
    for value in _quotients(root.outputs[0]):
        pair = operands(value.producer(), str(getattr(value.producer(), "op_type", "")))
        assert pair is not None
        if any(deviation_from_mean(uncast(side)) is x for side in pair):
            return _Normalised(x, epsilon, value)
    return None


def mean_of(value: ir.Value | None) -> ir.Value | None:
    """The x of ReduceMean(x) over the last axis with the axis kept; of three axes, GlobalAveragePool is that too."""
    pooled = producer(uncast(value), "GlobalAveragePool")
    if pooled is not None:
        return pooled.inputs[0] if rank_of(pooled.inputs[0]) == 3 else None
    node = producer(uncast(value), "ReduceMean")
    if node is None or not node.attributes.get_int("keepdims", 1):
        return None
    x = node.inputs[0]
    if "axes" in node.attributes:
        axes = list(node.attributes.get_ints("axes", ()))
    else:
        array = array_of(node.inputs[1]) if len(node.inputs) > 1 else None
        axes = array.ravel().tolist() if array is not None else []
    rank = len(x.shape) if x is not None and x.shape is not None else 0
    return x if axes == [-1] or (rank and axes == [rank - 1]) else None


def square_root(value: ir.Value) -> ir.Value | None:
    """The d of Mul(d, d) or Pow(d, 2)."""
    source = uncast(value)
    pair = operands(producer(source, "Mul"), "Mul")
    if pair is not None:
        return uncast(pair[0]) if pair[0] is pair[1] else None
    power = with_constant(producer(source, "Pow"), "Pow")
    return uncast(power[0]) if power is not None and power[1] == 2.0 else None


def deviation_from_mean(value: ir.Value | None) -> ir.Value | None:
    """The x of x - mean(x)."""
    pair = operands(producer(value, "Sub"), "Sub")
    return pair[0] if pair is not None and mean_of(pair[1]) is pair[0] else None


def _quotients(root: ir.Value) -> list[ir.Value]:
    """The dividends of the root, whether divided directly or multiplied by its reciprocal."""
    found = []
    for use in root.uses():
        node = use.node
        if node.op_type == "Cast":
            found += _quotients(node.outputs[0])
        elif node.op_type == "Div" and use.idx == 1:
            one = scalar_of(node.inputs[0]) == 1.0
            found += _products(node.outputs[0]) if one else [node.outputs[0]]
        elif node.op_type == "Reciprocal":
            found += _products(node.outputs[0])
    return found


def _products(value: ir.Value) -> list[ir.Value]:
    return [use.node.outputs[0] for use in value.uses() if use.node.op_type == "Mul"]


def _fuse(model: ir.Model, found: _Normalised) -> bool:
    x, value = found.x, found.value
    # Half precision: the input is cast up, the result down; LayerNormalization casts inside, by its stash_type.
    upcast, down = producer(x, "Cast"), only_user(value)
    if upcast is not None and down is not None and down.op_type == "Cast":
        source = upcast.inputs[0]
        if source is not None and source.dtype == down.outputs[0].dtype:
            x, value = source, down.outputs[0]
    if x.dtype not in FLOATS or value.dtype != x.dtype or x.shape is None:
        return False
    width = x.shape[-1]
    if not isinstance(width, int):
        return False
    last = value.producer()
    assert last is not None
    inputs = [x]
    for operator in ("Mul", "Add"):
        user = _per_channel(model, last, operator, width)
        if user is not None:
            last, constant = user
            inputs.append(constant)
        elif operator == "Mul":
            ones = np.ones(width, x.dtype.numpy())
            inputs.append(Names(model).constant(ones, f"{stem(last)}.scale"))
    attributes = {"axis": -1, "epsilon": found.epsilon, "stash_type": 1}
    name = f"{stem(last)}/LayerNormalization"
    replace(model, last, [ir.node("LayerNormalization", inputs, attributes=attributes, name=name)])
    return True


def _per_channel(model: ir.Model, node: ir.Node, operator: str, width: int) -> tuple[ir.Node, ir.Value] | None:
    """The node that alone reads `node`, by one number for each channel, and these numbers as [width]."""
    user = only_user(node.outputs[0])
    pair = operands(user, operator)
    if user is None or pair is None:
        return None
    constant = pair[1] if pair[0] is node.outputs[0] else pair[0]
    array, rank = array_of(constant), len(node.outputs[0].shape or ())
    if array is None or array.ndim > rank:
        return None
    if array.shape == (width,):
        return user, constant
    if array.size != 1 and (array.size != width or array.shape[-1] != width):
        return None
    vector = np.ascontiguousarray(np.broadcast_to(array.reshape(-1), (width,)))
    return user, Names(model).constant(vector, f"{constant.name}.vector")


def uncast(value: ir.Value | None) -> ir.Value | None:
    node = producer(value, "Cast")
    return node.inputs[0] if node is not None else value


def norm_before_heads(graph: ir.Graph) -> int:
    """LayerNormalization(Transpose(x)) over each head's channels becomes Transpose(LayerNormalization(x)), which is the
    same. In place; returns how many.

    The Transpose then stands at the product, where runtimes take it into their attention. Behind it, a normalisation
    keeps it out; and with as many tokens as heads OpenVINO 2026.4 takes such a Transpose, which leaves the shape, for
    nothing.
    """
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
