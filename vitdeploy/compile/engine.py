"""Compile one placement for its target, and check that it runs as it was placed."""

from __future__ import annotations

import shutil
from pathlib import Path

from vitdeploy.errors import CapabilityError, TargetError
from vitdeploy.spec import TARGETS, EngineSpec, Precision

GRAPH_FILE = "graph.onnx"


def compile_engine(graph: Path, out: Path, *, target: str, precision: Precision, batch: int, placed: int) -> EngineSpec:
    """Make the engine's files in `out`, run it once, and say what ran.

    Args:
        graph: the placement (ONNX) of this target.
        out: an existing empty folder; gets `graph.onnx` and what the runtime loads.
        precision: what was asked for.
        batch: the batch to compile at; a dynamic batch in the graph is pinned to it.
        placed: how many linears and convolutions the placement has in INT8.

    Raises:
        TargetError: an unknown target.
        CapabilityError: the target or this CPU cannot do the precision, or the engine did not run as placed.
        EngineError: the runtime refuses the graph.
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
    for weights in graph.parent.glob(f"{graph.name}.data"):  # the graph names them, so they keep their name
        shutil.copyfile(weights, out / weights.name)
    if row.backend == "onnxruntime" and row.device == "GPU":
        from vitdeploy.compile import onnxruntime_gpu

        return onnxruntime_gpu.compile_graph(placement, target, precision, batch)
    if row.backend == "openvino":
        from vitdeploy.compile import openvino

        engine = openvino.compile_graph(placement, precision, batch)
    else:
        from vitdeploy.compile import onnxruntime

        engine = onnxruntime.compile_graph(placement, precision, batch)
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
