"""Rewrite normalisations and activations into one form. Formulas are recognised by values, in any operand order."""

import math
from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.edit import Names, replace
from vitdeploy.graph.values import array_of, integers_of, is_constant, only_user, operands, producer, stem

# --- Recognise formulas by their values -------------------------------------------------------------------------------


Array = npt.NDArray[np.float64]
# The depth of a formula upwards (GELU with tanh), and downwards from its result (TensorFlow's normalisation).
NEAR, DEPTH = 10, 14
ARITHMETIC: dict[str, Callable[..., Array]] = {
    "Add": np.add,
    "Cast": np.asarray,
    "Div": np.divide,
    "Mul": np.multiply,
    "Neg": np.negative,
    "Pow": np.power,
    "Reciprocal": np.reciprocal,
    "Sqrt": np.sqrt,
    "Sub": np.subtract,
}
MEANS = ("GlobalAveragePool", "ReduceMean")


def _is(value: ir.Value | None, leaves: Mapping[ir.Value, Array], expected: Array) -> bool:
    """Whether a formula gives these values, up to the rounding of constants in float32 or with five digits."""
    found = _computed(value, leaves)
    return found is not None and _near(found, expected)


def _near(found: Array, expected: Array) -> bool:
    return found.shape == expected.shape and np.allclose(found, expected, rtol=1e-5, atol=1e-7)


def _computed(value: ir.Value | None, leaves: Mapping[ir.Value, Array], depth: int = DEPTH) -> Array | None:
    """Compute a value from `leaves`; None if it depends on anything except these and constants of one element, or of
    one element per position of the last axis."""
    if value is None or value in leaves:
        return leaves[value] if value is not None else None
    width = next(iter(leaves.values())).shape[-1]
    if is_constant(value):
        array = array_of(value)
        fits = array is not None and (array.size == 1 or (array.size == width == array.shape[-1]))
        return array.astype(np.float64).reshape(-1) if array is not None and fits else None
    node = value.producer()
    if node is None or node.domain != "" or depth == 0:
        return None
    made = [_computed(tensor, leaves, depth - 1) for tensor in node.inputs[: 1 if node.op_type in MEANS else None]]
    known = [each for each in made if each is not None]
    if not known or len(known) < len(made):
        return None
    with np.errstate(all="ignore"):
        if node.op_type in MEANS:
            axes = _averaged(node, known[0].ndim)
            return None if axes is None else known[0].mean(axis=axes, keepdims=True)
        return np.asarray(ARITHMETIC[node.op_type](*known), np.float64) if node.op_type in ARITHMETIC else None


def _averaged(node: ir.Node, rank: int) -> tuple[int, ...] | None:
    """The axes that a node averages over and keeps; None if unknown."""
    if node.op_type == "GlobalAveragePool":
        return tuple(range(2, rank))
    listed = node.inputs[1] if len(node.inputs) > 1 else None
    axes = [int(axis) for axis in node.attributes.get_ints("axes", ())] or integers_of(listed) or []
    kept = node.attributes.get_int("keepdims", 1)
    return tuple(axes) if axes and kept else None


def _made_of(value: ir.Value | None) -> Iterator[ir.Value]:
    """The computed values that `value` consists of through such operators, closest first, each once."""
    level, seen = [value], set()
    for _ in range(NEAR):
        below = []
        for current in level:
            if current is None or current in seen or is_constant(current):
                continue
            seen.add(current)
            yield current
            node = current.producer()
            if node is not None and (node.op_type in ARITHMETIC or node.op_type in MEANS):
                below += list(node.inputs)
        level = below


# --- Layer normalisation as one node, as runtimes expect it -----------------------------------------------------------
# Before opset 17 exporters write seven to eleven nodes for it: gamma (x - mean) / sqrt(variance + epsilon) + beta, or,
# as TensorFlow and Keras do, a scale and a shift of x, x s + (beta - mean s) with s = gamma / sqrt(variance +
# epsilon).
#
# Source: arXiv 1607.06450, equations 3 and 4; ONNX LayerNormalization-17. One node is computed in float32 also in a
# half-precision graph; written out, its squares overflow float16.


OPSET = 17
# The Transpose of queries and keys.
HEADS_FIRST = [0, 2, 1, 3]
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
# From the root of the variance to the result: its reciprocal, times gamma, times the mean, beta less that, and the sum.
BEHIND = 6


def fuse_layer_norm(model: ir.Model, *, moments: bool = False) -> int:
    """Replace every written-out layer normalisation over the last axis; with `moments`, only those whose scale is part
    of the formula, as TensorFlow writes it. Returns their number; 0 below opset 17."""
    if model.graph.opset_imports.get("", 0) < OPSET:
        return 0
    roots = [node for node in model.graph if node.op_type == "Sqrt" and node.domain == ""]
    return sum(_fuse_root(model, root, moments) for root in roots)


def _fuse_root(model: ir.Model, root: ir.Node, moments: bool) -> bool:
    for x in _made_of(root.inputs[0]):
        rank, width = len(x.shape or ()), x.shape[-1] if x.shape else None
        if x.dtype not in FLOATS or rank < 2 or not isinstance(width, int):
            continue
        rows = np.random.default_rng(0).standard_normal((4, width))
        rows = rows * np.arange(4)[:, None] + np.array([0, 0, 1, -2])[:, None]  # the first one is zero
        sample = rows.reshape(*(1,) * (rank - 2), 4, width)
        least = _computed(root.inputs[0], {x: np.zeros_like(sample)})
        variance = rows.var(axis=-1, keepdims=True) + (least.flat[0] if least is not None else 0)
        if least is None or not _is(root.inputs[0], {x: sample}, variance.reshape(*sample.shape[:-1], 1)):
            continue
        normal = (rows - rows.mean(axis=-1, keepdims=True)) / np.sqrt(variance)
        for value in _behind(root.outputs[0]):
            found = _computed(value, {x: sample})
            factors = (
                _factors(found.reshape(rows.shape), normal) if found is not None and found.size == rows.size else None
            )
            if factors is not None:
                plain = np.allclose(factors[0], 1, atol=1e-9, rtol=0) and not factors[1].any()
                if plain == moments:
                    return False
                return _fuse(model, x, value, float(least.flat[0]), None if plain else factors)
    return False


def _factors(found: Array, normal: Array) -> tuple[Array, Array] | None:
    """(gamma, beta), [width] each, of rows gamma * normal + beta; None for other rows. The first row of `normal` is
    zero."""
    largest = np.abs(normal).argmax(axis=0)[None]
    gamma = np.take_along_axis(found - found[0], largest, axis=0)[0] / np.take_along_axis(normal, largest, axis=0)[0]
    return (gamma, found[0]) if _near(found, gamma * normal + found[0]) else None


def _behind(root: ir.Value) -> Iterator[ir.Value]:
    """The values computed from a value, closest first, each once."""
    level, seen = [root], {root}
    for _ in range(BEHIND):
        level = [use.node.outputs[0] for value in level for use in value.uses() if len(use.node.outputs) == 1]
        level = [value for value in dict.fromkeys(level) if value not in seen]
        seen.update(level)
        yield from level


def _fuse(model: ir.Model, x: ir.Value, value: ir.Value, epsilon: float, factors: tuple[Array, Array] | None) -> bool:
    # Half precision: the input is cast up and the result down; LayerNormalization casts internally (stash_type).
    upcast, down = producer(x, "Cast"), only_user(value)
    if upcast is not None and down is not None and down.op_type == "Cast":
        source = upcast.inputs[0]
        if source is not None and source.dtype == down.outputs[0].dtype:
            x, value = source, down.outputs[0]
    last = value.producer()
    if x.dtype not in FLOATS or value.dtype != x.dtype or x.shape is None or last is None:
        return False
    inputs, names, width = [x], Names(model), x.shape[-1]
    assert isinstance(width, int)
    if factors is not None:
        for name, array in (("scale", factors[0]), ("shift", factors[1])):
            if name == "scale" or array.any():
                inputs.append(names.constant(array.astype(x.dtype.numpy()), f"{stem(last)}.{name}"))
    else:
        for operator in ("Mul", "Add"):
            user = _per_channel(model, last, operator, width)
            if user is not None:
                last, constant = user
                inputs.append(constant)
            elif operator == "Mul":
                inputs.append(Names(model).constant(np.ones(width, x.dtype.numpy()), f"{stem(last)}.scale"))
    attributes = {"axis": -1, "epsilon": epsilon, "stash_type": 1}
    name = f"{stem(last)}/LayerNormalization"
    replace(model, last, [ir.node("LayerNormalization", inputs, attributes=attributes, name=name)])
    return True


def _per_channel(model: ir.Model, node: ir.Node, operator: str, width: int) -> tuple[ir.Node, ir.Value] | None:
    """The only reader of `node` if it is this operator with a number per channel, and these numbers as [width]."""
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


def norm_before_heads(graph: ir.Graph) -> int:
    """Rewrite LayerNormalization(Transpose(x)) over each head's channels as Transpose(LayerNormalization(x)), which is
    equal; in place. Returns the number of rewrites.

    The Transpose is then next to the product, where runtimes fuse it into their attention. A normalisation after it
    prevents that; and if tokens and heads are equal in number, so that the Transpose keeps the shape, OpenVINO 2026.4
    treats it as a no-op.
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
    """Swap the two nodes; each keeps its name and its output, and the output shapes are exchanged."""
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


# --- GELU as one node, from the formulas that exporters write for it, in any operand order ----------------------------
# Source: arXiv 1606.08415: x Phi(x) = x/2 (1 + erf(x / sqrt 2)), and its approximation x/2 (1 + tanh(sqrt(2/pi) (x +
# 0.044715 x^3))). The operator Gelu exists from opset 20 on.
#
# Formulas are recognised by their values: the argument of erf or tanh is computed for some x, and the expression of the
# result t for some pairs of x and t.


GELU_OPSET = 20
# From t to the result: + 1, * x, * 0.5, or the same multiplied out.
OUTER_NODES = 4
X = np.array([-3.7, -2.3, -1.1, -0.4, 0.3, 0.9, 1.7, 2.6, 3.9])
T = np.array([0.8, -0.6, 0.1, 0.7, -0.3, 0.5, -0.8, 0.2, 0.4])
# The argument of each function.
INNER: dict[str, tuple[str, Array]] = {
    "Erf": ("none", math.sqrt(0.5) * X),
    "Tanh": ("tanh", math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)),
}


def fuse_gelu(model: ir.Model) -> int:
    """Replace every written-out GELU, in any operand order. Returns their number; 0 below opset 20."""
    if model.graph.opset_imports.get("", 0) < GELU_OPSET:
        return 0
    return sum(_gelu_fuse(model, node) for node in list(model.graph) if node.op_type in INNER and node.domain == "")


def _gelu_fuse(model: ir.Model, node: ir.Node) -> bool:
    approximate, expected = INNER[node.op_type]
    inner, t = node.inputs[0], node.outputs[0]
    for x in _made_of(inner):
        if _is(inner, {x: X}, expected):
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
