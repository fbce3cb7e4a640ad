"""A graph run with the weights of its attentions as outputs, on ONNX Runtime."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from vitdeploy.attention.rollout import Floats, read_by, rollout, to_grid
from vitdeploy.graph.analysis.attention import AttentionViews
from vitdeploy.graph.io.files import save_graph
from vitdeploy.graph.passes.tokens import mark, mark_mean
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import Pixels, to_input
from vitdeploy.runtime.runner import Array
from vitdeploy.spec import PreprocessSpec


@dataclass(frozen=True)
class InstrumentedOutputs:
    """The outputs of a graph for one image.

    outputs: its own, without the batch axis. means: float64 [queries, keys] of every attention but the last, the mean
    over its heads. heads: float64 [heads, queries, keys] of the last one.
    """

    outputs: Mapping[str, Array]
    means: tuple[Floats, ...]
    heads: Floats

    def flow(self, views: AttentionViews) -> Floats:
        """Rollout over all attentions: see `rollout`."""
        return rollout([*self.means, self.heads.mean(axis=0)], pooled=views.last.learned)

    def flow_map(self, views: AttentionViews) -> Floats:
        """The same for those that are looked at, over the patches: float64 [rows, columns]."""
        return to_grid(read_by(self.flow(views), views.rows), views.grid)


def run_instrumented(
    model: ir.Model, views: AttentionViews, images: Iterable[Pixels], preprocess: PreprocessSpec
) -> Iterator[InstrumentedOutputs]:
    """Run a graph on images, one at a time. `views` are those of `model`, which is changed in place.

    Raises:
        GraphError, EngineError: ONNX Runtime cannot run the graph.
    """
    names = (*(mark_mean(model, each) for each in views.blocks[:-1]), mark(model, views.last))
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        file = Path(folder) / "marked.onnx"
        save_graph(model, file)
        with OnnxRuntimeRunner(file, name="the graph that is looked at", batch=1) as runner:
            tensor = runner.inputs[0]
            batch = tensor.shape[0] if isinstance(tensor.shape[0], int) else 1
            for pixels in images:
                outputs = runner.infer({tensor.name: to_input([pixels] * batch, preprocess, tensor)})
                yield _watched(outputs, names, views, batch)


def _watched(
    outputs: Mapping[str, Array], names: tuple[str, ...], views: AttentionViews, batch: int
) -> InstrumentedOutputs:
    arrays = []
    for name, weights in zip(names, views.blocks, strict=True):
        array = outputs[name].astype(np.float64)
        # Batch and heads may share an axis.
        heads = array.size // (batch * weights.queries * weights.keys) if name == names[-1] else 1
        arrays.append(array.reshape(-1, heads, weights.queries, weights.keys)[0])
    own = {name: array[0] for name, array in outputs.items() if name not in names}
    return InstrumentedOutputs(own, tuple(array[0] for array in arrays[:-1]), arrays[-1])
