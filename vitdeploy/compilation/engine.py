"""Compile one placement for its target, and check that it runs as it was placed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.backends import TARGETS
from vitdeploy.compilation.backend import COMPILE, CompileRequest, Progress
from vitdeploy.errors import CapabilityError
from vitdeploy.spec import EngineSpec, Precision

if TYPE_CHECKING:
    from vitdeploy.compilation.build_options import BuildOptions

GRAPH_FILE = "graph.onnx"


def compile_engine(
    graph: Path,
    out: Path,
    *,
    target: str,
    precision: Precision,
    batch: int,
    placed: int,
    build: BuildOptions | None = None,
    progress: Progress = lambda text, done, total: None,
) -> EngineSpec:
    """Make the engine's files in `out`, run it once, and say what ran.

    Args:
        graph: the placement (ONNX) of this target.
        out: an existing empty folder; gets `graph.onnx` and what the runtime loads.
        precision: what was asked for.
        batch: the batch to compile at; a dynamic batch in the graph is pinned to it.
        placed: how many linears and convolutions the placement has in INT8.
        build: how TensorRT builds; by default as `compilation.tensorrt.BuildOptions` says.
        progress: hears of the steps of a long build: (what, how much is done, how much there is).

    Raises:
        TargetError: an unknown target.
        CapabilityError: the target or this CPU cannot do the precision, or the engine did not run as placed.
        EngineError: the runtime refuses the graph.
        MissingPackageError, DeviceMemoryError, WorkerError: as `compilation.tensorrt.compile_graph`.
    """
    row, backend = TARGETS[target], COMPILE[target]
    if precision not in row.precisions:
        raise CapabilityError(
            f"{target} cannot run {precision}",
            found=precision,
            wanted=", ".join(row.precisions),
            fix="choose one of these precisions, or another target",
        )
    placement = out / GRAPH_FILE
    shutil.copyfile(graph, placement)
    weights = graph.with_name(f"{graph.name}.data")
    if weights.is_file():  # the graph names them, so they keep their name
        shutil.copyfile(weights, out / weights.name)
    engine = backend.compile_graph(CompileRequest(placement, target, precision, batch, build, progress))
    backend.check_ran(engine, precision, placed)
    return engine
