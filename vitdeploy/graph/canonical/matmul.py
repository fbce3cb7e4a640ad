"""Products as MatMul: Gemm, and Einsum of two operands, with a Transpose and a Reshape where its axes need them.

By the letters of an Einsum people write attention and projections: "bnd,dhe->bhne" is a linear, "bhie,bhje->bhij" the
scores. As MatMul they are found, rewritten and quantized as any other.
Source: ONNX's specification of Einsum-12.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.edit import Names, replace
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.shapes.sizes import Dims, Extent, Unknown, view_shape
from vitdeploy.graph.values import array_of, floats_of, is_constant, stem


def gemm_to_matmul(model: ir.Model) -> int:
    """Gemm with constant weights and bias, alpha = beta = 1, becomes MatMul + Add with the weight as [in, out].

    Left alone: other alpha or beta, a transposed input, weights that are computed. Returns how many were rewritten.
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
    """Rewrite every Einsum that is one product of matrices. Returns how many; left alone: other numbers of operands,
    ellipses, a letter twice in an operand, a letter of one operand that is summed up alone, an outer product."""
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
    if not arrow:  # in the order of the alphabet, what stands once
        out = "".join(sorted(c for c in {*a, *b} if (a + b).count(c) == 1))
    found = _Letters(a, b, out)
    plain = comma and "," not in b and "." not in equation
    twice = any(len(set(part)) != len(part) for part in (a, b, out))
    alone = set(a) ^ set(b)
    return found if plain and not twice and alone <= set(out) and found.summed else None


def _dims(known: Inference, letters: _Letters, operands: Sequence[ir.Value | None]) -> dict[str, Extent] | None:
    """The size of each letter; None if one is unknown, or an axis is to be broadcast."""
    found: dict[str, Extent] = {}
    for part, value in zip((letters.a, letters.b), operands, strict=True):
        dims = known.dims_of(value)
        if dims is None or len(dims) != len(part):
            return None
        for letter, size in zip(part, dims, strict=True):
            if isinstance(size, Unknown) or found.setdefault(letter, size) != size:
                return None
    return found


class _Builder:
    """The nodes that replace one, in their order; each reads the one before."""

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
