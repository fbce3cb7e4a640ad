"""Rewrite products, convolutions, gathers and attention into one form."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.attention import over_last_axis
from vitdeploy.graph.analysis.rows import scaled_input
from vitdeploy.graph.edit import Names, bypass, replace
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.shapes.sizes import Dims, Extent, Unknown, product, view_shape
from vitdeploy.graph.values import (
    affine_of,
    array_of,
    floats_of,
    is_constant,
    operands,
    producer,
    stem,
    with_constant,
)

# --- Products as MatMul -----------------------------------------------------------------------------------------------
# Gemm, and Einsum of two operands, with a Transpose and a Reshape if its axes need them.
#
# Einsum expresses attention and projections: "bnd,dhe->bhne" is a linear, "bhie,bhje->bhij" the scores. As MatMul they
# are found, rewritten and quantized like any other. Source: ONNX's specification of Einsum-12.


def gemm_to_matmul(model: ir.Model) -> int:
    """Rewrite Gemm with constant weights and bias and alpha = beta = 1 as MatMul + Add with a weight [in, out].

    Left unchanged: other alpha or beta, a transposed input, computed weights. Returns the number of rewrites.
    """
    count, names = 0, Names(model)
    for node in list(model.graph):
        if node.op_type != "Gemm" or node.attributes.get_float("alpha", 1.0) != 1.0:
            continue
        if node.attributes.get_float("beta", 1.0) != 1.0 or node.attributes.get_int("transA", False):
            continue
        weight = floats_of(node.inputs[1])
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if weight is None:
            continue
        if node.attributes.get_int("transB", False):
            weight = np.ascontiguousarray(weight.T)
        path = str(node.name).removesuffix("/Gemm")
        nodes = [names.node("MatMul", [node.inputs[0], names.constant(weight, f"{path}.weight_t")], f"{path}/MatMul")]
        if bias is not None:
            nodes.append(names.node("Add", [nodes[0].outputs[0], bias], f"{path}/Add"))
        old, new = node.outputs[0], nodes[-1].outputs[0]
        new.type, new.shape = old.type, old.shape
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], nodes, [old], [new])
        count += 1
    return count


@dataclass(frozen=True)
class _Letters:
    """Letters of "A,B->O": `batch` occur in all three, `summed` in A and B, `left` in A and O, `right` in B and O."""

    a: str
    b: str
    out: str

    @property
    def batch(self) -> str:
        return "".join(c for c in self.out if c in self.a and c in self.b)

    @property
    def summed(self) -> str:
        return "".join(c for c in self.a if c in self.b and c not in self.out)

    @property
    def left(self) -> str:
        return "".join(c for c in self.out if c in self.a and c not in self.b)

    @property
    def right(self) -> str:
        return "".join(c for c in self.out if c in self.b and c not in self.a)


def einsum_to_matmul(model: ir.Model) -> int:
    """Rewrite every Einsum that is a single matrix product. Returns their number. Left unchanged: other numbers of
    operands, ellipses, a repeated letter in an operand, a letter summed over one operand alone, an outer product."""
    nodes = [node for node in model.graph if node.op_type == "Einsum" and node.domain == ""]
    if not nodes:
        return 0
    known = Inference(model)
    count = sum(_rewrite(model, known, node) for node in nodes)
    Inference(model)  # shapes of what is new
    return count


def _rewrite(model: ir.Model, known: Inference, node: ir.Node) -> bool:
    letters = _letters(node.attributes.get_string("equation", "") or "")
    if letters is None or node.outputs[0].dtype is None:
        return False
    a, b = node.inputs
    if is_constant(a) and not is_constant(b):  # the weight on the right
        a, b, letters = b, a, _Letters(letters.b, letters.a, letters.out)
    dims = _dims(known, letters, (a, b))
    if a is None or b is None or dims is None:
        return False
    builder, weight = _Builder(Names(model), node, dims), array_of(b)
    if weight is not None and not letters.batch and letters.left:
        found = _linear(builder, letters, a, weight)
    elif len(letters.left) == len(letters.right) == len(letters.summed) == 1:
        found = _product(builder, letters, a, b)
    else:
        return False
    if found:
        result = known.dims_of(node.outputs[0])
        if result is not None:
            known.dims[builder.nodes[-1].outputs[0]] = result
        replace(model, node, builder.nodes)
    return found


def _letters(equation: str) -> _Letters | None:
    operands, arrow, out = equation.replace(" ", "").partition("->")
    a, comma, b = operands.partition(",")
    if not arrow:  # the letters that occur once, in alphabetical order
        out = "".join(sorted(c for c in {*a, *b} if (a + b).count(c) == 1))
    letters = _Letters(a, b, out)
    plain = comma and "," not in b and "." not in equation
    twice = any(len(set(part)) != len(part) for part in (a, b, out))
    alone = set(a) ^ set(b)
    return letters if plain and not twice and alone <= set(out) and letters.summed else None


def _dims(known: Inference, letters: _Letters, operands: Sequence[ir.Value | None]) -> dict[str, Extent] | None:
    """The size of each letter; None if a size is unknown or an axis is broadcast."""
    extents: dict[str, Extent] = {}
    for part, value in zip((letters.a, letters.b), operands, strict=True):
        dims = known.dims_of(value)
        if dims is None or len(dims) != len(part):
            return None
        for letter, size in zip(part, dims, strict=True):
            if isinstance(size, Unknown) or extents.setdefault(letter, size) != size:
                return None
    return extents


class _Builder:
    """The nodes that replace one node, in order; each reads the previous one."""

    def __init__(self, names: Names, node: ir.Node, dims: dict[str, Extent]) -> None:
        self.names, self.stem, self.dims, self.nodes = names, stem(node), dims, list[ir.Node]()
        self.type = node.outputs[0].type

    def transpose(self, value: ir.Value, before: str, after: str) -> ir.Value:
        if before == after:
            return value
        return self._add("Transpose", [value], perm=[before.index(letter) for letter in after])

    def reshape(self, value: ir.Value, before: Dims, after: Dims) -> ir.Value | None:
        target = view_shape(before, after)
        if before == after or target is None:
            return value if before == after else None
        shape = self.names.constant(np.array(target, np.int64), f"{self.stem}.shape")
        return self._add("Reshape", [value, shape])

    def matmul(self, left: ir.Value, right: ir.Value) -> ir.Value:
        return self._add("MatMul", [left, right])

    def sizes(self, letters: str) -> Dims:
        return tuple(self.dims[letter] for letter in letters)

    def _add(self, operator: str, inputs: list[ir.Value], **attributes: list[int]) -> ir.Value:
        node = self.names.node(operator, inputs, f"{self.stem}/{operator}", attributes)
        node.outputs[0].type = self.type
        self.nodes.append(node)
        return node.outputs[0]


def _linear(builder: _Builder, letters: _Letters, x: ir.Value, weight: npt.NDArray[np.generic]) -> bool:
    """Transpose(Reshape(Reshape(Transpose(x)) @ W)), W [summed, right] a constant; each only where it moves axes."""
    left, summed, right = letters.left, letters.summed, letters.right
    order = [letters.b.index(letter) for letter in summed + right]
    depth = int(np.prod([weight.shape[axis] for axis in order[: len(summed)]]))
    matrix = np.ascontiguousarray(weight.transpose(order).reshape(depth, -1))
    rows, columns = builder.sizes(left), builder.sizes(right)
    moved = builder.transpose(x, letters.a, left + summed)
    flat = builder.reshape(moved, (*rows, *builder.sizes(summed)), (*rows, depth))
    if flat is None:
        return False
    product = builder.matmul(flat, builder.names.constant(matrix, f"{builder.stem}.weight_t"))
    wide = builder.reshape(product, (*rows, matrix.shape[1]), (*rows, *columns))
    if wide is None:
        return False
    builder.transpose(wide, left + right, letters.out)
    return True


def _product(builder: _Builder, letters: _Letters, a: ir.Value, b: ir.Value) -> bool:
    batch, left, summed, right = letters.batch, letters.left, letters.summed, letters.right
    first = builder.transpose(a, letters.a, batch + left + summed)
    second = builder.transpose(b, letters.b, batch + summed + right)
    builder.transpose(builder.matmul(first, second), batch + left + right, letters.out)
    return True


# --- Batch normalisation, and any scale and shift of whole channels, folded into the convolution before it ------------
# With running mean m and variance v: gamma (W x + b - m) / sqrt(v + eps) + beta = (s W) x + s (b - m) + beta, s = gamma
# / sqrt(v + eps). Source: arXiv 1502.03167, section 3.1. Computed in float64 and rounded once.


Floats = npt.NDArray[np.float64]


def fold_into_convolutions(model: ir.Model) -> int:
    """Fold BatchNormalization, Mul, Div, Add and Sub by constants per channel. Returns the number of nodes removed."""
    count = 0
    for node in list(model.graph):
        if node.op_type in ("BatchNormalization", "Mul", "Div", "Add", "Sub") and node.domain == "":
            count += _fold(model, node)
    return count


def _fold(model: ir.Model, node: ir.Node) -> bool:
    # The convolution is the first input; the constant of an Add or Mul may come first too.
    for value in node.inputs[: 2 if node.op_type in ("Add", "Mul") else 1]:
        convolution = producer(value, "Conv")
        if convolution is None or value is None or len(value.uses()) != 1 or value.is_graph_output():
            continue
        weight, bias = array_of(convolution.inputs[1]), None
        if weight is None or weight.dtype != np.float32:
            continue
        if len(convolution.inputs) > 2 and convolution.inputs[2] is not None:
            bias = array_of(convolution.inputs[2])
            if bias is None:
                continue
        if node.op_type == "BatchNormalization":
            affine = _batch_norm(node, value, weight.shape[0])
        else:
            affine = affine_of(node, 1, weight.shape[0], weight.ndim, overridable=False)
        if affine is None or affine[0] is not value or not all(np.isfinite(part).all() for part in affine[1:]):
            continue
        _convolution_rewrite(model, convolution, weight, bias, *affine[1:])
        return bypass(node, value)
    return False


def _batch_norm(node: ir.Node, value: ir.Value, channels: int) -> tuple[ir.Value, Floats, Floats] | None:
    """(x, scale, shift) of a BatchNormalization, as `affine_of`."""
    arrays = [array_of(constant) for constant in node.inputs[1:]]
    if len(node.outputs) != 1 or node.attributes.get_int("training_mode", False) or len(arrays) != 4:
        return None
    if any(array is None or array.shape != (channels,) for array in arrays):
        return None
    gamma, beta, mean, variance = (array.astype(np.float64) for array in arrays if array is not None)
    with np.errstate(divide="ignore", invalid="ignore"):
        scale = gamma / np.sqrt(variance + node.attributes.get_float("epsilon", 1e-5))
        return value, scale, beta - scale * mean


def _convolution_rewrite(
    model: ir.Model,
    convolution: ir.Node,
    weight: npt.NDArray[Any],
    bias: npt.NDArray[Any] | None,
    scale: Floats,
    shift: Floats,
) -> None:
    old = convolution.inputs[1]
    assert old is not None
    if not np.all(scale == 1):
        column = scale.reshape(-1, *(1,) * (weight.ndim - 1))
        folded = Names(model).constant((weight * column).astype(np.float32), f"{old.name}.folded")
        convolution.replace_input_with(1, folded)
    moved = shift + (scale * bias if bias is not None else 0.0)
    new_bias = Names(model).constant(moved.astype(np.float32), f"{old.name}.bias")
    convolution.resize_inputs(3)
    convolution.replace_input_with(2, new_bias)


# --- Gathers that are views: by a grid of indices, and Gathers that keep every element in its place -------------------
# The latter come from PyTorch's `as_strided`, for example in adaptive pooling: `as_strided(x, size, stride)` is
# exported as x.reshape(-1)[index] with index[i, j, ...] = offset + i s_0 + j s_1 + ..., summed up from Range nodes and
# constants. If the strides are those of a contiguous tensor of that size, it is x.reshape(size).


# Nodes between an index and the Range of its outermost axis: one Mul, one Unsqueeze, and an Add for each other axis.
DEPTH = 12
INDEX_OPERATORS = ("Add", "Mul", "Unsqueeze")
# Numbers assumed for free sizes.
FREE = (2, 5)


def flatten_gathers(model: ir.Model) -> int:
    """Rewrite a Gather by a grid of indices, which turns one axis into two, as a Gather by a list and a Reshape, in
    place. Returns the number of rewrites.

    `unfold` is exported this way. OpenVINO 2026.4 moves channel scales past a Gather as if it kept the number of axes,
    and then rejects its own graph. Left unchanged: constants, computed indices, results of unknown sizes.
    """
    grids = [
        node for node in model.graph if node.op_type == "Gather" and node.domain == "" and _indices(node) is not None
    ]
    known = Inference(model) if grids else None
    count = 0
    for node in grids:
        data, indices = node.inputs[0], _indices(node)
        assert known is not None and data is not None and indices is not None
        dims, expected = known.dims_of(data), known.dims_of(node.outputs[0])
        if is_constant(data) or dims is None or expected is None:
            continue
        axis = node.attributes.get_int("axis", 0) % len(dims)
        flat = (*dims[:axis], int(indices.size), *dims[axis + 1 :])
        target = view_shape(flat, expected)
        if target is None:
            continue
        names = Names(model)
        listed = names.constant(indices.reshape(-1), f"{stem(node)}.indices")
        shape = names.constant(np.array(target, np.int64), f"{stem(node)}.shape")
        gather = names.node("Gather", [data, listed], f"{stem(node)}/Gather", {"axis": axis})
        gather.outputs[0].type = node.outputs[0].type
        reshape = names.node("Reshape", [gather.outputs[0], shape], f"{stem(node)}/Reshape")
        known.dims[gather.outputs[0]], known.dims[reshape.outputs[0]] = flat, expected
        replace(model, node, [gather, reshape])
        count += 1
    if count:
        Inference(model)  # shapes of the new nodes
    return count


def viewed(known: Inference, node: ir.Node) -> tuple[ir.Value, Dims] | None:
    """(x, size) of a Gather that is x.reshape(size); None for any other Gather."""
    data, index = node.inputs
    shape, dims = known.dims_of(data), known.dims_of(index)
    if data is None or shape is None or len(shape) != 1 or dims is None or product(dims) != shape[0]:
        return None
    for free in FREE:  # the index is a polynomial in a free size: if it fits for two sizes, it fits for all
        array = at_size(known, index, free)
        if array is None or array.dtype.kind != "i" or array.shape != sizes_at(dims, free):
            return None
        if not np.array_equal(array.ravel(), np.arange(array.size)):
            return None
    flat = producer(data, "Reshape")
    source = flat.inputs[0] if flat is not None else None
    return (source or data), dims


def at_size(known: Inference, value: ir.Value | None, free: int, depth: int = DEPTH) -> npt.NDArray[Any] | None:
    """The content of a tensor computed from constants, sizes and Range nodes, with `free` for every free size; None for
    any other tensor."""
    array, contents = array_of(value), known.contents_of(value)
    if value is None or array is not None:
        return array
    if contents is not None and value.dtype is not None:
        numbers = sizes_at(tuple(contents.ravel()), free)
        return None if numbers is None else np.array(numbers, value.dtype.numpy()).reshape(contents.shape)
    node, dims = value.producer(), known.dims_of(value)
    if node is None or node.domain != "" or depth == 0 or node.op_type not in ("Expand", "Range", *INDEX_OPERATORS):
        return None
    inputs = node.inputs[:1] if node.op_type == "Expand" else node.inputs
    operands = [each for one in inputs if (each := at_size(known, one, free, depth - 1)) is not None]
    if len(operands) < len(inputs):
        return None
    try:
        if node.op_type == "Range":
            return np.arange(*(operand.item() for operand in operands))
        if node.op_type == "Expand":
            shape = sizes_at(dims, free) if dims is not None else None
            return None if shape is None else np.broadcast_to(operands[0], shape)
        if node.op_type == "Unsqueeze":
            return np.expand_dims(operands[0], tuple(map(int, operands[1].ravel())))
        return np.add(*operands) if node.op_type == "Add" else np.multiply(*operands)
    except ValueError:  # mismatched shapes, which the runtime will report
        return None


def sizes_at(sizes: Dims, free: int) -> tuple[int, ...] | None:
    """The sizes, with `free` for every free size; None if one is unknown."""
    found = []
    for size in sizes:
        if isinstance(size, Unknown):
            return None
        found.append(size if isinstance(size, int) else size.factor * free ** len(size.names))
    return tuple(found)


def _indices(node: ir.Node) -> np.ndarray | None:
    """The constant indices of a Gather if they have several axes."""
    array = array_of(node.inputs[1])
    return array if array is not None and array.ndim > 1 else None


# --- Attention in one form --------------------------------------------------------------------------------------------
# Softmax(scale q @ Transpose(k) [+ mask]) @ v, which OpenVINO, ONNX Runtime and TensorRT fuse.
#
# Source: arXiv 1706.03762, equation 1. Exporters put the scale after the product, or its root on both factors (PyTorch
# does, for range); they transpose the key through Reshape nodes, and clear rows that are fully masked.


# If a mask leaves every row a value above this, no finite scores can become a row of minus infinity.
UNMASKED = -1e30


def canonical_attention(model: ir.Model) -> int:
    """Rewrite every attention into the form above. Returns the number of rewritten nodes."""
    count = 0
    for node in list(model.graph):
        if node.op_type == "Softmax" and node.domain == "" and over_last_axis(node):
            count += _without_nan_check(model, node)
            product = _scores(node)
            if product is not None:
                count += _scale_on_query(model, *product)
        elif node.op_type == "Reshape" and node.graph is not None:
            count += _plain_transpose(model, node)
    return count


def _scores(softmax: ir.Node) -> tuple[ir.Node, ir.Node | None] | None:
    """The product of query and key before a Softmax, and the Mul or Div that scales it, if any."""
    value = softmax.inputs[0]
    masked = operands(producer(value, "Add"), "Add")
    for candidate in masked or (value,):
        for operator in ("Mul", "Div"):
            scaled = with_constant(producer(candidate, operator), operator)
            product = producer(scaled[0], "MatMul") if scaled is not None else None
            if product is not None and candidate is not None:
                return product, candidate.producer()
        product = producer(candidate, "MatMul")
        if product is not None and not is_constant(product.inputs[1]):
            return product, None
    return None


def _scale_on_query(model: ir.Model, product: ir.Node, scaling: ir.Node | None) -> bool:
    """Put one Mul on the query, with the product of all factors after the MatMul, on the query and on the key."""
    query, key = product.inputs
    if query is None or key is None:
        return False
    behind = scaled_input(scaling)
    on_query, on_key = scaled_input(query.producer()), scaled_input(_below_transpose(key))
    if behind is None and on_key is None:
        return False
    factor = float(np.prod([found[1] for found in (behind, on_query, on_key) if found is not None]))
    if on_key is not None:
        new_key = _without_factor(model, key, on_key[0])
        product.replace_input_with(1, new_key)
    dtype = (query.dtype or ir.DataType.FLOAT).numpy()
    names = Names(model)
    constant = names.constant(np.array(factor, dtype), f"{stem(product)}.scale")
    source = on_query[0] if on_query is not None else query
    scaled = names.node("Mul", [source, constant], f"{stem(product)}/Mul_scale")
    scaled.outputs[0].type, scaled.outputs[0].shape = query.type, query.shape
    model.graph.insert_before(product, scaled)
    product.replace_input_with(0, scaled.outputs[0])
    if scaling is not None and behind is not None:
        bypass(scaling, product.outputs[0])
    return True


def _below_transpose(key: ir.Value) -> ir.Node | None:
    """The node that may scale the key: the one before MatMul, or the one before the Transpose before it."""
    node = key.producer()
    if node is not None and node.op_type == "Transpose" and node.inputs[0] is not None:
        return node.inputs[0].producer()
    return node


def _without_factor(model: ir.Model, key: ir.Value, source: ir.Value) -> ir.Value:
    """The key without its Mul, with its Transpose kept."""
    node = key.producer()
    assert node is not None
    if node.op_type != "Transpose":
        return source
    if len(key.uses()) == 1:
        node.replace_input_with(0, source)
        return key
    copy = Names(model).node("Transpose", [source], f"{node.name}_key", dict(node.attributes))
    copy.outputs[0].type, copy.outputs[0].shape = key.type, key.shape
    model.graph.insert_after(node, copy)
    return copy.outputs[0]


def _without_nan_check(model: ir.Model, softmax: ir.Node) -> bool:
    """Replace Where(IsNaN(p), 0, p) by p, for a Softmax p with a finite score in every row.

    PyTorch's export writes it for fully masked rows. A NaN from the input is no longer hidden.
    """
    probability, value = softmax.outputs[0], softmax.inputs[0]
    users = {use.node.op_type: use.node for use in probability.uses()}
    if set(users) != {"IsNaN", "Where"} or len(probability.uses()) != 2:
        return False
    where = users["Where"]
    if where.inputs[0] is not users["IsNaN"].outputs[0] or where.inputs[2] is not probability:
        return False
    masked = operands(producer(value, "Add"), "Add")
    if masked is not None:
        masks = [array for array in map(array_of, masked) if array is not None]
        if not masks or not all(np.all(mask.max(axis=-1) > UNMASKED) if mask.ndim else False for mask in masks):
            return False
    return bypass(where, probability)


def _plain_transpose(model: ir.Model, node: ir.Node) -> bool:
    """Replace Reshape to rank 3, Transpose of the last two axes and Reshape back by one Transpose."""
    transpose = producer(node.inputs[0], "Transpose")
    first = producer(transpose.inputs[0], "Reshape") if transpose is not None else None
    if transpose is None or first is None or list(transpose.attributes.get_ints("perm", ())) != [0, 2, 1]:
        return False
    source = first.inputs[0]
    data, merged, result = (_shape(value) for value in (source, first.outputs[0], node.outputs[0]))
    if source is None or data is None or merged is None or result is None or len(merged) != 3 or len(data) < 3:
        return False
    if result[:-2] != data[:-2] or merged[1:] != data[-2:] or result[-2:] != data[-2:][::-1]:
        return False
    rank = len(data)
    perm = [*range(rank - 2), rank - 1, rank - 2]
    replace(
        model, node, [ir.node("Transpose", [source], attributes={"perm": perm}, name=f"{stem(node)}/Transpose_key")]
    )
    return True


def _shape(value: ir.Value | None) -> list[int | str] | None:
    """The sizes of a value, free ones by name; None if one is unknown."""
    if value is None or value.shape is None:
        return None
    sizes = [size if isinstance(size, int) else size.value for size in value.shape]
    return None if None in sizes else [size for size in sizes if size is not None]
