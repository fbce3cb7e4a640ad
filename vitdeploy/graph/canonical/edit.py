"""Small edits of a graph that all passes make: read and add constants, replace a value, leave nothing dangling."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.names import Names


def array_of(value: ir.Value | None) -> npt.NDArray[Any] | None:
    """The value of an initializer of any type, or None for what is computed or can be fed from outside."""
    if value is None or value.const_value is None or value.is_graph_input():
        return None
    return value.const_value.numpy()


def scalar_of(value: ir.Value | None) -> float | None:
    """The number in a constant of one element."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    array = array_of(value)
    return float(array.item()) if array is not None else None


def add_constant(model: ir.Model, array: npt.NDArray[Any], name: str) -> ir.Value:
    """A new initializer; a number is appended to `name` where it is taken."""
    return Names(model).constant(array, name)


def operands(node: ir.Node | None, operator: str) -> tuple[ir.Value, ir.Value] | None:
    """The two inputs of `node` if it is that binary operator."""
    if node is None or node.op_type != operator or node.domain != "" or len(node.inputs) != 2:
        return None
    left, right = node.inputs
    return (left, right) if left is not None and right is not None else None


def with_constant(node: ir.Node | None, operator: str) -> tuple[ir.Value, float] | None:
    """(x, c) of `x operator c` with a constant of one element; of `c operator x` too where the operator commutes."""
    pair = operands(node, operator)
    if pair is None:
        return None
    for x, c in (pair, pair[::-1]) if operator in ("Add", "Mul") else (pair,):
        number = scalar_of(c)
        if number is not None and array_of(x) is None:
            return x, number
    return None


def producer(value: ir.Value | None, operator: str) -> ir.Node | None:
    """The node that computes `value` if it is that operator of ONNX."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == operator and node.domain == "" else None


def only_user(value: ir.Value) -> ir.Node | None:
    """The node that alone reads `value`, once; None for a graph output too."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def replace(model: ir.Model, node: ir.Node, new: Sequence[ir.Node]) -> None:
    """Put `new` in the place of `node`; the first output of the last one takes over the name and all uses."""
    names = Names(model)
    for other in new:
        if other.name is None or other.name != node.name:
            other.name = names.free(other.name or f"{stem(node)}/{other.op_type}")
    for other in new[:-1]:
        other.outputs[0].name = other.name if other.name != node.name else names.free(str(other.name))
    ir.convenience.replace_nodes_and_values(model.graph, node, [node], new, [node.outputs[0]], [new[-1].outputs[0]])


def bypass(model: ir.Model, node: ir.Node, value: ir.Value) -> bool:
    """Let everything that reads the output of `node` read `value`; False where a graph output keeps the node.

    An output of the graph must keep its name, so only an inner, computed value can take its place.
    """
    old = node.outputs[0]
    if old.is_graph_output():
        if value.producer() is None or value.is_graph_output():
            return False
        old_name = old.name
        old.name = None
        value.name = old_name
    ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    model.graph.remove(node, safe=True)
    return True


def stem(node: ir.Node) -> str:
    """The path of the module that a node belongs to: "blocks.0/attn" of "blocks.0/attn/MatMul" and ".../MatMul_1"."""
    return re.sub(rf"/{node.op_type}(_\d+)?$", "", str(node.name or node.op_type))
