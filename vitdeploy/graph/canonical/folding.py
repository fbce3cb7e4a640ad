"""Constant folding: replace what depends on constants alone by its value."""

from __future__ import annotations

import logging

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import LiftConstantsToInitializersPass, RemoveUnusedNodesPass
from onnxscript import optimizer

from vitdeploy.errors import GraphError
from vitdeploy.graph.edit import Names
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.shapes.sizes import UNKNOWN, product
from vitdeploy.graph.values import array_of

# Constants up to this size are computed at export: the largest are position embeddings, not weights.
FOLD_ELEMENTS = 1 << 26
# Operators that are computed element by element in Python, about 10^5 elements a second; and how many each may have.
SLOW = frozenset(
    {
        *("AveragePool", "Conv", "ConvTranspose", "GridSample", "LRN", "LpPool", "MaxPool", "NonMaxSuppression"),
        *("Resize", "RoiAlign", "ScatterElements", "ScatterND", "Unique", "Upsample"),
    }
)
SLOW_ELEMENTS = 1 << 20


def lift_constants(model: ir.Model) -> None:
    """Constant nodes become initializers, in place."""
    if any(node.op_type == "Constant" for node in model.graph):
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def fold_constants(model: ir.Model, known: Inference) -> None:
    """Compute what depends on constants alone; the results are initializers."""

    def fits(node: ir.Node) -> bool | None:
        for value in node.inputs:  # onnxscript lists in each constant all that are behind it: quadratic in a chain
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
    logger.setLevel(logging.ERROR)  # it warns of each operator with several outputs, which concerns no user
    try:
        with np.errstate(all="ignore"):
            optimizer.fold_constants(
                model,
                onnx_shape_inference=False,
                input_size_limit=FOLD_ELEMENTS,
                output_size_limit=FOLD_ELEMENTS,
                should_fold=fits,
            )
    except Exception as error:  # a node that no runtime could run either; the folding wraps whatever it meets
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
    """LayerNormalization of constants becomes a constant. In place; returns how many.

    onnxscript's folding leaves it: it computes no operator with several outputs. DETR's first decoder block begins so:
    its queries see each other before they see an image.

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
