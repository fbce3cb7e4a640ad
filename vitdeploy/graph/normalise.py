"""Bring an exported graph into the one form that the later passes know."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import (
    LiftConstantsToInitializersPass,
    RemoveUnusedNodesPass,
    RemoveUnusedOpsetsPass,
    TopologicalSortPass,
)
from onnxscript import optimizer

from vitdeploy.graph.linears import constant

# Constants up to this size are computed at export: the largest are position embeddings, not weights.
FOLD_ELEMENTS = 1 << 26


def normalise(model: ir.Model) -> None:
    """Fold constants, write every linear as MatMul + Add, drop what nothing reads. Changes the model in place."""
    optimizer.fold_constants(
        model, onnx_shape_inference=True, input_size_limit=FOLD_ELEMENTS, output_size_limit=FOLD_ELEMENTS
    )
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    gemm_to_matmul(model)
    drop_unused(model)


def drop_unused(model: ir.Model) -> None:
    """Remove nodes, initializers and opset imports that nothing reads, and sort what is left. In place."""
    for clean in (RemoveUnusedNodesPass(), RemoveUnusedOpsetsPass(), TopologicalSortPass()):
        clean(model)


def gemm_to_matmul(model: ir.Model) -> None:
    """Gemm with constant weights and bias, alpha = beta = 1, becomes MatMul + Add with the weight as [in, out].

    Left alone: other alpha or beta, a transposed input, weights that are computed.
    """
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
        new_weight = ir.Value(name=f"{stem}.weight_t", const_value=ir.tensor(weight, name=f"{stem}.weight_t"))
        model.graph.register_initializer(new_weight)
        product = ir.node("MatMul", [node.inputs[0], new_weight], name=f"{stem}/MatMul")
        product.outputs[0].name = f"{stem}/MatMul"
        nodes = [product]
        if bias is not None:
            nodes.append(ir.node("Add", [product.outputs[0], bias], name=f"{stem}/Add"))
        old, new = node.outputs[0], nodes[-1].outputs[0]
        new.type, new.shape = old.type, old.shape
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], nodes, [old], [new])
