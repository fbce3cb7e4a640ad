"""INT4 weights for linears that are bound by reading them: decoders, text towers, models that have to be small.

Only weights are stored in 4 bits, in groups of inputs; what flows between layers is float. The kernels of both runtimes
of the CPU quantize the rows that they read to INT8 as they go, with a scale for each few inputs of each row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from vitdeploy.backends import TARGETS
from vitdeploy.errors import CapabilityError, GraphError
from vitdeploy.graph.analysis.rows import Linear, find_linears, is_place, is_ranked, reads_image, unplaced_weights
from vitdeploy.graph.canonical.normalise import upgrade_opset
from vitdeploy.graph.edit import Editor, drop_unused
from vitdeploy.quantization.embeddings import store_embeddings
from vitdeploy.quantization.groups import GROUPS, group_of, round_groups
from vitdeploy.quantization.placement import QUANTIZE, FourBitForm, check_calibrated, ignored, matching
from vitdeploy.quantization.statistics import Statistics

# Fewer weights than this take up no room that matters.
FEW_WEIGHTS = 1 << 12


@dataclass(frozen=True)
class FourBits:
    """Names of the layers whose weights are in INT4, and of those left in float with the reason.

    `group`: the number of inputs that share a scale, by layer. `embeddings`: tables whose rows are in INT8.
    """

    target: str
    int4: tuple[str, ...]
    float: dict[str, str]
    group: dict[str, int]
    embeddings: tuple[str, ...] = ()


def place_four_bits(
    model: ir.Model, statistics: Mapping[str, Statistics], target: str, ignore: Sequence[str] = ()
) -> FourBits:
    """Write the weights of linears in INT4 for `target`, in place, and tables of embeddings in INT8. Biases take the
    mean of what rounding does.

    Args:
        statistics: of the input of every layer, by tensor name.
        ignore: layer names, or shell patterns of them, to leave in float.

    Raises:
        TargetError: an unknown target.
        CapabilityError: the target has no INT4.
        GraphError: a pattern of `ignore` matches no layer, the graph has no linear, or one was not calibrated.
    """
    form = QUANTIZE[target].int4
    if form is None:
        raise CapabilityError(f"{target} has no INT4", wanted=", ".join(TARGETS[target].precisions))
    upgrade_opset(model, form.opset)
    form.shape(model, matching(ignore))
    left = _left_in_float(model, ignore, form)
    editor, weights = Editor(model), {}
    chosen = [linear for linear in editor.linears if linear.name not in left]
    check_calibrated(chosen, statistics)
    for linear in chosen:
        found, group = statistics[str(linear.input.name)], group_of(len(linear.weight))
        assert group is not None
        weights[linear.name] = rounded = round_groups(linear.weight, found, group)
        moved = found.mean @ (linear.weight - rounded.values)
        if linear.bias is not None or not linear.output.is_graph_output():
            editor.set_linear(linear, bias=moved if linear.bias is None else linear.bias + moved)
    form.write(model, [linear for linear in find_linears(model) if linear.name in weights], weights)
    embeddings = store_embeddings(model)
    drop_unused(model)
    sizes = {name: weight.group for name, weight in weights.items()}
    return FourBits(target, tuple(weights), left, sizes, embeddings)


def _left_in_float(model: ir.Model, ignore: Sequence[str], form: FourBitForm) -> dict[str, str]:
    """The layers whose weights stay in float, with the reason.

    Raises:
        GraphError: a pattern of `ignore` matches no layer, or the graph has no linear.
    """
    linears = find_linears(model)
    left = unplaced_weights(model)
    if not any(linear.kind == "matmul" for linear in linears):
        raise GraphError(
            "the graph has no linear with constant float32 weights, so nothing to store in 4 bits",
            found="; ".join(f"{name}: {reason}" for name, reason in list(left.items())[:3]) or "convolutions alone",
            fix="choose the precision int8 or fp32",
        )
    asked = ignored([linear.name for linear in linears], ignore)
    for linear in linears:
        reason = "ignored on request" if linear.name in asked else _reason_for_float(linear, form)
        if reason is not None:
            left[linear.name] = reason
    return left


def _reason_for_float(linear: Linear, form: FourBitForm) -> str | None:
    inputs = len(linear.weight)
    if linear.kind != "matmul":
        return f"a {linear.kind} has no INT4 kernel"
    if group_of(inputs) is None:
        return f"its {inputs} inputs are no multiple of {GROUPS[-1]}"
    if linear.weight.size < FEW_WEIGHTS:
        return "so small a layer saves nothing"
    if is_ranked(linear):
        return "its outputs are ranked"
    if is_place(linear):
        return "its outputs say where features are sampled"
    if not reads_image(linear):
        return "its input is the same for every image, so the runtime computes it once"
    return form.reason_for_float(linear)
