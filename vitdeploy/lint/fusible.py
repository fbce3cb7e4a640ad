"""Find attention as a fused kernel would match it: two matrix products, a softmax, and all nodes between them.

The order of nodes is that of ModelOpt's graphs, with optional nodes in brackets:

    Q -> DQ -> MatMul -> [Mul or Div] -> [Add or Where] -> Softmax -> [Cast] -> Q -> DQ -> MatMul -> Q -> DQ

`graph.analysis.attention` finds attention by what it computes, in float32, for rewrites that must be exact. This finder
takes any type, passes quantizers, and keeps unexpected nodes, so that a rule can name them.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from vitdeploy.graph.analysis.rows import MOVES, climb
from vitdeploy.graph.values import dim, rank_of
from vitdeploy.lint.quantizers import quantized_type
from vitdeploy.lint.view import QDQ, GraphView, is_weight

# On the ways from the first product to the softmax, and from there to the second.
_SCORES = QDQ | MOVES | {"Add", "Cast", "Div", "Mul", "Sub", "Tanh", "Where"}
_PROBABILITIES = QDQ | MOVES | {"Cast", "Dropout", "Mul", "Where"}


@dataclass(frozen=True)
class Fusible:
    """One attention: `between` are the nodes from the scores to the softmax, `after` those from there to `mix`."""

    scores: ir.Node
    between: tuple[ir.Node, ...]
    softmax: ir.Node
    after: tuple[ir.Node, ...]
    mix: ir.Node

    @property
    def operands(self) -> dict[str, ir.DataType | None]:
        """The quantized type of each operand of the two products; None if it comes from no quantizer."""
        first, second = self.scores.inputs, self.mix.inputs
        places = {"query": first[0], "key": first[1], "softmax": second[0], "value": second[1]}
        return {name: _type_behind(value) for name, value in places.items()}

    @property
    def output(self) -> ir.DataType | None:
        """That of the quantizer which reads the result, and may be there for the next layer alone."""
        return _type_ahead(self.mix.outputs[0])

    @property
    def dtype(self) -> ir.DataType | None:
        """The type that the products compute in: the quantized one where operands and output have it."""
        types = {*self.operands.values(), self.output}
        if len(types) == 1 and None not in types:
            return types.pop()
        query = self.scores.inputs[0]
        return query.dtype if query is not None else None

    @property
    def head(self) -> int | None:
        return dim(self.scores.inputs[0], -1)

    @property
    def lengths(self) -> tuple[int | None, int | None]:
        """The numbers of queries and of keys."""
        output = self.scores.outputs[0]
        return dim(output, -2), dim(output, -1)


def _type_behind(value: ir.Value | None) -> ir.DataType | None:
    node = climb(value, MOVES | {"Cast"})[0].producer() if value is not None else None
    return quantized_type(node) if node is not None and node.op_type == "DequantizeLinear" else None


def _type_ahead(value: ir.Value) -> ir.DataType | None:
    """The type of the quantizer that reads `value`, perhaps behind what moves numbers."""
    while len(uses := list(value.uses())) == 1 and uses[0].node.op_type in MOVES:
        value = uses[0].node.outputs[0]
    return next((quantized_type(use.node) for use in uses if use.node.op_type == "QuantizeLinear"), None)


def find_fusible(view: GraphView) -> list[Fusible]:
    """All attentions of the main graph: a product of two computed tensors, a softmax over its rows, another product."""
    found = []
    for softmax in view.of("Softmax"):
        axis, axes = int(softmax.attributes.get_int("axis", -1)), rank_of(softmax.outputs[0])
        first, below = softmax.inputs[0], _to_mix(softmax)
        above = _to_scores(first) if first is not None and (axis == -1 or axis + 1 == axes) else None
        if above is not None and below is not None:
            found.append(Fusible(above[0], tuple(above[1:]), softmax, tuple(below[:-1]), below[-1]))
    return found


def _to_scores(value: ir.Value) -> list[ir.Node] | None:
    """The nodes from the first product to `value`, in graph order; None if there is no way to one."""
    ways, seen = [(value, list[ir.Node]())], set[ir.Value]()
    while ways:
        value, way = ways.pop(0)  # the nearest product first: a mask may be one, too
        node = value.producer()
        if node is None or node.domain or value in seen:
            continue
        seen.add(value)
        if node.op_type == "MatMul" and not any(is_weight(operand) for operand in node.inputs):
            return [node, *reversed(way)]
        if node.op_type in _SCORES:
            ways += [(operand, [*way, node]) for operand in node.inputs if operand is not None]
    return None


def _to_mix(softmax: ir.Node) -> list[ir.Node] | None:
    """The nodes from behind the softmax to the product with the values, in graph order."""
    ways, seen = [(softmax, list[ir.Node]())], set[ir.Node]()
    while ways:
        node, way = ways.pop(0)
        for use in node.outputs[0].uses():
            if use.node.op_type == "MatMul" and use.idx == 0 and not is_weight(use.node.inputs[1]):
                return [*way, use.node]
            if use.node.op_type in _PROBABILITIES and use.node not in seen:
                seen.add(use.node)
                ways.append((use.node, [*way, use.node]))
    return None
