"""Read properties of a graph's values without changing them: constants, sizes, neighbouring nodes."""

import re
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir


def array_of(value: ir.Value | None, *, overridable: bool = False) -> npt.NDArray[Any] | None:
    """The content of an initializer of any type; None for values that are computed or fed from outside.

    `normalise` turns Constant nodes into initializers, so no other constants exist.

    Args:
        overridable: also read initializers that the file lists among its inputs, as exporters did with every weight
            before IR version 4. vitdeploy never feeds them; folding them would take that option from other users.
    """
    if value is None or value.const_value is None or (value.is_graph_input() and not overridable):
        return None
    return value.const_value.numpy()


def floats_of(value: ir.Value | None) -> npt.NDArray[np.float32] | None:
    """The content of a float32 initializer, overridable or not; None for anything else."""
    array = array_of(value, overridable=True)
    return array if array is not None and array.dtype == np.float32 else None


def integers_of(value: ir.Value | None) -> list[int] | None:
    """The values of an int64 initializer, overridable or not, flattened; None for anything else."""
    array = array_of(value, overridable=True)
    return [int(i) for i in array.ravel()] if array is not None and array.dtype == np.int64 else None


def scalar_of(value: ir.Value | None) -> float | None:
    """The number in a constant of one element that is not an input, whatever its type and shape."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    array = array_of(value)
    return float(array.item()) if array is not None else None


def is_constant(value: ir.Value | None, *, overridable: bool = False) -> bool:
    """Whether `array_of` would return an array. Reads no data: weights stay on disk."""
    return value is not None and value.const_value is not None and (overridable or not value.is_graph_input())


def weight_bytes(model: ir.Model) -> int:
    """The bytes of all initializers."""
    tensors = (value.const_value for value in model.graph.initializers.values())
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def rank_of(value: ir.Value | None) -> int | None:
    """The number of axes, None if unknown."""
    return len(value.shape) if value is not None and value.shape is not None else None


def dim(value: ir.Value | None, axis: int) -> int | None:
    """The size of one axis if it is known and static; else None."""
    if value is None or value.shape is None or not -len(value.shape) <= axis < len(value.shape):
        return None
    size = value.shape[axis]
    return size if isinstance(size, int) else None


def operands(node: ir.Node | None, operator: str) -> tuple[ir.Value, ir.Value] | None:
    """The two inputs of `node` if it is this binary operator; else None."""
    if node is None or node.op_type != operator or node.domain != "" or len(node.inputs) != 2:
        return None
    left, right = node.inputs
    return (left, right) if left is not None and right is not None else None


def with_constant(node: ir.Node | None, operator: str) -> tuple[ir.Value, float] | None:
    """(x, c) of `x operator c` with a constant of one element; also of `c operator x` if the operator commutes."""
    pair = operands(node, operator)
    if pair is None:
        return None
    for x, c in (pair, pair[::-1]) if operator in ("Add", "Mul") else (pair,):
        number = scalar_of(c)
        if number is not None and not is_constant(x):
            return x, number
    return None


def producer(value: ir.Value | None, operator: str) -> ir.Node | None:
    """The node that computes `value` if it is this ONNX operator; else None."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == operator and node.domain == "" else None


def only_user(value: ir.Value) -> ir.Node | None:
    """The only reader of `value`, if it reads it once; None for other values and for graph outputs."""
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def ancestors(value: ir.Value, *, past_sizes: bool = True) -> Iterator[ir.Node]:
    """The nodes that a value is computed from, closest first. Without `past_sizes`, stop at Shape nodes, whose results
    depend only on the size of an input."""
    seen: set[ir.Node] = set()
    queue = deque([value])
    while queue:
        node = queue.popleft().producer()
        if node is None or node in seen or (node.op_type == "Shape" and not past_sizes):
            continue
        seen.add(node)
        yield node
        queue.extend(tensor for tensor in node.inputs if tensor is not None)


def depends_on_input(value: ir.Value) -> bool:
    """Whether a tensor depends on the content of a graph input, not only on its size."""
    values = [value, *(each for node in ancestors(value, past_sizes=False) for each in node.inputs if each is not None)]
    return any(each.is_graph_input() for each in values)


def stem(node: ir.Node) -> str:
    """The path of the module that a node belongs to: "blocks.0/attn" of "blocks.0/attn/MatMul" and ".../MatMul_1"."""
    return re.sub(rf"/{node.op_type}(_\d+)?$", "", str(node.name or node.op_type))


Vector = npt.NDArray[np.float64]


def affine_of(
    node: ir.Node, axis: int, channels: int, rank: int, *, overridable: bool = True
) -> tuple[ir.Value, Vector, Vector] | None:
    """(x, scale, shift) of a Mul, Div, Add or Sub with a constant that computes x * scale + shift, for x of `rank` axes
    with `channels` along `axis`; scale and shift [channels]. None for other nodes."""
    pair = operands(node, node.op_type) if node.op_type in ("Mul", "Div", "Add", "Sub") else None
    for x, constant in (pair, pair[::-1])[: 2 if node.op_type in ("Mul", "Add") else 1] if pair is not None else ():
        array = floats_of(constant) if overridable or not constant.is_graph_input() else None
        shape = (1,) * (rank - array.ndim) + array.shape if array is not None else ()
        if array is None or len(shape) != rank or array.size not in (1, channels) or shape[axis] != array.size:
            continue
        if is_constant(x, overridable=True) or (node.op_type == "Div" and not array.all()):
            continue
        vector = np.broadcast_to(array.astype(np.float64).ravel(), (channels,))
        ones, zeros = np.ones(channels), np.zeros(channels)
        if node.op_type in ("Mul", "Div"):
            return x, vector if node.op_type == "Mul" else 1 / vector, zeros
        return x, ones, vector if node.op_type == "Add" else -vector
    return None
