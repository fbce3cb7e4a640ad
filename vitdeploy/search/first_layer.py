"""The first layer that a runtime computes otherwise than the graph says, for an engine that was refused.

As `bisect`, but between two ways of computing one graph: the engine's runtime, and ONNX Runtime without optimisation.
Parts that begin at the input, or at a tensor of the evaluation, run on the engine's runtime and are compared where they
end. A runtime fuses within such a part as it does in the whole graph.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from vitdeploy.backends import TARGETS
from vitdeploy.graph.analysis.prunable import part, single_cuts
from vitdeploy.graph.io.files import save_graph
from vitdeploy.lint.view import label, prepare
from vitdeploy.runtime.backend import engine_is_code
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.golden import largest_difference
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import EngineSpec

# After which no further part of a wrong engine is looked at.
SECONDS = 30.0


def first_layer(
    model: ir.Model, engine: EngineSpec, feeds: Sequence[Array], tolerance: float, seconds: float
) -> str | None:
    """A sentence on where the answers of an engine leave those of its graph; None where that cannot be said.

    Args:
        model: the engine's graph, of one input.
        feeds: inputs of one image each, [1, ...]; the first whose answers differ is looked at.
        tolerance: of max|a - b| / max|b|.
        seconds: when no further part is begun; what is known by then is said.

    Raises:
        VitdeployError: a part that the runtime, or ONNX Runtime, refuses.
    """
    if engine.parts or engine.batch != 1 or TARGETS[engine.target].typed or engine_is_code(engine):
        return None
    search = _Search(prepare(model).model, engine, tolerance, time.monotonic() + seconds)
    outputs = [str(value.name) for value in model.graph.outputs]
    for feed in feeds:
        search.feed = feed
        if search.differs((), outputs):
            return _located(search, outputs)
    return "the runtime computes what the engine's graph says: the graph is not the one that the answers are of"


@dataclass
class _Search:
    """`feed`: the image that is looked at."""

    model: ir.Model
    engine: EngineSpec
    tolerance: float
    deadline: float
    feed: Array = dataclasses.field(default_factory=lambda: np.zeros(0, np.float32))

    @property
    def over(self) -> bool:
        return time.monotonic() > self.deadline

    def differs(self, given: Sequence[str], wanted: Sequence[str]) -> bool:
        """Whether the runtime computes `wanted` otherwise, from what the evaluation has for `given`."""
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
            known = self._run(folder, (), [*given, *wanted], {}, plain=True)
            found = self._run(folder, given, wanted, known, plain=False)
        return not largest_difference(found, known, wanted) <= self.tolerance

    def _run(
        self, folder: str, given: Sequence[str], wanted: Sequence[str], known: Mapping[str, Array], *, plain: bool
    ) -> dict[str, Array]:
        model = part(self.model, given, wanted, self.engine.batch)
        file = Path(folder) / f"{'plain' if plain else 'engine'}.onnx"
        save_graph(model, file)
        runner: Runner = (
            OnnxRuntimeRunner(file, name="evaluation", batch=self.engine.batch, plain=True)
            if plain
            else make_runner(Path(folder), dataclasses.replace(self.engine, files=(file.name,)))
        )
        names = [str(value.name) for value in model.graph.inputs]
        with runner:
            feeds = {t.name: known.get(name, self.feed) for t, name in zip(runner.inputs, names, strict=True)}
            return dict(zip(wanted, runner.infer(feeds).values(), strict=True))


def _located(search: _Search, outputs: Sequence[str]) -> str:
    """Where the answers of an engine differ: the part of the graph first, then the node in it."""
    cuts = single_cuts(search.model)
    low, high = 0, len(cuts) + 1  # of cuts[low - 1] the runtime is right, of cuts[high - 1] it is not
    while high - low > 1 and not search.over:
        middle = (low + high) // 2
        low, high = (low, middle) if search.differs((), [cuts[middle - 1]]) else (middle, high)
    start, end = cuts[low - 1] if low else "the input", cuts[high - 1] if high <= len(cuts) else "the output"
    between = f"the answers differ first between {start} and {end}"
    given, wanted = cuts[low - 1 : low] if low else [], cuts[high - 1 : high] or list(outputs)
    if high - low > 1 or search.over:
        return f"{between}; there was no time to look closer"
    inside = part(search.model, given, wanted, search.engine.batch)
    nodes = [node for node in inside.graph if any(value.dtype == ir.DataType.FLOAT for value in node.outputs)]
    names = [str(node.outputs[0].name) for node in nodes]
    if not search.differs(given, names):
        return f"{between}, in a kernel for several layers: asked for each by itself, the runtime is right"
    low, high = 0, len(names)
    while high - low > 1 and not search.over:
        middle = (low + high) // 2
        low, high = (low, middle) if search.differs(given, names[:middle]) else (middle, high)
    return f"the first layer that differs is {label(nodes[high - 1])}" if high - low == 1 else between
