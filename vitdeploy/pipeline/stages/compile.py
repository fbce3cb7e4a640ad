"""From the placement of a target to its engine."""

from __future__ import annotations

import collections
from dataclasses import replace
from pathlib import Path

from vitdeploy.compile.engine import compile_engine
from vitdeploy.compile.tensorrt import BuildOptions
from vitdeploy.errors import TargetError
from vitdeploy.graph.io import GraphMetadata, fixed_batch, get_metadata, graph_spec, load_graph
from vitdeploy.graph.linears import count_int8
from vitdeploy.graph.tensorrt.lint import lint, refuse
from vitdeploy.graph.tensorrt.support import nearest_version
from vitdeploy.pipeline.progress import Progress, silent
from vitdeploy.pipeline.stages.files import MODEL_FILE, graphs_in, read_json, write_json
from vitdeploy.runtime.engine import SEQUENCE_INPUTS, SEQUENCE_OUTPUTS
from vitdeploy.runtime.tensorrt_api import require as tensorrt_version
from vitdeploy.spec import EngineSpec, decode, encode


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
    engine = _joined([_within(part, name) for part, name in parts], _metadata(graphs["encoder"]))
    write_json(out / "engine.json", encode(engine))
    return engine


def _within(engine: EngineSpec, name: str) -> EngineSpec:
    """The engine of one part, whose files lie in the sub-folder `name`."""
    files = tuple(f"{name}/{file}" for file in engine.files)
    return replace(engine, part=name, graph=f"{name}/{engine.graph}", files=files)


def _joined(parts: list[EngineSpec], metadata: GraphMetadata) -> EngineSpec:
    """One engine of several: it takes source tokens and gives target tokens."""
    first = parts[0]
    kernels: collections.Counter[str] = collections.Counter()
    for part in parts:
        kernels.update(part.kernels)
    return EngineSpec(
        target=first.target,
        precision=first.precision,
        graph=first.graph,
        files=tuple(file for part in parts for file in part.files),
        batch=first.batch,
        dynamic_batch=all(part.dynamic_batch for part in parts),
        provider=first.provider,
        inputs=SEQUENCE_INPUTS,
        outputs=SEQUENCE_OUTPUTS,
        kernels=dict(kernels),
        options=first.options,
        device=first.device,
        parts=tuple(parts),
        sequence=metadata.sequence,
    )


def _metadata(graph: Path) -> GraphMetadata:
    return get_metadata(load_graph(graph), str(graph))


def compile_graph(
    graph: Path, target: str, batch: int, out: Path, progress: Progress = silent, build: BuildOptions | None = None
) -> EngineSpec:
    """Writes graph.onnx, the engine's files and engine.json. The graph's own metadata says its precision; `build` is
    how TensorRT builds, which is asked only for graphs that its documents do not rule out."""
    model = load_graph(graph)
    metadata = get_metadata(model, str(graph))
    if metadata.target not in (None, target):
        raise TargetError(
            f"{graph} was placed for another target",
            found=str(metadata.target),
            wanted=target,
            fix=f"vitdeploy quantize FLOAT_GRAPH --target {target} -o DIR, or --target {metadata.target}",
        )
    fixed = fixed_batch(graph_spec(model, MODEL_FILE))
    if fixed is not None and fixed != batch:
        raise TargetError(
            f"{graph} has the fixed batch {fixed}",
            found=f"--batch {batch}",
            wanted=f"batch {fixed}",
            fix="export with a dynamic batch",
        )
    if target == "tensorrt":
        refuse(lint(model, (nearest_version(tensorrt_version()),)), str(graph))
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


def read_engine(folder: Path) -> EngineSpec:
    return decode(EngineSpec, read_json(folder / "engine.json"))
