"""Bring a graph, ours or made by others, into the one form that the later passes know: the canonical form.

Each row of `PASSES` says its part of it. In all of them constants are initializers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import NameFixPass

from vitdeploy.graph.analysis.linears import name_apart
from vitdeploy.graph.canonical.attention import canonical_attention
from vitdeploy.graph.canonical.convolution import fold_into_convolutions
from vitdeploy.graph.canonical.folding import fold_constant_norms, fold_constants, lift_constants
from vitdeploy.graph.canonical.free_sizes import SizeChain
from vitdeploy.graph.canonical.gather import flatten_gathers
from vitdeploy.graph.canonical.gelu import fuse_gelu
from vitdeploy.graph.canonical.layer_norm import fuse_layer_norm, norm_before_heads
from vitdeploy.graph.canonical.matmul import einsum_to_matmul, gemm_to_matmul
from vitdeploy.graph.canonical.moments import fuse_moments
from vitdeploy.graph.canonical.redundant import remove_redundant
from vitdeploy.graph.canonical.shapes import resolve_shapes
from vitdeploy.graph.canonical.stacks import unstack
from vitdeploy.graph.canonical.upgrade import upgrade_opset
from vitdeploy.graph.canonical.views import settle_views
from vitdeploy.graph.edit import Names, drop_unused, replace
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.shapes.operators import Operators
from vitdeploy.graph.values import producer, scalar_of

# The oldest opset that has all operators of the canonical form except Gelu, and what an older graph is raised to.
LOWEST_OPSET, OPSET = 18, 20
# Each round may reveal constants to the next: shapes -> folded indices -> shapes. Swin's masks take three.
ROUNDS = 8


@dataclass(frozen=True)
class Normalised:
    """The number of rewrites of each pass, by the name of the pass."""

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
    lift_constants(model)
    counts = {"opset": int(upgrade_opset(model, wanted))}
    lift_constants(model)  # the converter writes new ones
    for each in PASSES:
        counts[each.name] = each.run(model)
    drop_unused(model)
    NameFixPass()(model)
    name_apart(model)
    return Normalised(counts)


def _settle(model: ir.Model) -> int:
    """Fold constants, shapes and redundant nodes, until there is nothing left to do."""
    total, operators = 0, Operators(model.graph.opset_imports)
    counts_pixels = any(node.op_type == "CumSum" for node in model.graph)
    for _ in range(ROUNDS):
        folded = fold_constant_norms(model)
        known, before = Inference(model, operators), len(model.graph)
        fold_constants(model, known)
        folded += before - len(model.graph)  # what was folded may tell the next round a size
        chain = SizeChain(model, known)
        changed = resolve_shapes(model, known, chain) + remove_redundant(model, known, chain, masks=counts_pixels)
        drop_unused(model)
        total += changed
        if not changed and not folded:
            break
    return total


def _log_softmax(model: ir.Model) -> int:
    """Write max(LogSoftmax(x), log c) for Log(max(Softmax(x), c)), which float16 has no small numbers for."""
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
    """A rewrite that keeps the function up to rounding. `run` changes a graph in place and returns how often; `form` is
    what holds of the graph from then on."""

    name: str
    run: Callable[[ir.Model], int]
    form: str


# In the order in which they help each other.
PASSES = (
    Pass(
        "shapes",
        _settle,
        "a Reshape takes its shape from a constant, -1 for the free size; a free size that anything else needs is read "
        "from the graph's input by one chain Shape(input, start, end) -> [Mul] -> Concat; no Identity, Dropout, Cast "
        "to the same type, dead code or shape arithmetic",
    ),
    Pass("stacks", unstack, "no Gather takes one part of a stack of tensors"),
    Pass(
        "views",
        settle_views,
        "the bias of a product is added to it before any view; a product of heads has an axis of theirs",
    ),
    Pass("layer_norm", fuse_layer_norm, "layer normalisation is one LayerNormalization"),
    Pass("moments", fuse_moments, "so is that of TensorFlow, a scale and a shift made of moments"),
    Pass(
        "head_norm",
        lambda model: norm_before_heads(model.graph),
        "queries and keys are normalised before their heads are moved to the front",
    ),
    Pass("log_softmax", _log_softmax, "the logarithm of a softmax is LogSoftmax, at most bounded below"),
    Pass("gelu", fuse_gelu, "GELU is one Gelu from opset 20 on (below, what its exporter wrote)"),
    Pass("einsum", einsum_to_matmul, "a product of two tensors is MatMul, no Einsum"),
    Pass("gather", flatten_gathers, "a Gather takes a list of indices, no grid"),
    Pass(
        "attention",
        canonical_attention,
        "attention is MatMul(scale * q, Transpose(k)), the Add of a mask where there is one, Softmax(axis=-1), "
        "MatMul(v)",
    ),
    Pass(
        "convolution",
        fold_into_convolutions,
        "a convolution holds the batch normalisation, scale and shift that followed it",
    ),
    Pass(
        "gemm",
        gemm_to_matmul,
        "a linear is MatMul(x, W) with W a constant [in, out], and an Add of its bias [out]; no Gemm, no Transpose of "
        "a weight",
    ),
)
