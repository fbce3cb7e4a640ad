"""Replace an input of a graph by a constant, the same for every sample."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.names import Names


def bind_input(model: ir.Model, name: str, value: npt.NDArray[Any]) -> None:
    """Every sample of the batch gets `value` for the input `name`, which is an input no longer. In place.

    A detector that scales its boxes by a second input, the size of the image in pixels, gives boxes relative to the
    image (0 to 1) when that size is bound to (1, 1). `normalise` then removes what the constant makes superfluous.

    Args:
        value: the input of one sample, without the batch axis; cast to the input's type.

    Raises:
        GraphError: no such input, no other input to take the batch from, or a shape that `value` does not have.
    """
    inputs = {str(item.name): item for item in model.graph.inputs}
    bound = inputs.pop(name, None)
    if bound is None or bound.dtype is None or bound.shape is None:
        raise GraphError(f"the graph has no input {name!r} to bind", found=", ".join(inputs) or "none")
    if not inputs:
        raise GraphError(f"{name!r} is the only input of the graph", wanted="another input that holds the images")
    batch, *sizes = bound.shape if len(bound.shape) else (None,)
    fits = len(sizes) == value.ndim and all(
        not isinstance(size, int) or size == own for size, own in zip(sizes, value.shape, strict=True)
    )
    if batch is None or not fits:
        raise GraphError(
            f"the value does not fit the input {name!r}",
            found=f"shape {list(value.shape)} for each sample",
            wanted=f"shape {[size if isinstance(size, int) else str(size) for size in sizes]}",
        )
    array = np.ascontiguousarray(value[np.newaxis].astype(bound.dtype.numpy()))
    constant = Names(model).constant(array, f"{name}.constant")
    if isinstance(batch, int) and batch == 1:
        repeated = constant
    else:
        repeated = _repeated(model, constant, batch, next(iter(inputs.values())))
    ir.convenience.replace_all_uses_with(bound, repeated, replace_graph_outputs=True)
    model.graph.inputs.remove(bound)


def _repeated(model: ir.Model, constant: ir.Value, batch: int | ir.SymbolicDim, images: ir.Value) -> ir.Value:
    """`constant` once for each sample: Expand to (batch, 1, ...)."""
    rest, names, name = [1] * (len(constant.shape or ()) - 1), Names(model), constant.name
    if isinstance(batch, int):
        target = names.constant(np.array([batch, *rest], np.int64), f"{name}.shape")
        nodes = []
    else:
        size = names.node("Shape", [images], f"{name}/Shape")
        zero = names.constant(np.zeros(1, np.int64), f"{name}.axis")
        first = names.node("Gather", [size.outputs[0], zero], f"{name}/Gather", {"axis": 0})
        ones = names.constant(np.array(rest, np.int64), f"{name}.ones")
        shape = names.node("Concat", [first.outputs[0], ones], f"{name}/Concat", {"axis": 0})
        nodes, target = [size, first, shape], shape.outputs[0]
    nodes.append(names.node("Expand", [constant, target], f"{name}/Expand"))
    nodes[-1].outputs[0].type = constant.type
    model.graph.insert_before(model.graph[0], nodes)
    return nodes[-1].outputs[0]
