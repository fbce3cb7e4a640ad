"""Align and split the rows of products."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.attention import TOKENS, Attention, find_attentions, reads_first, residual
from vitdeploy.graph.analysis.rows import Linear, Rows, is_layout, rows_of_inputs
from vitdeploy.graph.edit import Editor, drop_unused, replace
from vitdeploy.graph.values import array_of, dim, is_constant, producer, rank_of

# --- More rows than tokens, for runtimes whose kernels are faster with them -------------------------------------------
# Exact, since nothing reads the extra rows.
#
# A linear over 197 tokens may take longer than one over 200 or 208, whose rows fill the tiles of the kernel. So extra
# rows, copies of the last tokens in reverse order, are appended to the residual stream before the first block.
# Row-wise operations carry them along; everything that depends on all tokens reads the first rows only: attention for
# its keys and values, an average over the tokens, an output. The fastest number depends on the runtime, the CPU and
# the width; `search.rows` chooses it by costs.
#
# A copy keeps the values of its token throughout, since its query meets the same keys. So no tensor takes a new value:
# the ranges of activations stay the same.


Use = tuple[ir.Node, int]


@dataclass
class _Flow:
    """Everything that gets extra rows. `axes`: the row axis of every such tensor; `through`: the inputs of row-wise
    nodes; `constants`: their constant inputs with an entry per row, with the axis; `ends`: the inputs that read all
    rows of such a tensor together, in graph order."""

    axes: dict[ir.Value, int]
    through: list[Use] = field(default_factory=list)
    constants: list[tuple[ir.Node, int, int]] = field(default_factory=list)
    ends: list[Use] = field(default_factory=list)


def align_rows(model: ir.Model, rows: int) -> int:
    """Make the linears of the blocks compute `rows` rows per image, the tokens first; in place.

    Exact: every number that is read is computed as before (a runtime may sum a product of more rows in another order).
    If tokens are merged, `rows` applies before the first merge.

    Args:
        model: a graph in canonical form, or a placed one with the shapes of quantized tensors (`complete_shapes`).
        rows: more than the number of tokens, including class and register tokens, and less than twice that number.

    Returns: the number of linears that compute extra rows.

    Raises:
        GraphError: no such blocks, an operation in them that is not known to be row-wise, or an invalid number of rows.
    """
    attentions = find_attentions(model)
    stream, count = token_stream(attentions)
    if not count < rows < 2 * count:
        raise GraphError(
            f"{count} tokens cannot be aligned to {rows} rows",
            expected=f"{count + 1} to {2 * count - 1}",
            fix="choose a number in this range, or omit split_rows",
        )
    flow = _follow(model, stream, count)
    _check(attentions, flow, count)
    editor = Editor(model)
    linears = sum(index == 0 and _has_weight(node) for node, index in flow.through)
    ends = _raised(flow, stream)
    _extend(editor, flow, stream, count, rows)
    for value, axis in flow.axes.items():
        if value is not stream:
            editor.resize(value, (axis,), rows)
    ends.pop(stream, None)  # the stream itself still has only its tokens
    _shorten(editor, flow, ends, count)
    return linears


def token_stream(attentions: Iterable[Attention]) -> tuple[ir.Value, int]:
    """The residual stream before the first self-attention [batch, tokens, channels], and its number of tokens.

    Raises:
        GraphError: the graph has no such stream.
    """
    for attention in attentions:
        count, stream = dim(attention.softmax.outputs[0], -1), residual(attention)
        if count is not None and stream is not None:
            return stream[0], count
    raise _refused("no self-attention over a fixed number of tokens followed by a residual sum", "blocks of a ViT")


def _follow(model: ir.Model, stream: ir.Value, count: int) -> _Flow:
    flow = _Flow({stream: TOKENS})
    for node in model.graph:
        reads = {i: value for i, value in enumerate(node.inputs) if value is not None and value in flow.axes}
        found = _row_wise(node, flow.axes, count) if reads else None
        if found is not None:
            axis, inputs = found
            flow.axes.update((output, axis) for output in node.outputs)
            flow.through += [(node, i) for i in inputs if i in reads]
            flow.constants += [(node, i, own) for i, own in inputs.items() if i not in reads]
        flow.ends += [
            (node, i)
            for i, value in reads.items()
            if (found is None or i not in found[1]) and not (i == 0 and reads_first(node, flow.axes[value], count))
        ]
    return flow


def _row_wise(node: ir.Node, axes: dict[ir.Value, int], count: int) -> tuple[int, Rows] | None:
    """(axis of the outputs, axes of the inputs) of a node that computes extra rows from extra rows and constants."""
    if any(output.is_graph_output() for output in node.outputs):  # outputs keep their names and shapes
        return None
    for axis in range(len(node.outputs[0].shape or ())):
        rows = rows_of_inputs(node, axis, count) if dim(node.outputs[0], axis) == count else None
        operands = [(node.inputs[i], own) for i, own in (rows or {}).items()]
        held = [value is not None and axes.get(value) == own for value, own in operands]
        known = [is_constant(value, overridable=True) for value, _ in operands]
        if rows and any(held) and all(one or other for one, other in zip(held, known, strict=True)):
            return axis, rows
    return None


def _check(attentions: Iterable[Attention], flow: _Flow, count: int) -> None:
    """Check that every attention over this number of tokens attends to these tokens."""
    operands = {(each.scores, 1) for each in attentions} | {(each.mix, 1) for each in attentions}
    for attention in attentions:
        if dim(attention.softmax.outputs[0], -1) == count and attention.key not in flow.axes:
            ends = [f"{node.name} ({node.op_type})" for node, index in flow.ends if (node, index) not in operands]
            reason = f"{ends[0]}, which is not known to be row-wise" if ends else "other tokens"
            raise _refused(f"{reason}, before {attention.softmax.name}", "row-wise operations between attentions")


def _raised(flow: _Flow, stream: ir.Value) -> dict[ir.Value, list[Use]]:
    """The tensors whose first rows are needed, with their uses: moved as far up as layout operations with a single
    reader allow. Tensors after them get no extra rows."""
    ends: dict[ir.Value, list[Use]] = {}
    for node, index in flow.ends:
        value = node.inputs[index]
        assert value is not None
        use = (node, index)
        while len(list(value.uses())) == 1 and (producer := value.producer()) is not None:
            source = producer.inputs[0] if is_layout(producer) and len(producer.outputs) == 1 else None
            if source is None or source is stream or source not in flow.axes or len(list(source.uses())) > 1:
                break
            del flow.axes[value]
            value, use = source, (producer, 0)
        ends.setdefault(value, []).append(use)
    return ends


def _extend(editor: Editor, flow: _Flow, stream: ir.Value, count: int, rows: int) -> None:
    """Extend the stream, and the constants with an entry per row, to `rows` rows."""
    uses = [(node, index) for node, index in flow.through if node.inputs[index] is stream]
    shape = list(stream.shape or ())
    shape[TOKENS] = rows
    pads = editor.constant(np.array([0, 0, 0, 0, rows - count, 0], np.int64), "rows.pads")
    [extended] = editor.node(uses[0][0], "Pad", [stream, pads], "rows", shape, mode="reflect")
    for node, index in uses:
        node.replace_input_with(index, extended)
    for node, index, axis in flow.constants:
        array = array_of(node.inputs[index], overridable=True)
        assert array is not None
        widths = [(0, rows - count if own == axis else 0) for own in range(array.ndim)]
        editor.set_input(node, index, np.pad(array, widths, mode="reflect"))


def _shorten(editor: Editor, flow: _Flow, ends: dict[ir.Value, list[Use]], count: int) -> None:
    """Make the uses of tensors with extra rows read only the first `count` rows."""
    for value, uses in ends.items():
        first = editor.first(uses[0][0], value, flow.axes[value], count, f"{value.name}.tokens")
        for node, index in uses:
            node.replace_input_with(index, first)


def _refused(found: str, expected: str) -> GraphError:
    return GraphError("the rows of this graph cannot be aligned", found=found, expected=expected, fix="omit split_rows")


# --- Fewer, fuller tiles: the linears of the blocks compute their rows in parts, such as 192 and 5 of 197. Exact ------
# INT8 kernels are fastest on whole tiles of rows. A linear over 197 tokens may take longer than one over 192 and one
# over 5 together. Row-wise operations are written once per part, between a Split where the tokens come from other
# operations, such as attention, and a Concat where other operations read them: the same constants, scales and integers.
# Unlike with extra rows, nothing is computed twice. The pass runs on the placed graph, with its Q/DQ. Whether any parts
# are faster depends on the runtime, the CPU and the width.


QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")
TILES = (64, 32, 16)


def parts_of(tokens: int) -> list[tuple[int, ...]]:
    """Parts that may be faster than all tokens together: all whole tiles of 16 to 64 rows, and the rest."""
    whole = dict.fromkeys(tokens // tile * tile for tile in TILES)
    return [(rows, tokens - rows) for rows in whole if 0 < rows < tokens]


def layers_by_tokens(model: ir.Model) -> dict[int, list[tuple[int, int]]]:
    """(inputs, outputs) of the linears by their number of tokens, the most work first."""
    complete_shapes(model)
    layers: dict[int, list[tuple[int, int]]] = {}
    for node in model.graph:
        tokens = dim(node.outputs[0], TOKENS)
        if _is_linear(node) and tokens is not None and tokens > 1:
            layers.setdefault(tokens, []).append((dim(node.inputs[1], 0) or 0, dim(node.inputs[1], 1) or 0))
    return dict(sorted(layers.items(), key=lambda item: -item[0] * sum(k * n for k, n in item[1])))


def split_rows(model: ir.Model, parts: Sequence[int]) -> int:
    """Make the linears over sum(parts) tokens, and the row-wise nodes between them, compute their rows in these parts;
    in place.

    Args:
        model: a float graph in canonical form, or a placed one.

    Returns: the number of these linears.

    Raises:
        GraphError: invalid parts, or no linear over sum(parts) tokens.
    """
    if len(parts) < 2 or min(parts) < 1:
        found = ", ".join(map(str, parts)) or "no parts"
        raise GraphError("invalid split_rows", found=found, expected="two or more positive integers")
    complete_shapes(model)
    tokens = sum(parts)
    computed = {node: inputs for node in model.graph if (inputs := _rows_of(node, tokens)) is not None}
    chosen = _ending_in_float(_with_linears(computed))
    if not chosen:
        there = " and ".join(map(str, layers_by_tokens(model)))
        raise GraphError(
            "the rows of this graph cannot be split",
            found=f"linears over {there} tokens" if there else "no linear over tokens [batch, tokens, channels]",
            expected=f"linears over {tokens} tokens",
        )
    linears = sum(map(_is_linear, chosen))
    _write(Editor(model), [node for node in model.graph if node in chosen], computed, parts)
    drop_unused(model)
    return linears


def complete_shapes(model: ir.Model) -> None:
    """Set the types and shapes of quantizer outputs, which placements omit; in place."""
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
    """The computed inputs of a row-wise node; None for any other node."""
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
    """Whether a value is a constant, possibly a dequantized INT8 one."""
    if is_constant(value, overridable=True):
        return True
    node = value.producer()
    return node is not None and node.op_type == "DequantizeLinear" and is_constant(node.inputs[0], overridable=True)


def _has_weight(node: ir.Node) -> bool:
    """Whether a node is the product of a linear, with a constant weight, possibly in INT8."""
    weight = node.inputs[1] if node.op_type == "MatMul" and not node.domain else None
    return weight is not None and _is_weight(weight)


def _is_linear(node: ir.Node) -> bool:
    return _has_weight(node) and rank_of(node.outputs[0]) == 3


def _with_linears(computed: Mapping[ir.Node, Iterable[ir.Value]]) -> set[ir.Node]:
    """The nodes that are connected to a linear through nodes of `computed`."""
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
    """The nodes without quantizers at the end whose zero point is not 0: a runtime that joins quantized parts may give
    each row its own zero point, which OpenVINO 2026.4 cannot move past a product."""
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
    """Replace `nodes`, in graph order, by a copy for each part. The copies of one node follow each other, so that the
    weights of a linear are still in the cache for its next part."""
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
    """The output of a copy of the node for the rows of one part."""
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


# --- Feature maps of several levels become one list of tokens ---------------------------------------------------------
# They are joined as maps and transposed once, instead of one by one.


def join_before_transpose(model: ir.Model, linears: list[Linear]) -> int:
    """Concat(Transpose(x), Transpose(y), ...) -> Transpose(Concat(x, y, ...)), if one of `linears` reads it.

    Returns the number of rewrites. Transposes with other readers stay unchanged.
    """
    read, count = {linear.input for linear in linears}, 0
    for node in list(model.graph):
        if node.op_type != "Concat" or node.domain != "" or node.outputs[0] not in read:
            continue
        moved = [producer(value, "Transpose") for value in node.inputs]
        rank, perms = rank_of(node.outputs[0]), [_perm(each) for each in moved]
        if rank is None or perms[0] is None or any(perm != perms[0] for perm in perms):
            continue
        axis = node.attributes.get_int("axis", 0) % rank
        maps = [each.inputs[0] for each in moved if each is not None]
        joined = ir.node("Concat", maps, {"axis": perms[0][axis]}, name=f"{node.name}.maps")
        sizes = list(node.outputs[0].shape or ())
        joined.outputs[0].shape = ir.Shape([sizes[perms[0].index(i)] for i in range(rank)])
        joined.outputs[0].type = node.outputs[0].type
        back = ir.node("Transpose", joined.outputs, {"perm": list(perms[0])}, name=f"{node.name}.tokens")
        back.outputs[0].shape, back.outputs[0].type = node.outputs[0].shape, node.outputs[0].type
        replace(model, node, [joined, back])
        count += 1
    if count:
        drop_unused(model)
    return count


def _perm(transpose: ir.Node | None) -> tuple[int, ...] | None:
    """The permutation of a Transpose with a single reader; None for any other value."""
    if transpose is None or len(transpose.outputs[0].uses()) != 1 or transpose.outputs[0].is_graph_output():
        return None
    return tuple(transpose.attributes.get_ints("perm", ())) or None
