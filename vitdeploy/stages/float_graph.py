"""The float graph that a stage takes: neither quantized nor placed yet."""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.io.files import GraphMetadata, get_metadata, load_graph
from vitdeploy.quantization.placement_reader import reject_quantized


def load_float_graph(graph: Path) -> tuple[ir.Model, GraphMetadata]:
    """The graph with its metadata.

    Raises:
        GraphError: it is quantized, or placed for a target, already.
    """
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    if metadata.precision is not None:
        raise GraphError(
            f"{graph} is quantized or placed already",
            found=f"{metadata.precision} for {metadata.target}",
            wanted="the float graph written by `vitdeploy export`",
        )
    reject_quantized(model, str(graph))
    return model, metadata
