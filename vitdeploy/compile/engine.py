"""Compile one placement for its target, and check that it runs as it was placed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vitdeploy.errors import CapabilityError, TargetError
from vitdeploy.spec import TARGETS, EngineSpec, Precision

if TYPE_CHECKING:
    from vitdeploy.compile.tensorrt import BuildOptions

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
    progress: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> EngineSpec:
    """Make the engine's files in `out`, run it once, and say what ran.

    Args:
        graph: the placement (ONNX) of this target.
        out: an existing empty folder; gets `graph.onnx` and what the runtime loads.
        precision: what was asked for.
        batch: the batch to compile at; a dynamic batch in the graph is pinned to it.
        placed: how many linears and convolutions the placement has in INT8.
        build: how TensorRT builds; by default as `compile.tensorrt.BuildOptions` says.
        progress: hears of the steps of a long build: (what, how much is done, how much there is).

    Raises:
        TargetError: an unknown target.
        CapabilityError: the target or this CPU cannot do the precision, or the engine did not run as placed.
        EngineError: the runtime refuses the graph.
        MissingPackageError, DeviceMemoryError, WorkerError: as `compile.tensorrt.compile_graph`.
    """
    row = TARGETS.get(target)
    if row is None:
        raise TargetError(f"no target is called {target!r}", wanted=", ".join(TARGETS))
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
    if row.backend == "onnxruntime" and row.device == "GPU":
        from vitdeploy.compile import onnxruntime_gpu

        return onnxruntime_gpu.compile_graph(placement, target, precision, batch)
    if row.backend == "openvino":
        from vitdeploy.compile import openvino

        engine = openvino.compile_graph(placement, precision, batch)
    elif row.backend == "tensorrt":
        from vitdeploy.compile import tensorrt

        engine = tensorrt.compile_graph(placement, precision, batch, options=build, progress=progress)
    else:
        from vitdeploy.compile import onnxruntime

        engine = onnxruntime.compile_graph(placement, precision, batch)
    if row.backend == "tensorrt":
        _ran_as_typed(engine, precision, placed)
    else:
        _ran_as_placed(engine, precision, placed)
    return engine


def _ran_as_placed(engine: EngineSpec, asked: Precision, placed: int) -> None:
    """No silent fallback: every layer ran in the precision that it was given."""
    int8 = engine.kernels.get("int8", 0)
    integer = asked in ("int8", "mixed")
    if integer and (int8 < placed or (asked == "int8" and not placed)):
        raise CapabilityError(
            f"{engine.target} did not run the graph in INT8",
            found=f"{int8} of {placed} placed layers in INT8 kernels: {engine.kernels}",
            wanted=f"{placed} in INT8",
            fix="run `vitdeploy doctor`; the CPU may lack INT8 instructions",
        )
    if not integer:
        others = {kind: count for kind, count in engine.kernels.items() if kind != asked}
        if others or not engine.kernels:
            raise CapabilityError(
                f"{engine.target} did not run the graph in {asked}",
                found=str(engine.kernels),
                wanted=f"all linears and convolutions in {asked}",
            )


def _ran_as_typed(engine: EngineSpec, asked: Precision, placed: int) -> None:
    """TensorRT computes in the types that the graph has, of which some may be wider than what was asked for.

    Of INT8 and FP8 the engine must have as many layers as were placed. A layer that the engine does not name is
    "unknown": it is recorded as such and refuses nothing.
    """
    quantized = asked in ("int8", "fp8")
    ran = engine.kernels.get(asked, 0)
    unknown = engine.kernels.get("unknown", 0)
    if ran + unknown < (max(1, placed) if quantized else 1):
        raise CapabilityError(
            f"tensorrt did not run the graph in {asked}",
            found=f"{ran} layers in {asked}, {unknown} that the engine does not name: {engine.kernels}",
            wanted=f"at least {max(1, placed) if quantized else 1} in {asked}",
            fix="layers.json beside the plan lists every layer; `vitdeploy inspect GRAPH --target tensorrt` the rules",
        )
