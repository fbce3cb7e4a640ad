"""Reference outputs: the float graph's outputs for the calibration images, which searches compare with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from vitdeploy.data.decoding import batches
from vitdeploy.data.folder import Sample
from vitdeploy.graph.io.files import fixed_batch, get_metadata, graph_spec, load_graph
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.search.graphs import ReferenceOutputs
from vitdeploy.stages.step import MODEL_FILE

BATCH = 8


def float_reference_outputs(graph: Path, samples: Sequence[Sample]) -> ReferenceOutputs:
    """A float graph's outputs for some images, run at the graph's own batch if that is fixed."""
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    batch = fixed_batch(graph_spec(model, MODEL_FILE)) or BATCH
    pixels = np.concatenate(list(batches(samples, metadata.images, BATCH)))
    with OnnxRuntimeRunner(graph, name="the float graph", batch=batch) as runner:
        return ReferenceOutputs(runner, pixels, metadata.images, metadata.task, batch=batch)
