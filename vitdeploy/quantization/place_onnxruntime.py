"""Placement for ONNX Runtime."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from vitdeploy.graph import edit, values
from vitdeploy.graph.analysis.attention import Attention, find_attentions
from vitdeploy.graph.analysis.rows import (
    Linear,
    exclusive,
    find_linears,
    leaves,
    origin,
    static_shape,
)
from vitdeploy.graph.passes.folds import projection_of
from vitdeploy.quantization import folds, placement, rounding
from vitdeploy.quantization.ranges import QuantizedWeight, Range, separate_scores

# --- Attention as one operator of ONNX Runtime: no transposition, no score matrix in memory ---------------------------
# com.microsoft.MultiHeadAttention takes query, key and value as linears compute them, [batch, tokens, heads *
# channels], and returns [batch, tokens, heads * channels] for the projection. A tensor added to the scores is the input
# `attention_bias` [batch or 1, heads or 1, queries, keys]. Specification: onnxruntime/docs/ContribOperators.md.


DOMAIN = "com.microsoft"


def fuse_attention(model: ir.Model) -> int:
    """Replace every attention by one operator, in place, if query, key and value come from a linear each, in channel
    order, and at most one tensor is added to the scores. Exact except for the order of sums. Returns the number of
    replacements."""
    editor, count = edit.Editor(model), 0
    for attention in find_attentions(model):
        found = _operands(editor, attention)
        if found is None:
            continue
        linears, heads, projection = found
        old = projection.input
        producer = old.producer()
        assert producer is not None
        inputs: list[ir.Value | None] = [linear.output for linear in linears]
        if attention.between:
            inputs += [None, None, _for_each_query(editor, attention, producer)]  # no bias, no padded keys
        node = edit.Names(model).node(
            "MultiHeadAttention",
            inputs,
            f"{str(attention.softmax.name).removesuffix('/Softmax')}/MultiHeadAttention",
            {"num_heads": heads, "scale": 1.0},
            domain=DOMAIN,
        )
        ir.convenience.replace_nodes_and_values(model.graph, producer, [producer], [node], [old], node.outputs)
        count += 1
    if count:
        model.opset_imports[DOMAIN] = 1
        edit.drop_unused(model)
    return count


def _operands(editor: edit.Editor, attention: Attention) -> tuple[list[Linear], int, Linear] | None:
    """(query, key and value, the number of heads, the projection after them); None if the form does not fit."""
    if attention.between and _added(attention) is None:
        return None
    ends = ((attention.query, attention.scores), (attention.key, attention.scores), (attention.value, attention.mix))
    linears, columns = [], []
    for (value, reader), axes in zip(ends, ((2, 1, 3), (3, 1, 2), (2, 1, 3)), strict=True):
        linear = editor.linear_behind(origin(value))
        found = leaves(linear.output) if linear is not None else None
        if linear is None or found is None or linear.output.shape is None or len(linear.output.shape) != 3:
            return None
        own = exclusive(found, value, reader, linear.weight.shape[1])
        if own is None or own.ndim != 4:
            return None
        [source] = [leaf.source for leaf in found if leaf.value is value]
        rows = source.transpose(0, *axes).reshape(source.shape[0], source.shape[axes[0]], -1)
        whole = np.arange(np.prod(static_shape(linear.output) or ())).reshape(len(rows), -1, linear.weight.shape[1])
        if not np.array_equal(rows, whole):
            return None
        linears.append(linear)
        columns.append(own)
    behind = projection_of(editor, attention, columns[2][..., :1, :])
    if behind is None or (behind[1] != np.arange(len(behind[1]))).any():
        return None
    projection, heads = behind[0], columns[0].shape[1]
    alone = [node for node, _ in projection.input.uses()] == [projection.node]
    distinct = len({linear.node for linear in linears}) == len(linears)
    return (linears, heads, projection) if alone and distinct else None


def _added(attention: Attention) -> ir.Value | None:
    """The tensor [batch or 1, heads or 1, queries or 1, keys] added to the scores, if it is the only operation."""
    scores = attention.scores.outputs[0]
    if len(attention.between) != 1 or attention.between[0].op_type != "Add" or scores.shape is None:
        return None
    added = next((each for each in attention.between[0].inputs if each is not None and each is not scores), None)
    if added is None or added.shape is None or added.dtype != ir.DataType.FLOAT:
        return None
    expected, found = list(scores.shape), list(added.shape)
    if len(expected) != 4 or len(found) != 4 or not isinstance(expected[2], int):
        return None
    fits = found[3] == expected[3] and all(own in (1, whole) for own, whole in zip(found, expected, strict=True))
    return added if fits else None


def _for_each_query(editor: edit.Editor, attention: Attention, before: ir.Node) -> ir.Value:
    """The addend of the scores, with a row per query: the operator broadcasts it only over images and heads."""
    added, queries = _added(attention), values.dim(attention.scores.outputs[0], 2)
    assert added is not None and added.shape is not None and queries is not None
    if added.shape[2] == queries:
        return added
    name = f"{str(attention.softmax.name).removesuffix('/Softmax')}.bias"
    sizes = editor.constant(np.array([1, 1, queries, 1], np.int64), f"{name}.sizes")
    shape = [*list(added.shape)[:2], queries, added.shape[3]]
    return editor.node(before, "Expand", [added, sizes], name, shape)[0]


# --- ONNX Runtime CPU: QuantizeLinear and com.microsoft.MatMulIntegerToFloat, written into the graph ------------------
# Plain Q/DQ around MatMul + bias Add is slower than float here: MatMulAddFusion turns the pair into a Gemm, which the
# Q/DQ fusion does not accept. The fused operator has an INT8 product, a float output and the bias inside, and needs no
# session option. Only uint8 x int8 has VNNI kernels. Attention becomes one operator too, in float. Convolutions stay
# float: ONNX Runtime has no INT8 convolution with a float output.
#
# INT4 weights are com.microsoft.MatMulNBits. A DequantizeLinear before a MatMul becomes the same operator, but only
# when the session is created, which then takes more memory.


# A Mul and an Add after an activation are separate passes over memory.
GAIN_THRESHOLD = folds.GainThreshold(scale=2.0, copies=3.0)
# `accuracy_level` of MatMulNBits: rows are quantized to INT8, with a scale for each group.
INT8_ROWS = 4


def shape(model: ir.Model, ignored: Callable[[str], bool]) -> None:
    """Rewrite the float graph into the form that is fast in INT8, in place; exact. `ignored` layers stay unchanged."""
    separate_scores(model, ignored)


def reasons_for_float(model: ir.Model, linears: Sequence[Linear]) -> dict[str, str]:
    """The layers to keep in float on this target, by name, with the reason."""
    reasons = {}
    for linear in linears:
        slower = f"a {linear.kind} is faster in float on this target" if linear.kind != "matmul" else None
        if reason := slower or placement.needs_float(linear):
            reasons[linear.name] = reason
    return reasons


def write(
    model: ir.Model, linears: Sequence[Linear], ranges: Mapping[str, Range], weights: Mapping[str, QuantizedWeight]
) -> tuple[str, ...]:
    """Quantize the given layers in place. Returns the products of queries and keys that are also in INT8: none."""
    names = {linear.name for linear in linears}
    fuse_attention(model)
    quantizers = placement.Quantizers(model, ranges)
    if linears:
        model.opset_imports[DOMAIN] = 1
    for linear in [each for each in find_linears(model) if each.name in names]:
        activation, scale, zero_point = quantizers.quantize(linear.input, linear.node)
        quantized, weight_scales = weights[linear.name]
        stem, fresh = f"{linear.name}.weight", edit.Names(model)
        inputs = [
            activation,
            fresh.constant(quantized, f"{stem}.int8"),
            scale,
            fresh.constant(weight_scales, f"{stem}.scale"),
            zero_point,
            fresh.constant(np.zeros_like(weight_scales, dtype=np.int8), f"{stem}.zero_point"),
        ]
        bias = (
            None
            if linear.bias_add is None
            else next(v for v in linear.bias_add.inputs if v is not linear.node.outputs[0])
        )
        node = fresh.node(
            "MatMulIntegerToFloat",
            [*inputs, bias] if bias is not None else inputs,
            f"{linear.name}/MatMulIntegerToFloat",
            domain=DOMAIN,
        )
        _replace(model, linear, node)
    return ()


def write_int4(model: ir.Model, linears: Sequence[Linear], weights: Mapping[str, rounding.GroupedWeight]) -> None:
    """Replace the given layers by MatMulNBits, in place: INT8 rows times 4-bit codes, two per byte, the first in the
    lower half; 8 represents zero."""
    fuse_attention(model)
    if linears:
        model.opset_imports[DOMAIN] = 1
    for linear in [each for each in find_linears(model) if each.name in weights]:
        weight, fresh, stem = weights[linear.name], edit.Names(model), f"{linear.name}.weight"
        inputs, outputs = weight.codes.shape
        codes = (weight.codes.T - rounding.LOWEST).astype(np.uint8).reshape(outputs, -1, weight.group)
        node = fresh.node(
            "MatMulNBits",
            [
                linear.input,
                fresh.constant(codes[..., ::2] | codes[..., 1::2] << 4, f"{stem}.int4"),
                fresh.constant(weight.scales.T.ravel(), f"{stem}.scale"),
            ],
            f"{linear.name}/MatMulNBits",
            {"K": inputs, "N": outputs, "bits": 4, "block_size": weight.group, "accuracy_level": INT8_ROWS},
            domain=DOMAIN,
        )
        old, new = linear.node.outputs[0], node.outputs[0]
        new.type, new.shape = old.type, old.shape
        ir.convenience.replace_nodes_and_values(model.graph, linear.node, [linear.node], [node], [old], [new])


def _replace(model: ir.Model, linear: Linear, node: ir.Node) -> None:
    last = linear.bias_add or linear.node
    old, new = last.outputs[0], node.outputs[0]
    new.type, new.shape = old.type, old.shape
    removed = [linear.node] if linear.bias_add is None else [linear.bias_add, linear.node]
    ir.convenience.replace_nodes_and_values(model.graph, last, removed, [node], [old], [new])


BACKEND = placement.PlacementBackend(
    GAIN_THRESHOLD, reasons_for_float, write, shape=shape, write_int4=write_int4, int4_shape=shape
)
