"""Bring a graph, ours or made by others, into the one form that the later passes know.

The canonical form:

* a linear is MatMul(x, W) with W a constant [in, out], and an Add of its bias [out]; no Gemm, no Transpose of a weight;
* a convolution holds the batch normalisation, scale and shift that followed it;
* layer normalisation is one LayerNormalization, that of queries and keys before their heads are moved to the front;
* GELU is one Gelu from opset 20 on (below, what its exporter wrote);
* a product of two tensors is MatMul, no Einsum;
* attention is MatMul(scale * q, Transpose(k)), the Add of a mask where there is one, Softmax(axis=-1), MatMul(v);
* a Reshape takes its shape from a constant, -1 for the free size; a free size that anything else needs is read from the
  graph's input by one chain Shape(input, start, end) -> [Mul] -> Concat;
* constants are initializers; no Identity, Dropout, Cast to the same type, dead code or shape arithmetic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import (
    LiftConstantsToInitializersPass,
    NameFixPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
    TopologicalSortPass,
)
from onnxscript import optimizer

from vitdeploy.errors import GraphError
from vitdeploy.graph.canonical.attention import canonical_attention
from vitdeploy.graph.canonical.constant_norm import fold_constant_norms
from vitdeploy.graph.canonical.convolution import fold_into_convolutions
from vitdeploy.graph.canonical.einsum import einsum_to_matmul
from vitdeploy.graph.canonical.flat_gather import flatten_gathers
from vitdeploy.graph.canonical.free_sizes import SizeChain
from vitdeploy.graph.canonical.gelu import fuse_gelu
from vitdeploy.graph.canonical.head_norm import norm_before_heads
from vitdeploy.graph.canonical.infer import Inference
from vitdeploy.graph.canonical.layer_norm import fuse_layer_norm
from vitdeploy.graph.canonical.operators import Operators
from vitdeploy.graph.canonical.redundant import remove_redundant
from vitdeploy.graph.canonical.shapes import resolve_shapes
from vitdeploy.graph.canonical.sizes import UNKNOWN, product
from vitdeploy.graph.canonical.upgrade import upgrade_opset
from vitdeploy.graph.linears import constant, name_apart
from vitdeploy.graph.names import Names

# Constants up to this size are computed at export: the largest are position embeddings, not weights.
FOLD_ELEMENTS = 1 << 26
# The oldest opset that has all operators of the canonical form except Gelu, and what an older graph is raised to.
LOWEST_OPSET, OPSET = 18, 20
# Each round may show the next one a constant: shapes -> folded indices -> shapes. Swin's masks take three.
ROUNDS = 8


@dataclass(frozen=True)
class Normalised:
    """How often each pass found something to rewrite, by the name of the pass."""

    passes: dict[str, int]


def normalise(model: ir.Model, opset: int | None = None) -> Normalised:
    """Rewrite `model` into the canonical form, in place; its function stays the same up to rounding.

    Args:
        opset: raise the graph to this opset if it is lower. By default graphs below 18 are raised to 20.

    Raises:
        GraphError: the graph's opset cannot be raised, or one of its constants cannot be computed.
    """
    version = model.graph.opset_imports.get("", 0)
    wanted = opset or (OPSET if version < LOWEST_OPSET else version)
    NameFixPass()(model)
    _lift_constants(model)
    counts = {"opset": int(upgrade_opset(model, wanted))}
    _lift_constants(model)  # the converter writes new ones
    for name, rewrite in _PASSES.items():
        counts[name] = rewrite(model)
    drop_unused(model)
    NameFixPass()(model)
    name_apart(model)
    return Normalised(counts)


def _settle(model: ir.Model) -> int:
    """Fold constants, shapes and redundant nodes, until there is nothing left to do."""
    total, operators = 0, Operators(model.graph.opset_imports)
    for _ in range(ROUNDS):
        folded = fold_constant_norms(model)
        known = Inference(model, operators)
        _fold_constants(model, known)
        chain = SizeChain(model, known)
        changed = resolve_shapes(model, known, chain) + remove_redundant(model, known, chain)
        drop_unused(model)
        total += changed
        if not changed and not folded:
            break
    return total


def _fold_constants(model: ir.Model, known: Inference) -> None:
    """Compute what depends on constants alone; the results are initializers."""

    def fits(node: ir.Node) -> bool | None:
        for output in node.outputs:
            dims = known.dims_of(output)
            size = product(dims) if dims is not None else UNKNOWN
            if not isinstance(size, int) or size > FOLD_ELEMENTS:
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
    _lift_constants(model)
    RemoveUnusedNodesPass()(model)


def _lift_constants(model: ir.Model) -> None:
    if any(node.op_type == "Constant" for node in model.graph):
        LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)


def drop_unused(model: ir.Model) -> None:
    """Remove nodes, initializers and opset imports that nothing reads, and sort what is left. In place."""
    for clean in (RemoveUnusedNodesPass(), RemoveUnusedOpsetsPass(), TopologicalSortPass()):
        clean(model)


def gemm_to_matmul(model: ir.Model) -> int:
    """Gemm with constant weights and bias, alpha = beta = 1, becomes MatMul + Add with the weight as [in, out].

    Left alone: other alpha or beta, a transposed input, weights that are computed. Returns how many were rewritten.
    """
    count, names = 0, Names(model)
    for node in list(model.graph):
        if node.op_type != "Gemm" or node.attributes.get_float("alpha", 1.0) != 1.0:
            continue
        if node.attributes.get_float("beta", 1.0) != 1.0 or node.attributes.get_int("transA", False):
            continue
        weight = constant(node.inputs[1])
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        if weight is None:
            continue
        if node.attributes.get_int("transB", False):
            weight = np.ascontiguousarray(weight.T)
        stem = str(node.name).removesuffix("/Gemm")
        nodes = [names.node("MatMul", [node.inputs[0], names.constant(weight, f"{stem}.weight_t")], f"{stem}/MatMul")]
        if bias is not None:
            nodes.append(names.node("Add", [nodes[0].outputs[0], bias], f"{stem}/Add"))
        old, new = node.outputs[0], nodes[-1].outputs[0]
        new.type, new.shape = old.type, old.shape
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], nodes, [old], [new])
        count += 1
    return count


_PASSES: dict[str, Callable[[ir.Model], int]] = {
    "shapes": _settle,
    "layer_norm": fuse_layer_norm,
    "head_norm": lambda model: norm_before_heads(model.graph),
    "gelu": fuse_gelu,
    "einsum": einsum_to_matmul,
    "gather": flatten_gathers,
    "attention": canonical_attention,
    "convolution": fold_into_convolutions,
    "gemm": gemm_to_matmul,
}
