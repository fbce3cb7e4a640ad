"""The float graph that a stage takes, neither quantized nor placed yet, and its outputs for the calibration images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir

from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import Sample
from vitdeploy.errors import GraphError
from vitdeploy.graph.io.files import GraphMetadata, fixed_batch, get_metadata, graph_spec, load_graph
from vitdeploy.quantization.placement_reader import reject_quantized
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.search.graphs import ReferenceOutputs
from vitdeploy.stages.step import MODEL_FILE

BATCH = 8


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


def float_reference_outputs(graph: Path, samples: Sequence[Sample]) -> ReferenceOutputs:
    """A float graph's outputs for some images, which searches compare with; run at its own batch if that is fixed."""
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    batch = fixed_batch(graph_spec(model, MODEL_FILE)) or BATCH
    pixels = np.concatenate(list(batches(samples, metadata.images, BATCH)))
    with OnnxRuntimeRunner(graph, name="the float graph", batch=batch) as runner:
        return ReferenceOutputs(runner, pixels, metadata.images, metadata.task, batch=batch)
