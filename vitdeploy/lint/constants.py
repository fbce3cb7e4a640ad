"""Rules on constants: what a cast to half precision made infinite, and what is no number (TRT6xx)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.rows import MOVES
from vitdeploy.graph.values import array_of
from vitdeploy.lint.support import Support
from vitdeploy.lint.view import GraphView, Hit, rule, type_name

_HALF = frozenset({ir.DataType.FLOAT16, ir.DataType.BFLOAT16})
_FLOATS = _HALF | {ir.DataType.FLOAT}
# Bounds that may be infinite.
_BOUNDS = frozenset({"Clip", "Max", "Min", "Pad"})


@rule(
    "TRT601",
    "error",
    "constants within the range of their type (float16: 65,504)",
    "keep what reads it in float, or scale the residual stream by a power of two",
)
def _overflowed(view: GraphView, support: Support) -> Iterator[Hit]:
    for value in view.model.graph.initializers.values():
        array = _floats(value, _HALF)
        if array is None:
            continue
        infinite = array[np.isinf(array)]
        if infinite.size and not _may_be_infinite(value, bool((infinite < 0).all())):
            found = f"{infinite.size} of {array.size} numbers are infinite in {type_name(value.dtype)}"
            yield Hit(str(value.name), found)


def _may_be_infinite(value: ir.Value, negative: bool) -> bool:
    """Bounds may be, and the minus infinity of masks: what the softmax reads with nothing but additions between."""
    return all(use.node.op_type in _BOUNDS or (negative and _masks(use.node)) for use in value.uses())


def _masks(node: ir.Node) -> bool:
    stack, seen = [node], set[ir.Node]()
    while stack:
        current = stack.pop()
        if current.op_type == "Softmax":
            return True
        if current not in seen and current.op_type in MOVES | {"Add", "Cast", "Concat", "Where"}:
            seen.add(current)
            stack += [use.node for output in current.outputs for use in output.uses()]
    return False


@rule("TRT602", "error", "constants that are numbers", "find the step that made it: the checkpoint, a fold or a cast")
def _not_numbers(view: GraphView, support: Support) -> Iterator[Hit]:
    for value in view.model.graph.initializers.values():
        array = _floats(value, _FLOATS)
        count = int(np.isnan(array).sum()) if array is not None else 0
        if array is not None and count:
            yield Hit(str(value.name), f"{count} of {array.size} numbers are NaN")


def _floats(value: ir.Value, types: frozenset[ir.DataType]) -> npt.NDArray[np.float32] | None:
    """The numbers of a constant of one of these types; others are not read from disk."""
    array = array_of(value, overridable=True) if value.dtype in types else None
    return array.astype(np.float32, copy=False) if array is not None else None


RULES = (_overflowed, _not_numbers)
