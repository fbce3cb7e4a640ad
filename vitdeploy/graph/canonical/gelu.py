"""GELU as one node, from the formulas that exporters write for it.

Source: arXiv 1606.08415: x Phi(x) = x/2 (1 + erf(x / sqrt 2)), and its approximation
x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))). The operator Gelu exists from opset 20 on.
"""

from __future__ import annotations

import math

import onnx_ir as ir

from vitdeploy.graph.canonical.polynomial import Polynomial, ancestors, is_close, polynomial
from vitdeploy.graph.edit import replace
from vitdeploy.graph.values import only_user

OPSET = 20
# What stands inside erf or tanh, as a polynomial in x.
INNER: dict[str, tuple[str, Polynomial]] = {
    "Erf": ("none", {(1,): math.sqrt(0.5)}),
    "Tanh": ("tanh", {(1,): math.sqrt(2 / math.pi), (3,): math.sqrt(2 / math.pi) * 0.044715}),
}
# The whole, in x and the value t of that function: x/2 (1 + t).
OUTER: Polynomial = {(1, 0): 0.5, (1, 1): 0.5}
# From t to the result: + 1, * x, * 0.5, or the same multiplied out.
OUTER_NODES = 4


def fuse_gelu(model: ir.Model) -> int:
    """Replace every written-out GELU, in any order of its operands. Returns how many; none below opset 20."""
    if model.graph.opset_imports.get("", 0) < OPSET:
        return 0
    return sum(_fuse(model, node) for node in list(model.graph) if node.op_type in INNER and node.domain == "")


def _fuse(model: ir.Model, node: ir.Node) -> bool:
    approximate, wanted = INNER[node.op_type]
    inner, t = node.inputs[0], node.outputs[0]
    for x in ancestors(inner):
        if is_close(polynomial(inner, [x]), wanted):
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
        if is_close(polynomial(value, [x, t]), OUTER):
            return value
    return None
