"""Fewer, fuller tiles: the linears of the blocks compute their rows in parts, such as 192 and 5 of 197. Exact.

INT8 kernels are fastest on whole tiles of rows. A linear over 197 tokens may take longer than one over 192 and one over
5 together. What works on each row alone is written once for each part, between a Split where tokens come from
something else, as from attention, and a Concat where something else reads them: the same constants, the same scales,
the same integers. Unlike more rows than tokens (`row_alignment`) nothing is computed twice. It is done on the placed
graph, with its Q/DQ. Which parts are fast, if any, is a property of the runtime, the CPU and the width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.rowwise import rows_of_inputs
from vitdeploy.graph.edit import Editor, drop_unused
from vitdeploy.graph.values import array_of, dim, is_constant, rank_of

TOKENS = 1  # the axis of the tokens in [batch, tokens, channels]
QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
TILES = (64, 32, 16)


def parts_of(tokens: int) -> list[tuple[int, ...]]:
    """Parts that may be faster than all tokens together: as many whole tiles as there are, of 16 to 64 rows, and the
    rest."""
    whole = dict.fromkeys(tokens // tile * tile for tile in TILES)
    return [(rows, tokens - rows) for rows in whole if 0 < rows < tokens]


def work_by_tokens(model: ir.Model) -> dict[int, int]:
    """MACs at batch 1 of the linears over each number of tokens that work on each row alone, the most first."""
    complete_shapes(model)
    work: dict[int, int] = {}
    for node in model.graph:
        tokens = dim(node.outputs[0], TOKENS)
        if _is_linear(node) and tokens is not None and tokens > 1:
            work[tokens] = work.get(tokens, 0) + tokens * (dim(node.inputs[1], 0) or 0) * (dim(node.inputs[1], 1) or 0)
    return dict(sorted(work.items(), key=lambda item: -item[1]))


def split_rows(model: ir.Model, parts: Sequence[int]) -> int:
    """Let the linears over sum(parts) tokens, and what lies between them, compute their rows in such parts; in place.

    Args:
        model: a float graph in canonical form, or a placed one.

    Returns: the number of linears that do.

    Raises:
        GraphError: parts that are none, or no linear over so many tokens.
    """
    if len(parts) < 2 or min(parts) < 1:
        found = ", ".join(map(str, parts)) or "none"
        raise GraphError("rows are split into parts", found=found, wanted="two or more numbers from 1 on")
    complete_shapes(model)
    tokens = sum(parts)
    computed = {node: inputs for node in model.graph if (inputs := _rows_of(node, tokens)) is not None}
    chosen = _ending_in_float(_with_linears(computed))
    if not chosen:
        there = " and ".join(map(str, work_by_tokens(model)))
        raise GraphError(
            "the rows of this graph cannot be split",
            found=f"linears over {there} tokens" if there else "no linear over tokens [batch, tokens, channels]",
            wanted=f"linears over {tokens} tokens",
        )
    linears = sum(map(_is_linear, chosen))
    _write(Editor(model), [node for node in model.graph if node in chosen], computed, parts)
    drop_unused(model)
    return linears


def complete_shapes(model: ir.Model) -> None:
    """Give what quantizers make its type and shape, which placements leave out."""
    for node in model.graph:
        if node.op_type not in QUANTIZERS or node.domain or node.inputs[0] is None or node.inputs[1] is None:
            continue
        output, zero_point = node.outputs[0], node.inputs[2] if len(node.inputs) > 2 else None
        if output.shape is None:
            output.shape = node.inputs[0].shape
        typed = node.inputs[1] if node.op_type == "DequantizeLinear" else zero_point
        if output.type is None and typed is not None:
            output.type = typed.type


def _rows_of(node: ir.Node, tokens: int) -> tuple[ir.Value, ...] | None:
    """The computed inputs of a node that makes each of its rows of the same row of them; None of any other node."""
    output = node.outputs[0]
    if len(node.outputs) != 1 or rank_of(output) != 3 or dim(output, TOKENS) != tokens or output.is_graph_output():
        return None
    computed = tuple(value for value in node.inputs if value is not None and not _is_weight(value))
    if node.op_type == "Reshape" or any((rank_of(each), dim(each, TOKENS)) != (3, tokens) for each in computed):
        return None
    if node.op_type in QUANTIZERS and not node.domain:
        return computed if len(computed) == 1 and _of_one_scale(node) else None
    rows = rows_of_inputs(node, TOKENS, tokens)
    if rows is None or any(axis != TOKENS for axis in rows.values()):
        return None
    return computed if computed and {node.inputs[i] for i in rows} == set(computed) else None


def _of_one_scale(node: ir.Node) -> bool:
    scale = node.inputs[1]
    return scale is not None and scale.const_value is not None and scale.const_value.size == 1


def _is_weight(value: ir.Value) -> bool:
    """Whether it is a constant, or one in INT8 behind its DequantizeLinear."""
    if is_constant(value, overridable=True):
        return True
    node = value.producer()
    return node is not None and node.op_type == "DequantizeLinear" and is_constant(node.inputs[0], overridable=True)


def _is_linear(node: ir.Node) -> bool:
    weight = node.inputs[1] if node.op_type == "MatMul" and not node.domain else None
    return weight is not None and _is_weight(weight) and rank_of(node.outputs[0]) == 3


def _with_linears(computed: Mapping[ir.Node, Iterable[ir.Value]]) -> set[ir.Node]:
    """The nodes that a linear among them is connected with."""
    neighbours: dict[ir.Node, set[ir.Node]] = {node: set() for node in computed}
    for node, inputs in computed.items():
        for value in inputs:
            producer = value.producer()
            if producer in neighbours and producer is not None:
                neighbours[node].add(producer)
                neighbours[producer].add(node)
    reached: set[ir.Node] = set()
    waiting = [node for node in computed if _is_linear(node)]
    while waiting:
        node = waiting.pop()
        if node not in reached:
            reached.add(node)
            waiting += neighbours[node]
    return reached


def _ending_in_float(nodes: set[ir.Node]) -> set[ir.Node]:
    """Without quantizers at the end whose zero point is not 0: a runtime that joins quantized parts may give each row a
    zero point of its own, which OpenVINO 2026.4 then cannot bring behind a product."""
    kept = set(nodes)
    while ends := {node for node in kept if _is_asymmetric(node) and _read_outside(node, kept)}:
        kept -= ends
    return kept


def _is_asymmetric(node: ir.Node) -> bool:
    zero_point = array_of(node.inputs[2]) if node.op_type in QUANTIZERS and len(node.inputs) > 2 else None
    return zero_point is not None and bool(zero_point.any())


def _read_outside(node: ir.Node, nodes: Collection[ir.Node]) -> bool:
    return any(use.node not in nodes for use in node.outputs[0].uses())


def _write(
    editor: Editor, nodes: Sequence[ir.Node], computed: Mapping[ir.Node, Iterable[ir.Value]], parts: Sequence[int]
) -> None:
    """Replace `nodes`, in graph order, by a copy for each part. Part by part at each node, so that the weights of a
    linear are still in the cache for its next part."""
    inside, split = set(nodes), dict[ir.Value, Sequence[ir.Value]]()
    sizes = editor.constant(np.array(parts, np.int64), "rows.parts")
    for node in nodes:
        for value in computed[node]:
            if value not in split:
                shapes = [_resized(value, part) for part in parts]
                split[value] = editor.node(node, "Split", [value, sizes], f"{value.name}.rows", *shapes, axis=TOKENS)
        output = node.outputs[0]
        split[output] = [_copy(editor, node, split, i, part) for i, part in enumerate(parts)]
        readers = [(use.node, use.idx) for use in output.uses() if use.node not in inside]
        if readers:
            [whole] = editor.node(
                node, "Concat", list(split[output]), f"{output.name}.joined", output.shape, axis=TOKENS
            )
            for reader, index in readers:
                reader.replace_input_with(index, whole)


def _copy(editor: Editor, node: ir.Node, split: Mapping[ir.Value, Sequence[ir.Value]], i: int, part: int) -> ir.Value:
    """What a node makes of the rows of one part."""
    inputs = [split[value][i] if value in split else value for value in node.inputs if value is not None]
    output = node.outputs[0]
    name = f"{output.name}.rows{i}"
    [copied] = editor.node(node, node.op_type, inputs, name, _resized(output, part), **dict(node.attributes))
    copied.type = output.type
    return copied


def _resized(value: ir.Value, rows: int) -> list[int | ir.SymbolicDim]:
    shape = list(value.shape or ())
    shape[TOKENS] = rows
    return shape
