"""ONNX Runtime on NVIDIA GPUs: the placement is the engine; a profiled run shows which provider ran each node."""

from collections.abc import Sequence
from typing import Any

from vitdeploy.backends import TARGETS
from vitdeploy.compilation import backend, onnxruntime
from vitdeploy.compilation.probe_nvidia import findings, probe
from vitdeploy.errors import CapabilityError
from vitdeploy.runtime import ort, ort_gpu
from vitdeploy.runtime.nvidia import describe_gpu
from vitdeploy.runtime.ort import run_profiled
from vitdeploy.spec import EngineSpec, Precision

SHAPE_TYPES = {"int32", "int64", "bool"}
SHOWN_NODES = 5


def compile_graph(request: backend.CompileRequest) -> EngineSpec:
    """The engine of a placement, which ONNX Runtime loads as it is, with its types.

    The TensorRT provider shows its engine as a single node: `kernels` is then empty, and the precision is that of the
    graph's types, which a strongly typed network keeps.

    Raises:
        MissingPackageError, CapabilityError: the provider is missing or does not load; a node that computes more than
            shapes ran on another provider; or no layer ran in `precision`.
        EngineError: ONNX Runtime rejects the graph, or fails on it.
    """
    graph, target, precision, batch = request.graph, request.target, request.precision, request.batch
    gpu = describe_gpu()
    # A session holds its weights on the GPU: free this one before the next is created.
    dynamic = _has_dynamic_batch(ort_gpu.open_session(graph, target, batch=None, capture=False, strict=False))
    session = ort_gpu.open_session(
        graph, target, batch=batch, capture=False, strict=False, profile=graph.parent / "profile"
    )
    inputs, outputs = ort_gpu.tensors(session, batch)
    events = run_profiled(session, onnxruntime.blank(inputs))
    del session
    shapes = shape_nodes(events, ort_gpu.PROVIDERS[target])
    options = {ort_gpu.SHAPE_NODES: ", ".join(shapes)} if shapes else {}
    # Run once as in apps: as a CUDA graph, and with an error if an unlisted node would run on the CPU.
    with ort_gpu.OnnxRuntimeGpuRunner(graph, target=target, name="probe", batch=batch, options=options) as runner:
        runner.infer(onnxruntime.blank(inputs))
    kernels = onnxruntime.count_kernels(events)
    if target == ort_gpu.CUDA and not kernels.get(precision):
        raise CapabilityError(
            f"{target} did not run the graph in {precision}",
            found=str(kernels),
            expected=f"linears and convolutions in {precision}",
            fix="write the types into the graph: "
            f"vitdeploy quantize GRAPH --data IMAGES --precision {precision} --target {target} -o DIR",
        )
    return request.engine(
        {**gpu, TARGETS[target].package: ort.require().__version__},
        files=onnxruntime.engine_files(graph),
        dynamic_batch=dynamic,
        provider=ort_gpu.PROVIDERS[target],
        inputs=inputs,
        outputs=outputs,
        kernels=kernels,
        options=options,
    )


def _has_dynamic_batch(session: Any) -> bool:
    return isinstance(session.get_inputs()[0].shape[0], str)


def shape_nodes(events: Sequence[dict[str, Any]], provider: str) -> list[str]:
    """The nodes that ran on the CPU because they only compute shapes: integers or booleans with at most one axis.

    Raises:
        CapabilityError: any other node did not run on `provider`.
    """
    shapes, others = [], []
    for event in events:
        name, ran = event["name"].removesuffix("_kernel_time"), event["args"].get("provider")
        if ran == provider:
            continue
        if ran == ort.CPU_PROVIDER and _computes_shapes(event):
            shapes.append(name)
        else:
            others.append(f"{event['args']['op_name']} {name} on {ran}")
    if others:
        more = f", and {len(others) - SHOWN_NODES} more" if len(others) > SHOWN_NODES else ""
        raise CapabilityError(
            "part of the graph ran on another provider",
            found=", ".join(others[:SHOWN_NODES]) + more,
            expected=provider,
            fix="use a placement whose operators and types this provider supports; `vitdeploy inspect` shows them",
        )
    return sorted(set(shapes))


def _computes_shapes(event: dict[str, Any]) -> bool:
    outputs = [item for entry in event["args"].get("output_type_shape", []) for item in entry.items()]
    return bool(outputs) and all(kind in SHAPE_TYPES and len(shape) <= 1 for kind, shape in outputs)


def _not_checked(engine: EngineSpec, asked: Precision, placed: int) -> None:
    """Check nothing: `compile_graph` has already checked the kernels."""


BACKEND = backend.CompileBackend(compile_graph, probe, examine=findings, check_ran=_not_checked)
