"""Normalisations and activations in one form."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.edit import Names, replace
from vitdeploy.graph.values import (
    array_of,
    is_constant,
    only_user,
    operands,
    producer,
    rank_of,
    scalar_of,
    stem,
    with_constant,
)

# --- Layer normalisation as one node, where runtimes want it ----------------------------------------------------------
# Before opset 17 exporters write seven to eleven nodes for it.
#
# Source: arXiv 1607.06450, equations 3 and 4; ONNX LayerNormalization-17. As one node it is computed in float32 in a
# half precision graph too: written out, its squares overflow float16.


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
    found = _variance_of(uncast(root.inputs[0]))
    if found is None:
        return None
    x, epsilon = found
    for value in _quotients(root.outputs[0]):
        pair = operands(value.producer(), str(getattr(value.producer(), "op_type", "")))
        assert pair is not None
        if any(deviation_from_mean(uncast(side)) is x for side in pair):
            return _Normalised(x, epsilon, value)
    return None


def _variance_of(value: ir.Value | None) -> tuple[ir.Value, float] | None:
    """(x, epsilon) of a value that is the variance of x along the last axis, plus epsilon."""
    shifted = with_constant(producer(value, "Add"), "Add")
    squared = mean_of(shifted[0]) if shifted is not None else None
    x = deviation_from_mean(square_root(squared)) if squared is not None else None
    return (x, shifted[1]) if x is not None and shifted is not None else None


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
    uses = [use for each in _reciprocals(root) for use in each.uses()]
    found = [use.node.outputs[0] for use in uses if use.node.op_type == "Mul"]
    for use in root.uses():
        if use.node.op_type == "Cast":
            found += _quotients(use.node.outputs[0])
        elif use.node.op_type == "Div" and use.idx == 1 and scalar_of(use.node.inputs[0]) != 1.0:
            found.append(use.node.outputs[0])
    return found


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
    _put(model, last, inputs, found.epsilon)
    return True


def _put(model: ir.Model, last: ir.Node, inputs: Sequence[ir.Value], epsilon: float) -> None:
    attributes = {"axis": -1, "epsilon": epsilon, "stash_type": 1}
    name = f"{stem(last)}/LayerNormalization"
    replace(model, last, [ir.node("LayerNormalization", inputs, attributes=attributes, name=name)])


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


# --- Layer normalisation as TensorFlow and Keras write it: one scale and one shift of x, both made of its moments -----
# x s + (beta - mean s) with s = gamma / sqrt(variance + epsilon), `tf.nn.batch_normalization`'s form. The same function
# as gamma (x - mean) / sqrt(variance + epsilon) + beta (arXiv 1607.06450, equation 4), without its cancellation.


def fuse_moments(model: ir.Model) -> int:
    """Replace every such normalisation over the last axis by LayerNormalization. Returns how many."""
    if model.graph.opset_imports.get("", 0) < OPSET:
        return 0
    roots = [node for node in model.graph if node.op_type == "Sqrt" and node.domain == ""]
    return sum(_moments_fuse(model, root) for root in roots)


def _moments_fuse(model: ir.Model, root: ir.Node) -> bool:
    found = _variance_of(root.inputs[0])
    x, epsilon = found or (None, 0.0)
    width = x.shape[-1] if x is not None and x.shape is not None else None
    if x is None or x.dtype not in FLOATS or not isinstance(width, int):
        return False
    for reciprocal in _reciprocals(root.outputs[0]):
        for scale, gamma in ((reciprocal, None), *_scaled(reciprocal, width)):
            for result, beta in _results(x, scale, width):
                _replace(model, result, (x, gamma, beta), width, epsilon)
                return True
    return False


def _reciprocals(root: ir.Value) -> list[ir.Value]:
    found = []
    for use in root.uses():
        divided = use.node.op_type == "Div" and use.idx == 1 and scalar_of(use.node.inputs[0]) == 1.0
        if use.node.op_type == "Reciprocal" or divided:
            found.append(use.node.outputs[0])
    return found


def _scaled(reciprocal: ir.Value, width: int) -> Iterator[tuple[ir.Value, ir.Value]]:
    """(product, gamma) of the reciprocal root and a constant per channel."""
    for use in reciprocal.uses():
        pair = operands(use.node, "Mul")
        if pair is not None and _moments_per_channel(pair[1 - use.idx], width):
            yield use.node.outputs[0], pair[1 - use.idx]


def _results(x: ir.Value, scale: ir.Value, width: int) -> Iterator[tuple[ir.Node, ir.Value | None]]:
    """(last node, beta) of x scale + (beta - mean scale), or without beta."""
    for use in scale.uses():
        pair = operands(use.node, "Mul")
        product = use.node.outputs[0]
        last = only_user(product) if pair is not None and pair[1 - use.idx] is x else None
        if last is None:
            continue
        both = operands(last, last.op_type)
        if both is None or last.op_type not in ("Add", "Sub"):
            continue
        other = both[1] if both[0] is product else both[0]
        if last.op_type == "Sub":
            if both[0] is product and _is_shift(other, x, scale, negative=False):
                yield last, None
        elif _is_shift(other, x, scale, negative=True):
            yield last, None
        else:
            beta = _beta(other, x, scale, width)
            if beta is not None:
                yield last, beta


def _beta(value: ir.Value, x: ir.Value, scale: ir.Value, width: int) -> ir.Value | None:
    """The beta of beta + (-mean) scale, or of beta - mean scale."""
    for left, right in _sides(value, "Add"):
        if _moments_per_channel(left, width) and _is_shift(right, x, scale, negative=True):
            return left
    pair = operands(producer(value, "Sub"), "Sub")
    if pair is not None and _moments_per_channel(pair[0], width) and _is_shift(pair[1], x, scale, negative=False):
        return pair[0]
    return None


def _is_shift(value: ir.Value, x: ir.Value, scale: ir.Value, *, negative: bool) -> bool:
    """Whether it is mean(x) scale, or (-mean(x)) scale."""
    for left, right in _sides(value, "Mul"):
        negated = producer(left, "Neg")
        mean = negated.inputs[0] if negated is not None else left
        if right is scale and (negated is not None) == negative and mean_of(mean) is x:
            return True
    return False


def _sides(value: ir.Value, operator: str) -> tuple[tuple[ir.Value, ir.Value], ...]:
    pair = operands(producer(value, operator), operator)
    return () if pair is None else (pair, pair[::-1])


def _moments_per_channel(value: ir.Value, width: int) -> bool:
    array = array_of(value)
    return array is not None and array.size == width and array.ndim <= 3 and array.shape[-1:] == (width,)


def _replace(
    model: ir.Model,
    last: ir.Node,
    operands_of: tuple[ir.Value, ir.Value | None, ir.Value | None],
    width: int,
    epsilon: float,
) -> None:
    (x, gamma, beta), names = operands_of, Names(model)
    scale = array_of(gamma)
    if scale is None:
        scale = np.ones(width, np.float32 if x.dtype is None else x.dtype.numpy())
    inputs = [x, names.constant(np.ascontiguousarray(scale.reshape(-1)), f"{stem(last)}.scale")]
    shift = array_of(beta)
    if shift is not None:
        inputs.append(names.constant(np.ascontiguousarray(shift.reshape(-1)), f"{stem(last)}.shift"))
    _put(model, last, inputs, epsilon)


# --- GELU as one node, from the formulas that exporters write for it, in whatever order of their operands -------------
# Source: arXiv 1606.08415: x Phi(x) = x/2 (1 + erf(x / sqrt 2)), and its approximation x/2 (1 + tanh(sqrt(2/pi) (x +
# 0.044715 x^3))). The operator Gelu exists from opset 20 on.
#
# A formula is known by its values: what is inside erf or tanh is computed for some x, and what is made of the result t
# for some pairs of x and t.


GELU_OPSET = 20
# The longest formula (tanh GELU) is 8 nodes deep.
DEPTH = 10
# From t to the result: + 1, * x, * 0.5, or the same multiplied out.
OUTER_NODES = 4
Array = npt.NDArray[np.float64]
ARITHMETIC: dict[str, Callable[..., Array]] = {
    "Add": np.add,
    "Sub": np.subtract,
    "Mul": np.multiply,
    "Div": np.divide,
    "Neg": np.negative,
    "Pow": np.power,
}
X = np.array([-3.7, -2.3, -1.1, -0.4, 0.3, 0.9, 1.7, 2.6, 3.9])
T = np.array([0.8, -0.6, 0.1, 0.7, -0.3, 0.5, -0.8, 0.2, 0.4])
# What stands inside of each function.
INNER: dict[str, tuple[str, Array]] = {
    "Erf": ("none", math.sqrt(0.5) * X),
    "Tanh": ("tanh", math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)),
}


def fuse_gelu(model: ir.Model) -> int:
    """Replace every written-out GELU, in any order of its operands. Returns how many; none below opset 20."""
    if model.graph.opset_imports.get("", 0) < GELU_OPSET:
        return 0
    return sum(_gelu_fuse(model, node) for node in list(model.graph) if node.op_type in INNER and node.domain == "")


def _gelu_fuse(model: ir.Model, node: ir.Node) -> bool:
    approximate, wanted = INNER[node.op_type]
    inner, t = node.inputs[0], node.outputs[0]
    for x in _made_of(inner):
        if _is(inner, {x: X}, wanted):
            result = _result(t, x)
            if result is None:
                return False
            last = result.producer()
            assert last is not None
            replace(model, last, [ir.node("Gelu", [x], attributes={"approximate": approximate}, name=last.name)])
            return True
    return False


def _result(t: ir.Value, x: ir.Value) -> ir.Value | None:
    """The value downstream of `t` that is x/2 (1 + t)."""
    value = t
    for _ in range(OUTER_NODES):
        user = only_user(value)
        if user is None or len(user.outputs) != 1:
            return None
        value = user.outputs[0]
        if _is(value, {x: X, t: T}, X / 2 * (1 + T)):
            return value
    return None


def _is(value: ir.Value | None, leaves: Mapping[ir.Value, Array], wanted: Array) -> bool:
    """Whether a formula gives these values, up to the rounding of constants that were written in float32 or with five
    digits."""
    with np.errstate(all="ignore"):
        found = _computed(value, leaves, DEPTH)
    return found is not None and np.allclose(found, wanted, rtol=1e-5, atol=1e-7)


def _computed(value: ir.Value | None, leaves: Mapping[ir.Value, Array], depth: int) -> Array | None:
    """A value by those that it is made of; None if it is made of anything but these and constants of one element."""
    if value is None or value in leaves:
        return leaves[value] if value is not None else None
    if (number := scalar_of(value)) is not None:
        return np.full(X.shape, number)
    node = value.producer()
    if node is None or node.domain != "" or depth == 0 or node.op_type not in ARITHMETIC:
        return None
    operands = [_computed(each, leaves, depth - 1) for each in node.inputs]
    return None if any(each is None for each in operands) else ARITHMETIC[node.op_type](*operands)


def _made_of(value: ir.Value | None) -> Iterator[ir.Value]:
    """The computed values that `value` is made of by arithmetic, nearest first, each once."""
    level, seen = [value], set()
    for _ in range(DEPTH):
        below = []
        for current in level:
            if current is None or current in seen or is_constant(current):
                continue
            seen.add(current)
            yield current
            node = current.producer()
            if node is not None and node.op_type in ARITHMETIC:
                below += list(node.inputs)
        level = below
