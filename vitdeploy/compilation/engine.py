"""Compile placements for their target, check that they run as placed, and check whether a target works here."""

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
    """Write the engine's files to `out`, run it once, and return the engine with the kernels that ran.

    Args:
        graph: the placement (ONNX) for this target.
        out: an existing empty folder for `graph.onnx` and the files that the runtime loads.
        precision: the requested precision.
        batch: the batch to compile at; a dynamic batch in the graph is fixed to it.
        placed: the number of linears and convolutions in INT8, or in INT4, in the placement.
        bare: whether the graph has no linear or convolution, so that `kernels` may be empty.
        build: options of the TensorRT builder; defaults as in `compilation.backend.BuildOptions`.
        progress: called with the steps of a long build: (text, done, total).
        float_rest: the precision of an INT8 engine's float operators, if the CPU supports it.

    Raises:
        TargetError: an unknown target.
        CapabilityError: the target or this CPU does not support the precision, or the engine did not run as placed.
        EngineError: the runtime rejects the graph.
        MissingPackageError, DeviceMemoryError, WorkerError: as in `compilation.tensorrt.compile_graph`.
    """
    row, backend = TARGETS[target], COMPILE[target]
    if precision not in row.precisions:
        raise CapabilityError(
            f"{target} does not support {precision}",
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
    """The file beside a graph that holds its weights if they do not fit into the graph's file."""
    return graph.with_name(f"{graph.name}.data")


# --- Engines with several graphs, each compiled in its own folder -----------------------------------------------------


def within(engine: EngineSpec, name: str) -> EngineSpec:
    """The engine of one part, with its files in the sub-folder `name`."""
    files = tuple(f"{name}/{file}" for file in engine.files)
    return replace(engine, part=name, graph=f"{name}/{engine.graph}", files=files)


def joined(parts: Sequence[EngineSpec], sequence: SequenceSpec | None) -> EngineSpec:
    """One engine from several graphs that run together; `sequence` if a part runs repeatedly. Its precision is INT8 or
    INT4 if that of any part is, otherwise that of the first part."""
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


# --- Checks whether a target works here: its runtime is installed, loads, and reports what it supports ----------------


def probe_target(name: str) -> TargetState:
    """The state of one target on this machine.

    For a GPU target, the detail names the first missing requirement; `examine` lists all of them.

    Raises:
        TargetError: an unknown target.
    """
    row, backend = TARGETS[name], COMPILE[name]
    try:
        return backend.probe(name)
    except MissingPackageError as error:
        return TargetState(False, None, (), "not installed", error.fix)
    except Exception as error:  # a broken native library may raise any exception
        detail = f"{row.package} cannot be loaded: {str(error)[:200]}"
        return TargetState(False, None, (), detail, f"pip install --force-reinstall {row.package}")


def examine(name: str) -> list[Finding]:
    """All requirements of one target, in the order in which to fix them.

    Raises:
        TargetError: an unknown target.
    """
    if (findings := COMPILE[name].examine) is not None:
        return findings(name)
    state = probe_target(name)
    return [Finding(TARGETS[name].package, state.works, state.detail, state.fix)]
