"""Compiles one placement for its target, and checks that it runs as placed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.backends import TARGETS
from vitdeploy.compilation.backend import COMPILE, CompileRequest, Progress
from vitdeploy.errors import CapabilityError
from vitdeploy.spec import EngineSpec, FloatRest, Precision

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
    bare: bool = False,
    build: BuildOptions | None = None,
    progress: Progress = lambda text, done, total: None,
    float_rest: FloatRest = "fp32",
) -> EngineSpec:
    """Write the engine's files to `out`, run it once, and return what ran.

    Args:
        graph: the placement (ONNX) of this target.
        out: an existing empty folder; gets `graph.onnx` and what the runtime loads.
        precision: the requested one.
        batch: the batch to compile at; a dynamic batch in the graph is pinned to it.
        placed: how many linears and convolutions the placement has in INT8, or in INT4.
        bare: whether the graph has no linear or convolution, so that no kernel of one can be found.
        build: how TensorRT builds; defaults as in `compilation.tensorrt.BuildOptions`.
        progress: called with the steps of a long build: (what, done, total).
        float_rest: what an INT8 engine computes its float operators in, where the CPU has it.

    Raises:
        TargetError: an unknown target.
        CapabilityError: the target or this CPU does not support the precision, or the engine did not run as placed.
        EngineError: the runtime rejects the graph.
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
    weights = weights_of(graph)
    if weights.is_file():  # the graph names them, so they keep their name
        shutil.copyfile(weights, out / weights.name)
    engine = backend.compile_graph(CompileRequest(placement, target, precision, batch, build, progress, float_rest))
    if engine.kernels or not bare:
        backend.check_ran(engine, precision, placed)
    return engine


def weights_of(graph: Path) -> Path:
    """The file beside a graph that holds the weights of one that is too large for a single file."""
    return graph.with_name(f"{graph.name}.data")
