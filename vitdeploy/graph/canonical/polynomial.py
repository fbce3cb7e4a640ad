"""Read a few elementwise nodes as a polynomial, so that a formula is recognised in whatever order it was written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import onnx_ir as ir

from vitdeploy.graph.values import is_constant, scalar_of

# Exponents of each leaf -> coefficient: 0.5 x + 0.5 x t over the leaves (x, t) is {(1, 0): 0.5, (1, 1): 0.5}.
Polynomial = dict[tuple[int, ...], float]

# The longest formula here (tanh GELU) is 8 nodes deep.
DEPTH = 10
DEGREE = 4


def polynomial(value: ir.Value | None, leaves: Sequence[ir.Value], depth: int = DEPTH) -> Polynomial | None:
    """`value` as a polynomial over `leaves`, read through Add, Sub, Mul, Neg, Div by a constant and Pow by a whole one.

    None if it depends on anything else, or by other operators.
    """
    if value is None:
        return None
    if value in leaves:
        return {tuple(int(leaf is value) for leaf in leaves): 1.0}
    number = scalar_of(value)
    if number is not None:
        return {(0,) * len(leaves): number}
    node = value.producer()
    if (
        node is None
        or node.domain != ""
        or depth == 0
        or node.op_type not in ("Add", "Sub", "Mul", "Div", "Neg", "Pow")
    ):
        return None
    left = polynomial(node.inputs[0], leaves, depth - 1)
    if left is None:
        return None
    if node.op_type == "Neg":
        return _scaled(left, -1.0)
    right = polynomial(node.inputs[1], leaves, depth - 1)
    return None if right is None else _combined(node.op_type, left, right)


def _combined(operator: str, left: Polynomial, right: Polynomial) -> Polynomial | None:
    if operator == "Add":
        return _sum(left, right)
    if operator == "Sub":
        return _sum(left, _scaled(right, -1.0))
    if operator == "Mul":
        return _product(left, right)
    constant = _constant(right)
    if constant is None:
        return None
    if operator == "Div":
        return _scaled(left, 1.0 / constant) if constant else None
    if constant != int(constant) or not 1 <= constant <= DEGREE:
        return None
    power: Polynomial | None = left
    for _ in range(int(constant) - 1):
        power = _product(power, left) if power is not None else None
    return power


def is_close(found: Polynomial | None, wanted: Polynomial, tolerance: float = 1e-5) -> bool:
    """Equal up to the rounding of constants that were written in float32."""
    return found is not None and all(
        abs(found.get(key, 0.0) - wanted.get(key, 0.0)) <= tolerance * max(abs(wanted.get(key, 0.0)), 1e-2)
        for key in found.keys() | wanted.keys()
    )


def ancestors(value: ir.Value | None, depth: int = DEPTH) -> Iterator[ir.Value]:
    """The computed values that `value` is made of by the operators of a polynomial, nearest first, each once."""
    level, seen = [value], set()
    for _ in range(depth):
        below = []
        for current in level:
            if current is None or current in seen or is_constant(current):
                continue
            seen.add(current)
            yield current
            node = current.producer()
            if node is not None and node.op_type in ("Add", "Sub", "Mul", "Div", "Neg", "Pow"):
                below += list(node.inputs)
        level = below


def _sum(a: Polynomial, b: Polynomial) -> Polynomial:
    return {key: a.get(key, 0.0) + b.get(key, 0.0) for key in a.keys() | b.keys()}


def _product(a: Polynomial, b: Polynomial) -> Polynomial | None:
    result: Polynomial = {}
    for left, x in a.items():
        for right, y in b.items():
            key = tuple(i + j for i, j in zip(left, right, strict=True))
            if sum(key) > DEGREE:
                return None
            result[key] = result.get(key, 0.0) + x * y
    return result


def _scaled(a: Polynomial, factor: float) -> Polynomial:
    return {key: value * factor for key, value in a.items()}


def _constant(a: Polynomial) -> float | None:
    return next(iter(a.values())) if len(a) == 1 and not any(next(iter(a))) else None
