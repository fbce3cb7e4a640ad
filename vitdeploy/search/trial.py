"""One trial: a placement compiled for its target, run on the images of the reference outputs, and discarded."""

from __future__ import annotations

import tempfile
from pathlib import Path

import onnx_ir as ir

from vitdeploy.compilation.engine import compile_engine
from vitdeploy.graph.analysis.linears import count_int8
from vitdeploy.graph.io.files import save_graph
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.runner import Array
from vitdeploy.search.reference_outputs import ReferenceOutputs
from vitdeploy.spec import FloatRest, Precision


def answers_of(
    model: ir.Model,
    target: str,
    precision: Precision,
    reference_outputs: ReferenceOutputs,
    float_rest: FloatRest = "fp32",
) -> dict[str, Array]:
    """The outputs of a placement on its own runtime, [images, ...] by name.

    Raises:
        EngineError, CapabilityError: as `compilation.engine.compile_engine`.
    """
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        graph, out = Path(folder) / "model.onnx", Path(folder) / "engine"
        out.mkdir()
        save_graph(model, graph)
        placed = count_int8(model)
        engine = compile_engine(
            graph,
            out,
            target=target,
            precision=precision,
            batch=reference_outputs.batch,
            placed=placed,
            float_rest=float_rest,
        )
        with make_runner(out, engine) as runner:
            return reference_outputs.ask(runner)
