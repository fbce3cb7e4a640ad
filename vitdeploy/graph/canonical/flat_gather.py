"""A Gather by a grid of indices, which makes two axes of one, as a Gather by a list and a Reshape.

`unfold` is exported so. OpenVINO 2026.4 moves what scales channels behind a Gather as if it left the number of axes,
and then refuses its own graph.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.canonical.edit import array_of, replace, stem
from vitdeploy.graph.canonical.infer import Inference
from vitdeploy.graph.canonical.shapes import view_shape
from vitdeploy.graph.names import Names


def flatten_gathers(model: ir.Model) -> int:
    """In place; returns how many. Left alone: constants, indices that are computed, a result of unknown sizes."""
    grids = [node for node in model.graph if node.op_type == "Gather" and node.domain == "" and _grid(node) is not None]
    known = Inference(model) if grids else None
    count = 0
    for node in grids:
        data, indices = node.inputs[0], _grid(node)
        assert known is not None and data is not None and indices is not None
        dims, wanted = known.dims_of(data), known.dims_of(node.outputs[0])
        if array_of(data) is not None or dims is None or wanted is None:
            continue
        axis = node.attributes.get_int("axis", 0) % len(dims)
        flat = (*dims[:axis], int(indices.size), *dims[axis + 1 :])
        target = view_shape(flat, wanted)
        if target is None:
            continue
        names = Names(model)
        listed = names.constant(indices.reshape(-1), f"{stem(node)}.indices")
        shape = names.constant(np.array(target, np.int64), f"{stem(node)}.shape")
        gather = names.node("Gather", [data, listed], f"{stem(node)}/Gather", {"axis": axis})
        gather.outputs[0].type = node.outputs[0].type
        reshape = names.node("Reshape", [gather.outputs[0], shape], f"{stem(node)}/Reshape")
        known.dims[gather.outputs[0]], known.dims[reshape.outputs[0]] = flat, wanted
        replace(model, node, [gather, reshape])
        count += 1
    if count:
        Inference(model)  # shapes of what is new
    return count


def _grid(node: ir.Node) -> np.ndarray | None:
    """The constant indices of several axes."""
    array = array_of(node.inputs[1])
    return array if array is not None and array.ndim > 1 else None
