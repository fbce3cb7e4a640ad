"""Find where a non-finite value arises: the first node, in graph order, that makes one from finite inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from vitdeploy.graph.io.files import weights_folder
from vitdeploy.graph.values import array_of
from vitdeploy.runtime.ort import OnnxRuntimeRunner

# The outputs of this many nodes are held at once.
WINDOW = 16


def find_nonfinite(model: ir.Model, tensor: str, feeds: Mapping[str, npt.NDArray[Any]]) -> str:
    """Describe what makes `tensor` non-finite on these inputs: a node, or weights.

    Infinities that a node passes on, such as those of an attention mask, do not count: only a NaN or an infinity that
    none of its inputs has.
    """
    nodes = _before(model, tensor)
    known = {str(value.name): _kinds(array_of(value)) for node in nodes for value in node.inputs if value is not None}
    broken = next((name for name, kinds in known.items() if "NaN" in kinds), None)
    if broken is not None:
        return f"NaN in the weights {broken}"
    known |= {name: _kinds(array) for name, array in feeds.items()}
    proto = ir.to_proto(model)
    for start in range(0, len(nodes), WINDOW):
        window = nodes[start : start + WINDOW]
        del proto.graph.output[:]
        names = [str(value.name) for node in window for value in node.outputs if value.name]
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
        data = proto.SerializeToString()
        with OnnxRuntimeRunner(data, name="calibration", weights=weights_folder(model)) as runner:
            known |= {name: _kinds(array) for name, array in runner.infer(dict(feeds)).items()}
        for node in window:
            given = set().union(*(known.get(str(value.name), set()) for value in node.inputs if value is not None))
            made = set().union(*(known.get(str(value.name), set()) for value in node.outputs)) - given
            if made:
                return f"{' and '.join(sorted(made))} out of the node {node.name} ({node.op_type})"
    return f"the tensor {tensor}"


def _before(model: ir.Model, tensor: str) -> list[ir.Node]:
    """The nodes that `tensor` is computed from, in graph order."""
    wanted, found = {tensor}, []
    for node in reversed(list(model.graph)):
        if wanted & {str(value.name) for value in node.outputs}:
            found.append(node)
            wanted |= {str(value.name) for value in node.inputs if value is not None}
    return found[::-1]


def _kinds(array: npt.NDArray[Any] | None) -> set[str]:
    """The kinds of values in it that are not finite."""
    if array is None or not np.issubdtype(array.dtype, np.floating):
        return set()
    infinite = np.isinf(array)
    return ({"infinity"} if infinite.any() else set()) | ({"NaN"} if np.isnan(array).any() else set())
