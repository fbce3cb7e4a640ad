"""Multiplications of a node, near enough to refuse a graph that nobody could run; also what `work` does not count."""

from __future__ import annotations

import math
from collections.abc import Callable

import onnx_ir as ir

from vitdeploy.graph.analysis.work import UnknownSize, macs_of

Sizes = Callable[[ir.Value | None], list[int]]


def effort(node: ir.Node, sizes: Sizes) -> int:
    """0 where a size is not known, and for operators that take a few operations an element."""
    rule = _RULES.get(node.op_type, macs_of)
    try:
        return max(0, rule(node, sizes))
    except (UnknownSize, IndexError, ValueError):
        return 0


def _einsum(node: ir.Node, sizes: Sizes) -> int:
    """The elements of the result, times the sizes of the labels that are summed over."""
    left, arrow, right = str(node.attributes.get_string("equation", "")).replace(" ", "").partition("->")
    if not arrow:  # the result has the labels that stand once
        right = "".join(name for name in left if left.count(name) == 1)
    found: dict[str, int] = {}
    for term, value in zip(left.split(","), node.inputs, strict=True):
        dims = sizes(value)
        before, dots, after = term.partition("...")
        found.update(zip(before, dims, strict=False))
        found.update(zip(reversed(after), reversed(dims), strict=False) if dots else ())
    return math.prod(sizes(node.outputs[0])) * math.prod(size for name, size in found.items() if name not in right)


def _recurrent(node: ir.Node, sizes: Sizes) -> int:
    steps, batch, width = sizes(node.inputs[0])
    directions, rows, hidden = sizes(node.inputs[2])
    return directions * steps * batch * rows * (width + hidden)


def _pool(node: ir.Node, sizes: Sizes) -> int:
    return math.prod(sizes(node.outputs[0])) * math.prod(
        int(size) for size in node.attributes.get_ints("kernel_shape", ()) or ()
    )


def _neighbours(node: ir.Node, sizes: Sizes) -> int:
    return math.prod(sizes(node.outputs[0])) * (node.attributes.get_int("size", 1) or 1)


def _regions(node: ir.Node, sizes: Sizes) -> int:
    return math.prod(sizes(node.outputs[0])) * max(2, node.attributes.get_int("sampling_ratio", 0) or 0) ** 2


def _suppressed(node: ir.Node, sizes: Sizes) -> int:
    return sizes(node.outputs[0])[0] * sizes(node.inputs[1])[-1]


def _attended(node: ir.Node, sizes: Sizes) -> int:
    return 2 * math.prod(sizes(node.outputs[0])) * sizes(node.inputs[1])[-2]


def _deformed(node: ir.Node, sizes: Sizes) -> int:
    return math.prod(sizes(node.outputs[0])) * math.prod(sizes(node.inputs[1])[1:])


_RULES: dict[str, Callable[[ir.Node, Sizes], int]] = {
    "Einsum": _einsum,
    **dict.fromkeys(("LSTM", "GRU", "RNN"), _recurrent),
    **dict.fromkeys(("MaxPool", "AveragePool", "LpPool"), _pool),
    "LRN": _neighbours,
    "RoiAlign": _regions,
    "NonMaxSuppression": _suppressed,
    "Attention": _attended,
    "DeformConv": _deformed,
}
