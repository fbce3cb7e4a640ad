"""ONNX Runtime on the CPU: the placement is the engine; a profiled run shows which kernels ran."""

import collections
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitdeploy.backends import TARGETS
from vitdeploy.compilation.backend import CompileBackend, CompileRequest, TargetState
from vitdeploy.errors import CapabilityError
from vitdeploy.runtime import ort
from vitdeploy.runtime.ort import (
    FLOAT_CONVOLUTIONS,
    FLOAT_PRODUCTS,
    INT4_KERNELS,
    INT8_KERNELS,
    Event,
    precision_of,
    run_profiled,
)
from vitdeploy.spec import EngineSpec, TensorSpec


def compile_graph(request: CompileRequest) -> EngineSpec:
    """The engine of a placement, which ONNX Runtime loads as it is."""
    graph, batch = request.graph, request.batch
    with ort.OnnxRuntimeRunner(graph, name="probe") as dynamic:
        dynamic_batch = isinstance(dynamic.inputs[0].shape[0], str)
    with ort.OnnxRuntimeRunner(graph, name="probe", batch=batch) as runner:
        inputs, outputs = runner.inputs, runner.outputs
    events = run_profiled(ort.open_session(graph, batch=batch, profile=graph.parent / "profile"), blank(inputs))
    providers = {event["args"].get("provider") for event in events}
    if providers != {ort.CPU_PROVIDER}:
        raise CapabilityError(
            "part of the graph ran on another provider", found=", ".join(map(str, providers)), expected=ort.CPU_PROVIDER
        )
    return request.engine(
        {"onnxruntime": ort.require().__version__},
        files=engine_files(graph),
        dynamic_batch=dynamic_batch,
        provider=ort.CPU_PROVIDER,
        inputs=inputs,
        outputs=outputs,
        kernels=count_kernels(events),
    )


def engine_files(graph: Path) -> tuple[str, ...]:
    """The files that ONNX Runtime loads: the graph, and the weights next to it."""
    return (graph.name, *sorted(path.name for path in graph.parent.glob("*.onnx.data")))


def blank(inputs: tuple[TensorSpec, ...]) -> dict[str, Any]:
    """Zeros for every input; dynamic axes with the same name, such as the length of a sequence, have the same size."""
    sizes: dict[str, int] = {}
    return {
        tensor.name: np.zeros(
            [s if isinstance(s, int) else sizes.setdefault(s, 2 + len(sizes)) for s in tensor.shape]
        ).astype(tensor.dtype)
        for tensor in inputs
    }


def count_kernels(events: Sequence[Event]) -> dict[str, int]:
    """The number of linears and convolutions by the precision that they ran in."""
    counts: collections.Counter[str] = collections.Counter()
    for event in events:
        kind = event["args"]["op_name"]
        linear = kind in FLOAT_PRODUCTS and not _between_activations(event)
        if kind in INT8_KERNELS | INT4_KERNELS | FLOAT_CONVOLUTIONS or linear:
            counts[precision_of(event)] += 1
    return dict(sorted(counts.items()))


def _between_activations(event: Event) -> bool:
    """Whether an event is an attention product: both operands have a batch axis. A constant weight has two axes, or is
    packed."""
    ranks = [len(shape) for entry in event["args"].get("input_type_shape", []) for shape in entry.values()]
    return sum(rank >= 3 for rank in ranks) >= 2


def probe(target: str) -> TargetState:
    """The state of the target, if the provider is available; otherwise RuntimeError."""
    runtime = ort.require()
    if ort.CPU_PROVIDER not in runtime.get_available_providers():
        raise RuntimeError(f"{ort.CPU_PROVIDER} is not among the providers {runtime.get_available_providers()}")
    usable = TARGETS[target].precisions
    detail = f"{runtime.__version__}, {ort.CPU_PROVIDER} available; {', '.join(usable)}"
    return TargetState(True, runtime.__version__, usable, detail, "")


BACKEND = CompileBackend(compile_graph, probe)
