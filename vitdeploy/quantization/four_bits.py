"""INT4 weights for linears limited by memory bandwidth: decoders, text encoders, models that must be small.

Only weights are stored in 4 bits, in groups of inputs; activations stay float. The kernels of both CPU runtimes
quantize each row that they read to INT8 on the fly, with a scale for each small group of inputs.
"""

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from vitdeploy.backends import TARGETS
from vitdeploy.errors import CapabilityError, GraphError
from vitdeploy.graph import edit, values
from vitdeploy.graph.analysis import rows
from vitdeploy.graph.canonical.normalise import upgrade_opset
from vitdeploy.quantization import placement, ranges, rounding

# Layers with fewer weights than this save no relevant memory.
FEW_WEIGHTS = 1 << 12


def place_four_bits(
    model: ir.Model, statistics: Mapping[str, ranges.Statistics], target: str, ignore: Sequence[str] = ()
) -> placement.Placement:
    """Store the weights of linears in INT4 for `target`, in place, and embedding tables in INT8. Biases absorb the mean
    rounding error.

    Args:
        statistics: statistics of the input of every layer, by tensor name.
        ignore: layer names, or shell patterns of them, to keep in float.

    Raises:
        TargetError: an unknown target.
        CapabilityError: the target has no INT4.
        GraphError: a pattern of `ignore` matches no layer, the graph has no linear, or one was not calibrated.
    """
    backend = placement.QUANTIZE[target]
    if backend.write_int4 is None:
        raise CapabilityError(f"{target} has no INT4", expected=", ".join(TARGETS[target].precisions))
    upgrade_opset(model, backend.int4_opset)
    backend.int4_shape(model, placement.matching(ignore))
    left = _left_in_float(model, ignore, backend.no_int4)
    editor, weights = edit.Editor(model), {}
    chosen = [linear for linear in editor.linears if linear.name not in left]
    placement.check_calibrated(chosen, statistics)
    for linear in chosen:
        found, group = statistics[str(linear.input.name)], rounding.group_of(len(linear.weight))
        assert group is not None
        weights[linear.name] = rounded = rounding.round_groups(linear.weight, found, group)
        moved = found.mean @ (linear.weight - rounded.values)
        if linear.bias is not None or not linear.output.is_graph_output():
            editor.set_linear(linear, bias=moved if linear.bias is None else linear.bias + moved)
    backend.write_int4(model, [linear for linear in rows.find_linears(model) if linear.name in weights], weights)
    embeddings = store_embeddings(model)
    edit.drop_unused(model)
    sizes = {name: weight.group for name, weight in weights.items()}
    layers = [placement.LayerPrecision(name, "float", reason) for name, reason in left.items()]
    layers += [placement.LayerPrecision(name, "int4") for name in weights]
    return placement.Placement(target, tuple(layers), group=sizes, embeddings=embeddings)


def _left_in_float(
    model: ir.Model, ignore: Sequence[str], no_kernel: Callable[[rows.Linear], str | None]
) -> dict[str, str]:
    """The layers whose weights stay in float, with the reason.

    Raises:
        GraphError: a pattern of `ignore` matches no layer, or the graph has no linear.
    """
    linears = rows.find_linears(model)
    left = rows.unplaced_weights(model)
    if not any(linear.kind == "matmul" for linear in linears):
        raise GraphError(
            "the graph has no linear with constant float32 weights, so there is nothing to store in 4 bits",
            found="; ".join(f"{name}: {reason}" for name, reason in list(left.items())[:3]) or "only convolutions",
            fix="choose the precision int8 or fp32",
        )
    asked = placement.ignored([linear.name for linear in linears], ignore)
    for linear in linears:
        reason = placement.IGNORED if linear.name in asked else _reason_for_float(linear) or no_kernel(linear)
        if reason is not None:
            left[linear.name] = reason
    return left


def _reason_for_float(linear: rows.Linear) -> str | None:
    inputs = len(linear.weight)
    if linear.kind != "matmul":
        return f"a {linear.kind} has no INT4 kernel"
    if rounding.group_of(inputs) is None:
        return f"its {inputs} inputs are not a multiple of {rounding.GROUPS[-1]}"
    if linear.weight.size < FEW_WEIGHTS:
        return "the layer is too small to save memory"
    if reason := placement.needs_float(linear):
        return reason
    if not rows.reads_image(linear):
        return "its input is the same for every image, so the runtime computes it once"
    return None


# --- Embedding tables in INT8, with a scale for each row --------------------------------------------------------------
# In a text encoder or a decoder they are most of the bytes. A token reads one row, so this saves no time; the row
# becomes float again right after the Gather.


# Smaller tables save no relevant memory.
FEW_NUMBERS = 1 << 14


def store_embeddings(model: ir.Model) -> tuple[str, ...]:
    """Store every float32 table [rows, channels] that a Gather reads in INT8, in place. Returns the names of the
    Gathers."""
    found = []
    for node in list(model.graph):
        if node.op_type != "Gather" or node.attributes.get_int("axis", 0) != 0 or values.is_constant(node.inputs[1]):
            continue
        table, old = values.floats_of(node.inputs[0]), node.outputs[0]
        if table is None or table.ndim != 2 or table.size < FEW_NUMBERS:
            continue
        codes, scales = ranges.quantize_weight(table, 0)
        name, names = rows.layer_name(node), edit.Names(model)
        row = names.node("Gather", [names.constant(codes, f"{name}.int8"), node.inputs[1]], f"{name}/codes")
        scale = names.node(
            "Gather", [names.constant(scales[:, None], f"{name}.scale"), node.inputs[1]], f"{name}/scale"
        )
        real = names.node("Cast", [row.outputs[0]], f"{name}/Cast", {"to": int(ir.DataType.FLOAT)})
        product = names.node("Mul", [real.outputs[0], scale.outputs[0]], f"{name}/Mul")
        for each, kind in ((row, ir.DataType.INT8), (real, ir.DataType.FLOAT), (product, ir.DataType.FLOAT)):
            each.outputs[0].type, each.outputs[0].shape = ir.TensorType(kind), old.shape
        scale.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        if old.shape is not None:
            scale.outputs[0].shape = ir.Shape([*list(old.shape)[:-1], 1])
        edit.replace(model, node, [row, scale, real, product])
        found.append(name)
    return tuple(found)
