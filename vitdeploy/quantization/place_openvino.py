"""OpenVINO CPU: explicit Q/DQ around every linear and convolution, and on queries and keys.

uint8 activations and int8 weights have a DequantizeLinear each; the plugin's low-precision transformations move both
after the product. No Q on any other output: the next LayerNormalization, GELU and residual Add stay float.

Queries and keys that come from a linear each leave it as int8: the plugin's fused attention then computes the scores in
INT8 and moves a quarter of the bytes. The keys are transposed in two steps, and the plugin fuses the second; a single
step over bytes costs as much as the scores. Softmax and its product with the values stay float.

A linear with int8 weights and a float input becomes an INT8 product too, on CPUs with VNNI: the plugin quantizes rows
in groups of 32 channels, symmetrically, by the largest of each (DYNAMIC_QUANTIZATION_GROUP_SIZE, 32 by default).
"""

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import replace

import ml_dtypes
import numpy as np
import onnx_ir as ir

from vitdeploy.graph import edit, values
from vitdeploy.graph.analysis import attention, rows, work
from vitdeploy.graph.passes.folds import takes_pixels
from vitdeploy.graph.passes.rows import join_before_transpose
from vitdeploy.quantization import folds, placement, rounding
from vitdeploy.quantization.ranges import (
    QuantizedWeight,
    Range,
    Scores,
    find_scores,
    output_of,
    separate_scores,
    symmetric_step,
)
from vitdeploy.runtime.host import family

# A Mul and an Add after an activation become part of the product before it.
GAIN_THRESHOLD = folds.GainThreshold(scale=1.1, copies=1.2)
# DequantizeLinear supports int4, and a scale per block, from this opset on.
BLOCKED_OPSET = 21
# A layer is small if it has fewer weights, and fewer MACs at batch 1, the latter also as a share of the model's.
FEW_WEIGHTS, FEW_PRODUCTS, SMALL_SHARE = 1 << 14, 1_000_000, 1 / 400


def shape(model: ir.Model, ignored: Callable[[str], bool]) -> None:
    """Rewrite the float graph into the form that is fast in INT8, in place; exact. `ignored` layers stay unchanged.

    Tokens of several levels are joined before they are transposed: otherwise the plugin quantizes each level
    separately, and then rejects the zero points that it gave them (OpenVINO 2026.4).
    """
    join_before_transpose(model, rows.find_linears(model))
    separate_scores(model, ignored)


def scores_in_int8(model: ir.Model, layers: Collection[str], known: Container[str]) -> list[Scores]:
    """The attentions whose queries and keys leave their linears as int8: both linears are in INT8 and observed."""
    return [
        score
        for score in find_scores(edit.Editor(model), attention.find_attentions(model))
        if all(one.name in layers and output_of(one) in known for one in (score.query, score.key))
    ]


def reasons_for_float(model: ir.Model, linears: Sequence[rows.Linear]) -> dict[str, str]:
    """The layers to keep in float on this target, by name, with the reason.

    A depthwise convolution sums too few products for errors to cancel. If scores are ranked, the smallest error selects
    other queries; for sampling positions, an INT8 step is many pixels. In a small layer the float product takes no
    longer than quantizing its input. On Arm the plugin has no INT8 convolution of this form (see
    `compilation.openvino.check_ran`); a placement made on another machine for an Arm device needs `ignore`.
    """
    counts = {linear.name: work.layer_macs(model, linear) for linear in linears}
    few = min(FEW_PRODUCTS, SMALL_SHARE * sum(count or 0 for count in counts.values()))
    reasons, arm = {}, family() == "Arm"
    for linear in linears:
        count = counts[linear.name]
        if linear.groups > 1 and linear.weight.shape[1] == 1:
            reasons[linear.name] = "a depthwise convolution loses too much in INT8"
        elif not rows.reads_image(linear):
            reasons[linear.name] = "its input is the same for every image, so the runtime computes it once"
        elif reason := placement.needs_float(linear):
            reasons[linear.name] = reason
        elif arm and linear.kind == "conv":
            reasons[linear.name] = "OpenVINO has no INT8 kernel for this convolution on Arm"
        elif count is not None and count < few and linear.weight.size < FEW_WEIGHTS:
            reasons[linear.name] = "the layer is small and as fast in float"
    return reasons


def write(
    model: ir.Model, linears: Sequence[rows.Linear], ranges: Mapping[str, Range], weights: Mapping[str, QuantizedWeight]
) -> tuple[str, ...]:
    """Quantize the given layers in place. Returns the products of queries and keys that are also in INT8."""
    known = dict(ranges)
    attentions = scores_in_int8(model, {linear.name for linear in linears}, known)
    quantizers = placement.Quantizers(model, known)
    for each in linears:
        linear, rounded = each, weights[each.name]
        if takes_pixels(each):
            linear, rounded = _in_unit_range(model, each, known), (rounded[0], rounded[1] * np.float32(255))
        linear.node.replace_input_with(0, quantizers.dequantized(linear.input, linear.node))
        linear.node.replace_input_with(1, placement.dequantized_weight(model, linear, *rounded))
    for scores in attentions:
        for linear in (scores.query, scores.key):
            _as_int8(model, linear.output, known[output_of(linear)])
        _transpose_twice(model, scores.attention.key)
    return tuple(str(scores.attention.scores.name) for scores in attentions)


def _as_int8(model: ir.Model, value: ir.Value, bounds: Range) -> None:
    """Insert symmetric Q/DQ on `value`: its readers get multiples of one scale."""
    producer, readers = value.producer(), list(value.uses())
    assert producer is not None
    step, zero = np.array(symmetric_step(bounds)), np.array(0, np.int8)
    quantize, dequantize = placement.quantize_pair(model, value, str(value.name), step, zero)
    dequantize.outputs[0].type, dequantize.outputs[0].shape = value.type, value.shape
    producer.append([quantize, dequantize])
    for node, index in readers:
        node.replace_input_with(index, dequantize.outputs[0])


def _transpose_twice(model: ir.Model, key: ir.Value) -> None:
    """Compute K^T through [batch, heads, keys, channels] if one Transpose computes it from another layout."""
    last = key.producer()
    perm = list(last.attributes.get_ints("perm", ())) if last is not None and last.op_type == "Transpose" else []
    if last is None or len(perm) < 3 or [*perm[:-2], perm[-1], perm[-2]] == sorted(perm):
        return
    swapped = {"perm": [*perm[:-2], perm[-1], perm[-2]]}
    first = edit.Names(model).node("Transpose", list(last.inputs), f"{last.name}/keys", swapped)
    first.outputs[0].type = key.type
    if key.shape is not None:
        first.outputs[0].shape = ir.Shape([*list(key.shape)[:-2], key.shape[-1], key.shape[-2]])
    last.prepend(first)
    last.replace_input_with(0, first.outputs[0])
    last.attributes["perm"] = ir.AttrInt64s("perm", [*range(len(perm) - 2), len(perm) - 1, len(perm) - 2])


def _in_unit_range(model: ir.Model, linear: rows.Linear, ranges: dict[str, Range]) -> rows.Linear:
    """The layer on pixels / 255, for weights times 255: the same function, and every pixel still exact.

    On plain pixels the step of the quantizer is 1 and its zero point 0; OpenVINO treats such a pair as an identity,
    removes it, and runs the layer in float.
    """
    names, name = edit.Names(model), f"{linear.input.name}/unit"
    step = names.constant(np.array(1 / 255, np.float32), f"{name}.step")
    node = names.node("Mul", [linear.input, step], name)
    model.graph.insert_before(linear.node, node)
    ranges[str(node.name)] = Range(0.0, 1.0)
    return replace(linear, input=node.outputs[0])


def no_int4(linear: rows.Linear) -> str | None:
    """Why the plugin has no INT4 kernel for a layer: after a Reshape to two axes it unpacks weights to float, also INT8
    weights (OpenVINO 2026.4)."""
    before = linear.input.producer()
    flat = before is not None and before.op_type in ("Reshape", "Flatten") and values.rank_of(linear.input) in (2, None)
    return "OpenVINO runs it in float because its input is flattened to two axes" if flat else None


def write_int4(model: ir.Model, linears: Sequence[rows.Linear], weights: Mapping[str, rounding.GroupedWeight]) -> None:
    """Insert a DequantizeLinear of int4 before the given layers, in place. The plugin keeps the weights packed, and
    quantizes rows to INT8 in groups of 32 inputs (its DYNAMIC_QUANTIZATION_GROUP_SIZE)."""
    for linear in linears:
        weight = weights[linear.name]
        blocks, codes = {"axis": 0, "block_size": weight.group}, weight.codes.astype(ml_dtypes.int4)
        linear.node.replace_input_with(1, placement.dequantized_weight(model, linear, codes, weight.scales, blocks))


BACKEND = placement.PlacementBackend(
    GAIN_THRESHOLD,
    reasons_for_float,
    write,
    shape=shape,
    scores_in_int8=scores_in_int8,
    dynamic=lambda linear: linear.kind == "matmul" and no_int4(linear) is None,
    write_int4=write_int4,
    int4_opset=BLOCKED_OPSET,
    no_int4=no_int4,
)
