"""Rewrite a graph into the canonical form."""

import logging
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, NameFixPass, RemoveUnusedNodesPass
from onnxscript import optimizer

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.rows import name_apart
from vitdeploy.graph.canonical import norms, products
from vitdeploy.graph.canonical.shapes import (
    BROADCASTING,
    FOLD_ELEMENTS,
    SLOW,
    SLOW_ELEMENTS,
    SizeChain,
    compute_once,
    resolve_shapes,
    settle_views,
    unstack,
)
from vitdeploy.graph.edit import Names, bypass, drop_unused, replace
from vitdeploy.graph.shapes.infer import Inference, Operators
from vitdeploy.graph.shapes.sizes import UNKNOWN, Dims, Unknown, broadcast, product
from vitdeploy.graph.values import array_of, operands, producer, scalar_of

# --- Constant folding: replace values that depend only on constants ---------------------------------------------------


def lift_constants(model: ir.Model) -> None:
    """Turn Constant nodes into initializers, in place."""
    if any(node.op_type == "Constant" for node in model.graph):
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def fold_constants(model: ir.Model, known: Inference) -> None:
    """Compute values that depend only on constants, in place; the results are initializers."""

    def fits(node: ir.Node) -> bool | None:
        for value in node.inputs:  # onnxscript lists in each constant all later ones: quadratic in a chain
            if value is not None:
                value.meta.pop(optimizer.FOLDED_FROM_KEY, None)
        for output in node.outputs:
            dims = known.dims_of(output)
            size = product(dims) if dims is not None else UNKNOWN
            if not isinstance(size, int) or size > (SLOW_ELEMENTS if node.op_type in SLOW else FOLD_ELEMENTS):
                return False
        return None

    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)  # it warns about each operator with several outputs, which is irrelevant to users
    try:
        with np.errstate(all="ignore"):
            optimizer.fold_constants(
                model,
                onnx_shape_inference=False,
                input_size_limit=FOLD_ELEMENTS,
                output_size_limit=FOLD_ELEMENTS,
                should_fold=fits,
            )
    except Exception as error:  # a node that no runtime could run either; the folding wraps all exceptions
        cause = error
        while cause.__cause__ is not None and isinstance(cause.__cause__, Exception):
            cause = cause.__cause__
        raise GraphError(
            "a constant of the graph cannot be computed", found=str(cause).splitlines()[0][:200] if str(cause) else ""
        ) from None
    finally:
        logger.setLevel(level)
    lift_constants(model)
    RemoveUnusedNodesPass()(model)


def fold_constant_norms(model: ir.Model) -> int:
    """Replace every LayerNormalization of constants by a constant, in place; return their number.

    onnxscript does not fold operators with several outputs. DETR's first decoder block begins with one: its queries
    attend to each other before they attend to an image.

    Source: the ONNX operator's specification, y = (x - mean) / sqrt(variance + epsilon) * scale + bias over the axes
    from `axis` on, computed in float64 here.
    """
    changed = 0
    for node in list(model.graph):
        if node.op_type != "LayerNormalization" or node.domain != "":
            continue
        x, scale, *rest = (array_of(value) for value in node.inputs)
        bias = rest[0] if rest else None
        whole = (
            x is not None and scale is not None and (len(node.inputs) < 3 or node.inputs[2] is None or bias is not None)
        )
        if not whole or any(output.uses() or output.is_graph_output() for output in node.outputs[1:]):
            continue
        assert x is not None and scale is not None
        axis = node.attributes.get_int("axis", -1) % x.ndim
        axes, values = tuple(range(axis, x.ndim)), x.astype(np.float64)
        centred = values - values.mean(axis=axes, keepdims=True)
        deviation = np.sqrt((centred**2).mean(axis=axes, keepdims=True) + node.attributes.get_float("epsilon", 1e-5))
        result = centred / deviation * scale + (0 if bias is None else bias)
        folded = Names(model).constant(result.astype(x.dtype), f"{node.name}.folded")
        ir.convenience.replace_all_uses_with(node.outputs[0], folded, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        changed += 1
    return changed


# --- Redundant nodes --------------------------------------------------------------------------------------------------
# Views of the same shape, neutral constants, Expands before broadcasting.


# x op c = x for this constant; for the first two also c op x = x.
NEUTRAL = {"Add": 0.0, "Mul": 1.0, "Sub": 0.0, "Div": 1.0}


def remove_redundant(model: ir.Model, known: Inference, chain: SizeChain, *, masks: bool = False) -> int:
    """Bypass every node that, according to `known`, returns an input unchanged. Returns how many were removed.

    `masks`: the graph counts the pixels of a mask, see `compute_once`.
    """
    count = 0
    for node in list(model.graph):
        if node.domain != "" or not node.outputs or any(output.uses() for output in node.outputs[1:]):
            continue
        source = _unchanged(known, node)
        same = source is not None and source.dtype == node.outputs[0].dtype
        bypassed = same and source is not None and bypass(node, source)
        count += bypassed or _without_expand(known, node) or compute_once(model, known, chain, node, masks)
    return count


def _unchanged(known: Inference, node: ir.Node) -> ir.Value | None:
    """The input that the node returns unchanged; None for other nodes."""
    operator, data = node.op_type, node.inputs[0] if node.inputs else None
    if operator in NEUTRAL:
        for x, c in _orders(node):
            array = array_of(c)
            neutral = array is not None and array.size > 0 and array.dtype.kind == "f"
            if neutral and np.all(array == NEUTRAL[operator]) and _same(known, x, node.outputs[0]):
                return x
        return None
    if operator == "Where":  # a mask that is all true or all false
        condition = array_of(data)
        if condition is None or condition.size == 0 or condition.any() != condition.all():
            return None
        kept = node.inputs[1 if condition.all() else 2]
        return kept if _same(known, kept, node.outputs[0]) else None
    rule = _RULES.get(operator)
    return data if rule is not None and data is not None and rule(known, node) else None


def _orders(node: ir.Node) -> tuple[tuple[ir.Value, ir.Value], ...]:
    pair = operands(node, node.op_type)
    if pair is None:
        return ()
    return (pair, pair[::-1]) if node.op_type in ("Add", "Mul") else (pair,)


def _same(known: Inference, a: ir.Value | None, b: ir.Value | None) -> bool:
    dims = known.dims_of(a)
    return dims is not None and dims == known.dims_of(b) and not any(isinstance(size, Unknown) for size in dims)


def _same_shape(known: Inference, node: ir.Node) -> bool:
    return _same(known, node.inputs[0], node.outputs[0])


def _whole_slice(known: Inference, node: ir.Node) -> bool:
    """Whether a Slice keeps every axis whole and in order."""
    steps = known.contents_of(node.inputs[4]) if len(node.inputs) > 4 else None
    forwards = len(node.inputs) < 5 or (steps is not None and all(step == 1 for step in steps))
    return forwards and _same_shape(known, node)


def _same_type(known: Inference, node: ir.Node) -> bool:
    source = node.inputs[0]
    return source is not None and source.dtype is not None and int(source.dtype) == node.attributes.get_int("to", 0)


def _inference_dropout(known: Inference, node: ir.Node) -> bool:
    training = array_of(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else np.False_
    return training is not None and not np.any(training)


def _no_padding(known: Inference, node: ir.Node) -> bool:
    pads = known.contents_of(node.inputs[1]) if len(node.inputs) > 1 else None
    return pads is not None and all(size == 0 for size in pads)


def _identity_transpose(known: Inference, node: ir.Node) -> bool:
    perm = node.attributes.get_ints("perm", ())
    return len(perm) > 0 and list(perm) == sorted(perm)


_RULES: dict[str, Callable[[Inference, ir.Node], bool]] = {
    "Identity": lambda known, node: True,
    "Dropout": _inference_dropout,
    "Cast": _same_type,
    "Concat": lambda known, node: len(node.inputs) == 1,
    "Pad": _no_padding,
    "Transpose": _identity_transpose,
    "Slice": _whole_slice,
    "Reshape": _same_shape,
    "Flatten": _same_shape,
    "Expand": _same_shape,
    "Squeeze": _same_shape,
    "Unsqueeze": _same_shape,
}


def _without_expand(known: Inference, node: ir.Node) -> bool:
    """Bypass an Expand if an elementwise operator broadcasts its data to the same result anyway."""
    if node.op_type not in BROADCASTING or len(node.outputs) != 1:
        return False
    found = next(((i, e) for i, v in enumerate(node.inputs) if (e := producer(v, "Expand")) is not None), None)
    if found is None:
        return False
    index, expand = found
    data = expand.inputs[0]
    shapes = [known.dims_of(data if i == index else value) for i, value in enumerate(node.inputs)]
    expected = known.dims_of(node.outputs[0])
    if expected is None or any(shape is None for shape in shapes):
        return False
    same = _equal(broadcast(*(shape for shape in shapes if shape is not None)), expected)
    if same:
        node.replace_input_with(index, data)
    return same


def _equal(a: Dims, b: Dims) -> bool:
    return a == b and not any(isinstance(size, Unknown) for size in a)


# --- Raise the opset of a graph with ONNX's version converter, without passing the weights through it ----------------


OLDEST_OPSET = 11
# Larger tensors stay outside the converter, which copies everything it is given several times; so do those on disk.
CONVERTED_ELEMENTS = 1024


def upgrade_opset(model: ir.Model, opset: int) -> bool:
    """Convert a graph of opset 11 or later to `opset`, in place. False if it has that opset or a later one.

    Raises:
        GraphError: the opset is below 11, or the converter does not know how to convert one of the operators.
    """
    version = model.graph.opset_imports.get("", 0)
    if version >= opset:
        return False
    if version < OLDEST_OPSET:
        raise GraphError(
            "the opset of the graph is too old",
            found=f"opset {version}",
            expected=f"opset {OLDEST_OPSET} or later",
            fix="export the model again with a later opset_version",
        )
    Inference(model)  # without shapes, some adapters, such as Softmax-12's, write worse graphs
    try:
        converted = onnx.version_converter.convert_version(_without_weights(model), opset)
        graph = ir.from_proto(converted).graph
    except Exception as error:  # the converter raises RuntimeError, ConvertError and others
        text = str(error).strip().splitlines()
        raise GraphError(
            f"the graph cannot be converted from opset {version} to {opset}",
            found=(text[-1] if text else type(error).__name__)[:200],
            fix=f"export the model again with opset_version={opset}",
        ) from None
    _return_weights(model, graph)
    model.graph = graph
    return True


def _without_weights(model: ir.Model) -> onnx.ModelProto:
    """The graph as a small proto: initializers of more than 1,024 elements, or on disk, become inputs."""
    proto = onnx.ModelProto(ir_version=max(model.ir_version, 8))
    proto.opset_import.extend(onnx.helper.make_opsetid(*item) for item in model.graph.opset_imports.items())
    large = {
        str(name): value
        for name, value in model.graph.initializers.items()
        if value.const_value is not None
        and (value.const_value.size > CONVERTED_ELEMENTS or isinstance(value.const_value, ir.ExternalTensor))
    }
    for name in large:
        model.graph.initializers.pop(name)
    try:
        proto.graph.CopyFrom(ir.serde.serialize_graph(model.graph))
    finally:
        for value in large.values():
            model.graph.register_initializer(value)
    declared = {value.name for value in proto.graph.input}
    for name, value in large.items():
        if name not in declared and value.const_value is not None:
            tensor = value.const_value
            shape = [int(size) for size in tensor.shape.numpy()]
            proto.graph.input.append(onnx.helper.make_tensor_value_info(name, int(tensor.dtype), shape))
    return proto


def _return_weights(model: ir.Model, graph: ir.Graph) -> None:
    """Register the weights of `model` in the converted graph, under the names that its nodes read."""
    own = {value.name for value in model.graph.inputs}
    for value in list(graph.inputs):
        old = model.graph.initializers.get(str(value.name))
        if old is not None and old.const_value is not None:
            value.const_value = old.const_value
            graph.register_initializer(value)
            if value.name not in own:
                graph.inputs.remove(value)


# --- Rewrite any graph into the canonical form, which the later passes expect -----------------------------------------
# Each row of `PASSES` describes its part of the form. Constants are always initializers.


# The oldest opset that has all operators of the canonical form except Gelu, and the opset that older graphs get.
LOWEST_OPSET, OPSET = 18, 20
# Each round may reveal constants for the next: shapes -> folded indices -> shapes. Swin's masks take three rounds.
ROUNDS = 8


def normalise(model: ir.Model, opset: int | None = None) -> dict[str, int]:
    """Rewrite `model` into the canonical form, in place; it computes the same function up to rounding. Returns the
    number of rewrites of each pass, by its name.

    Args:
        opset: raise the graph to this opset if it is lower. By default graphs below 18 are raised to 20.

    Raises:
        GraphError: the graph's opset cannot be raised, or one of its constants cannot be computed.
    """
    version = model.graph.opset_imports.get("", 0)
    expected = opset or (OPSET if version < LOWEST_OPSET else version)
    NameFixPass()(model)
    lift_constants(model)
    counts = {"opset": int(upgrade_opset(model, expected))}
    lift_constants(model)  # the converter writes new ones
    for each in PASSES:
        counts[each.name] = each.run(model)
    drop_unused(model)
    NameFixPass()(model)
    name_apart(model)
    return counts


def _settle(model: ir.Model) -> int:
    """Fold constants, shapes and redundant nodes until nothing changes."""
    total, operators = 0, Operators(model.graph.opset_imports)
    counts_pixels = any(node.op_type == "CumSum" for node in model.graph)
    for _ in range(ROUNDS):
        folded = fold_constant_norms(model)
        known, before = Inference(model, operators), len(model.graph)
        fold_constants(model, known)
        folded += before - len(model.graph)  # folding may reveal a size to the next round
        chain = SizeChain(model, known)
        changed = resolve_shapes(model, known, chain) + remove_redundant(model, known, chain, masks=counts_pixels)
        drop_unused(model)
        total += changed
        if not changed and not folded:
            break
    return total


def _log_softmax(model: ir.Model) -> int:
    """Replace Log(max(Softmax(x), c)) by max(LogSoftmax(x), log c): float16 cannot hold such small probabilities."""
    count, names = 0, Names(model)
    for node in [node for node in model.graph if node.op_type == "Log" and node.domain == ""]:
        bound = producer(node.inputs[0], "Clip") or producer(node.inputs[0], "Max")
        least = scalar_of(bound.inputs[1]) if bound is not None and len(bound.inputs) == 2 else None
        softmax = producer(bound.inputs[0], "Softmax") if bound is not None and least else None
        if softmax is not None and least is not None and least > 0:
            axis = {"axis": softmax.attributes.get_int("axis", -1)}
            scores = names.node("LogSoftmax", softmax.inputs, f"{softmax.name}/LogSoftmax", axis)
            floor = names.constant(np.array(math.log(least), np.float32), f"{node.name}.floor")
            replace(model, node, [scores, names.node("Max", [scores.outputs[0], floor], str(node.name))])
            count += 1
    return count


class Pass(NamedTuple):
    """A rewrite that keeps the function up to rounding. `run` changes a graph in place and returns the number of
    rewrites; `form` describes the graph afterwards."""

    name: str
    run: Callable[[ir.Model], int]
    form: str


# In the order in which they help each other.
PASSES = (
    Pass(
        "shapes",
        _settle,
        "a Reshape takes its shape from a constant, -1 for the free size; other uses of a free size read it from the "
        "graph's input by one chain Shape(input, start, end) -> [Mul] -> Concat; no Identity, Dropout, Cast to the "
        "same type, dead code or shape arithmetic",
    ),
    Pass("stacks", unstack, "no Gather takes one part of a stack of tensors"),
    Pass(
        "views",
        settle_views,
        "the bias of a product is added before any view; a product of heads has a separate axis for them",
    ),
    Pass("layer_norm", norms.fuse_layer_norm, "layer normalisation is one LayerNormalization"),
    Pass(
        "moments",
        lambda model: norms.fuse_layer_norm(model, moments=True),
        "layer normalisation as TensorFlow writes it, a scale and a shift from moments, is one LayerNormalization",
    ),
    Pass(
        "head_norm",
        lambda model: norms.norm_before_heads(model.graph),
        "queries and keys are normalised before their heads are moved to the front",
    ),
    Pass("log_softmax", _log_softmax, "the logarithm of a softmax is LogSoftmax, possibly with a lower bound"),
    Pass("gelu", norms.fuse_gelu, "GELU is one Gelu from opset 20 on (unchanged in lower opsets)"),
    Pass("einsum", products.einsum_to_matmul, "a product of two tensors is a MatMul, not an Einsum"),
    Pass("gather", products.flatten_gathers, "a Gather takes a list of indices, not a grid"),
    Pass(
        "attention",
        products.canonical_attention,
        "attention is MatMul(scale * q, Transpose(k)), an optional Add of a mask, Softmax(axis=-1), MatMul(v)",
    ),
    Pass(
        "convolution",
        products.fold_into_convolutions,
        "a convolution contains the batch normalisation, scale and shift that followed it",
    ),
    Pass(
        "gemm",
        products.gemm_to_matmul,
        "a linear is MatMul(x, W) with a constant W [in, out], and an Add of its bias [out]; no Gemm, no Transpose of "
        "a weight",
    ),
)
