"""The first layer that differs, for an engine of a bundle that was refused for its answers."""

from __future__ import annotations

from pathlib import Path

from vitdeploy.bundle.read import read_bundle
from vitdeploy.errors import AnswersError
from vitdeploy.graph.io.admit import admit_graph
from vitdeploy.runtime.golden import read_golden
from vitdeploy.runtime.preprocess import to_input
from vitdeploy.search.first_layer import SECONDS, first_layer


def locate(error: AnswersError, seconds: float = SECONDS) -> None:
    """Add to what was found where the engine leaves its own graph, on the golden inputs of its bundle. Nothing is added
    where that cannot be said: of several graphs, of other inputs than images, of engines of GPUs.

    Raises:
        VitdeployError: the bundle, or a part of the graph, cannot be read or run.
    """
    folder = Path(error.bundle)
    manifest = read_bundle(folder)
    engine = next((each for each in manifest.engines if each.artifact == error.engine), None)
    golden = read_golden(folder, manifest, engine) if engine is not None else None
    if engine is None or golden is None or manifest.preprocess is None or len(golden.inputs) != 1:
        return
    [images] = golden.inputs.values()
    feeds = [to_input(image[None], manifest.preprocess, engine.inputs[0]) for image in images]
    if where := first_layer(admit_graph(folder / engine.graph), engine, feeds, golden.tolerance, seconds):
        error.found += f"; {where}"
