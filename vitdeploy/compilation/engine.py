"""Compiles placements for their target, and checks that they run as placed; and whether a target works here."""

import collections
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from vitdeploy.backends import TARGETS
from vitdeploy.bundle.layout import tensors_of
from vitdeploy.compilation.backend import COMPILE, BuildOptions, CompileRequest, Finding, TargetState
from vitdeploy.errors import CapabilityError, MissingPackageError
from vitdeploy.progress import Progress, silent
from vitdeploy.runtime import flows, text_decoder
from vitdeploy.runtime.sequence import SEQUENCE_INPUTS, SEQUENCE_OUTPUTS
from vitdeploy.spec import EngineSpec, FloatRest, Precision, SequenceSpec

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
    progress: Progress = silent,
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
            expected=", ".join(row.precisions),
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


# --- Engines of several graphs, each compiled in a folder of its own --------------------------------------------------


def within(engine: EngineSpec, name: str) -> EngineSpec:
    """The engine of one part, whose files lie in the sub-folder `name`."""
    files = tuple(f"{name}/{file}" for file in engine.files)
    return replace(engine, part=name, graph=f"{name}/{engine.graph}", files=files)


def joined(parts: Sequence[EngineSpec], sequence: SequenceSpec | None) -> EngineSpec:
    """One engine of several graphs that run together; `sequence` where a part repeats. Its precision is INT8 or
    INT4 where one part's is, else the first part's."""
    first, graphs = parts[0], tensors_of(parts)
    flow = flows.flow_of_graphs(graphs)
    inputs, outputs = flows.inputs_of(flow, graphs), flows.outputs_of(flow, graphs)
    if sequence is not None and sequence.source_vocabulary is not None:
        inputs, outputs = SEQUENCE_INPUTS, SEQUENCE_OUTPUTS
    elif sequence is not None:
        outputs = text_decoder.text_outputs(sequence)
    kernels: collections.Counter[str] = collections.Counter()
    for part in parts:
        kernels.update(part.kernels)
    return EngineSpec(
        target=first.target,
        precision=next((part.precision for part in parts if part.precision in ("int8", "int4")), first.precision),
        graph=first.graph,
        files=tuple(file for part in parts for file in part.files),
        batch=first.batch,
        dynamic_batch=all(part.dynamic_batch for part in parts),
        provider=first.provider,
        inputs=inputs,
        outputs=outputs,
        kernels=dict(kernels),
        options=first.options,
        device=first.device,
        parts=tuple(parts),
        sequence=sequence,
        weight_bits=next((part.weight_bits for part in parts if part.weight_bits is not None), None),
        flow=flow,
    )


# --- Whether a target works here: its runtime is not only installed, but loads and says what it supports --------------


def probe_target(name: str) -> TargetState:
    """Whether one target works here.

    For a GPU target the detail names the first thing that is missing; `examine` lists everything.

    Raises:
        TargetError: an unknown target.
    """
    row, backend = TARGETS[name], COMPILE[name]
    try:
        return backend.probe(name)
    except MissingPackageError as error:
        return TargetState(False, None, (), "not installed", error.fix)
    except Exception as error:  # a broken native library raises whatever it likes
        detail = f"{row.package} does not load: {str(error)[:200]}"
        return TargetState(False, None, (), detail, f"pip install --force-reinstall {row.package}")


def examine(name: str) -> list[Finding]:
    """Everything that one target needs, in the order in which to fix it.

    Raises:
        TargetError: an unknown target.
    """
    if (findings := COMPILE[name].examine) is not None:
        return findings(name)
    found = probe_target(name)
    return [Finding(TARGETS[name].package, found.works, found.detail, found.fix)]
