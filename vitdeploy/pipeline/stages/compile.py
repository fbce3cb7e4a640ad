"""From the placement of a target to its engine."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from vitdeploy.bundle.read import file_sha256
from vitdeploy.compile.engine import compile_engine
from vitdeploy.compile.parts import joined, within
from vitdeploy.compile.tensorrt import BuildOptions, default_batches
from vitdeploy.errors import CapabilityError, TargetError
from vitdeploy.graph.analysis.linears import count_int8
from vitdeploy.graph.io.files import GraphMetadata, fixed_batch, get_metadata, graph_spec, load_graph
from vitdeploy.lint.linter import lint, refuse
from vitdeploy.lint.support import nearest_version
from vitdeploy.pipeline.progress import Progress, silent
from vitdeploy.pipeline.stages.files import MODEL_FILE, graphs_in, read_json, write_json
from vitdeploy.runtime import tensorrt_identity
from vitdeploy.runtime.profiles import plan_profiles
from vitdeploy.runtime.tensorrt_api import require as tensorrt_version
from vitdeploy.runtime.trust import is_trusted
from vitdeploy.spec import TARGETS, EngineSpec, GraphSpec, Task, decode, encode


def check_task(task: Task, target: str, precision: str) -> None:
    """Raise where a target does not run models of this task in that precision.

    Raises:
        CapabilityError: an encoder-decoder on a GPU, where lengths would have to be fixed, or in 8 bits.
    """
    if task != "sequence":
        return
    if TARGETS[target].device == "GPU":
        others = [name for name, row in TARGETS.items() if row.device != "GPU"]
        raise CapabilityError(
            f"an encoder-decoder does not run on {target} in this version",
            found="graphs whose lengths change from token to token",
            wanted=" or ".join(others),
            fix=f"choose the target {others[0]}, in fp32",
        )
    if precision in ("int8", "mixed"):
        raise CapabilityError(
            "an encoder-decoder is not quantized by this version",
            found=f"precision {precision}",
            wanted="precision fp32",
            fix="set precision to fp32; the float graph needs no `vitdeploy quantize`",
        )


def compile_graphs(
    folder: Path, target: str, batch: int, out: Path, progress: Progress = silent, build: BuildOptions | None = None
) -> EngineSpec:
    """Writes the engine of the graph or graphs in `folder`, and engine.json; errors as `compile_graph`."""
    graphs = graphs_in(folder)
    if list(graphs) == ["model"]:
        return compile_graph(graphs["model"], target, batch, out, progress, build)
    parts = []
    for name, file in graphs.items():
        (out / name).mkdir()
        parts.append((compile_graph(file, target, batch, out / name, progress, build), name))
    engine = joined([within(part, name) for part, name in parts], _metadata(graphs["encoder"]).sequence)
    write_json(out / "engine.json", encode(engine))
    return engine


def _metadata(graph: Path) -> GraphMetadata:
    return get_metadata(load_graph(graph), str(graph))


def compile_graph(
    graph: Path, target: str, batch: int, out: Path, progress: Progress = silent, build: BuildOptions | None = None
) -> EngineSpec:
    """Writes graph.onnx, the engine's files and engine.json. The graph's own metadata says its precision; `build` is
    how TensorRT builds, which is asked only for graphs and profiles that its documents do not rule out."""
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    if metadata.target not in (None, target):
        raise TargetError(
            f"{graph} was placed for another target",
            found=str(metadata.target),
            wanted=target,
            fix=f"vitdeploy quantize FLOAT_GRAPH --data IMAGES --target {target} -o DIR, or --target {metadata.target}",
        )
    spec = graph_spec(model, MODEL_FILE)
    check_batch(graph, spec, batch)
    if target == "tensorrt":
        options = build or BuildOptions()
        profiles = plan_profiles(spec.inputs, options.batches or default_batches(batch), options.sizes)
        refuse(lint(model, (nearest_version(tensorrt_version()),), profiles), str(graph))
    engine = compile_engine(
        graph,
        out,
        target=target,
        precision=metadata.precision or "fp32",
        batch=batch,
        placed=count_int8(model),
        build=build,
        progress=progress,
    )
    engine = replace(engine, weight_bits=metadata.weight_bits)
    write_json(out / "engine.json", encode(engine))
    return engine


def check_batch(graph: Path, spec: GraphSpec, batch: int) -> None:
    """Raise TargetError where a graph cannot be compiled at `batch`."""
    fixed = fixed_batch(spec)
    if fixed is not None and fixed != batch:
        raise TargetError(
            f"{graph} has the fixed batch {fixed}",
            found=f"--batch {batch}",
            wanted=f"batch {fixed}",
            fix="export with a dynamic batch",
        )


def read_engine(folder: Path) -> EngineSpec:
    return decode(EngineSpec, read_json(folder / "engine.json"))


def loads_here(folder: Path, engine: EngineSpec, signed: Collection[str]) -> bool:
    """Whether an engine of a bundle may be loaded on this machine as it is. A plan of TensorRT must be trusted, by this
    user's registry or as one of the `signed` digests, and be of a machine like this one.

    Raises:
        MissingPackageError, EngineError, CapabilityError: no usable TensorRT or GPU, where the engine needs them.
    """
    if TARGETS[engine.target].backend != "tensorrt":
        return True
    return tensorrt_identity.loads_here(file_sha256(folder / engine.files[0]), engine.device, signed)


def may_load(folder: Path) -> bool:
    """Whether this user may load the engine that the stage left in `folder`. A plan of TensorRT must stand in the
    registry of this user, which may be gone while the folder is there."""
    engine = read_engine(folder)
    return TARGETS[engine.target].backend != "tensorrt" or is_trusted(file_sha256(folder / engine.files[0]))
