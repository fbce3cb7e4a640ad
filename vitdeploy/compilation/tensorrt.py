"""TensorRT: the placement is built into `engine.plan` by a separate process.

The builder is native code that runs for minutes and may crash, hang or be killed for memory; none of that ends the
command, and the engine's files are either complete or absent. The result is registered as this user's own
(`runtime/trust.py`), which a file inside a bundle cannot do.
"""

from __future__ import annotations

import collections
import contextlib
import hashlib
import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsInt

import numpy as np

from vitdeploy.bundle.read import file_sha256
from vitdeploy.compilation.backend import BuildOptions, CompileBackend, CompileRequest, default_batches
from vitdeploy.compilation.probe_nvidia import findings, probe
from vitdeploy.errors import CapabilityError, DigestError, EngineError, TargetError
from vitdeploy.extensions import lazy
from vitdeploy.runtime import cuda, trust
from vitdeploy.runtime import tensorrt as tensorrt_api
from vitdeploy.runtime.interpreter import answer_parent, module_argv, run_child
from vitdeploy.runtime.profiles import Batches, Profile, plan_profiles
from vitdeploy.runtime.tensorrt import HARDWARE, VERSIONS, TensorRtRunner, fingerprint, read_profiles
from vitdeploy.spec import EngineSpec, Precision, TensorSpec, decode, encode

if TYPE_CHECKING:
    import tensorrt as trt
else:
    trt = lazy("tensorrt")
PLAN_FILE, LAYERS_FILE = "engine.plan", "layers.json"
# The cache of kernel timings, which makes the next build faster.
TIMINGS = "tensorrt-timings"
BUILDER = module_argv("vitdeploy.compilation.tensorrt")
Tell = Callable[[str, int, int], bool]
SMALLEST_WORKSPACE = 64 << 20
SHOWN_ERRORS = 5
TELL_SECONDS = 0.2


@dataclass(frozen=True)
class _BuildRequest:
    """The input of the build process: paths, the batch at which to check the engine, and the options."""

    graph: str
    out: str
    cache: str
    batch: int
    options: BuildOptions


@dataclass(frozen=True)
class _BuildResult:
    """The result of the build process. `kernels`: the number of linears and convolutions by precision."""

    sha256: str
    device: dict[str, str]
    provider: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    dynamic_batch: bool
    kernels: dict[str, int]


def compile_graph(request: CompileRequest) -> EngineSpec:
    """The engine of a placement: `engine.plan` next to it, and `layers.json` with the layers of the engine.

    Raises:
        MissingPackageError, CapabilityError: TensorRT, cuda-python, a driver or a GPU is missing.
        EngineError: TensorRT rejects the graph (the error names the nodes), or fails to build it.
        DeviceMemoryError: too little memory on the GPU, even with a smaller workspace.
        UnsafeError: other users can write to the folder of timings, which TensorRT parses.
        WorkerError: the build process died.
        TargetError: a dynamic axis without a range, or no profile that includes `batch`.
    """
    graph, batch, options = request.graph, request.batch, request.build or BuildOptions()
    if not options.batches:
        options = replace(options, batches=default_batches(batch))
    _check_batch(batch, options.batches)
    tensorrt_api.require()
    cuda.describe_device()
    job = _BuildRequest(
        str(graph.absolute()),
        str(graph.parent.absolute()),
        str(trust.private_folder(TIMINGS)),
        batch,
        options,
    )
    result = decode(_BuildResult, run_child(BUILDER, encode(job), "the TensorRT build", request.progress))
    plan = graph.parent / PLAN_FILE
    if file_sha256(plan) != result.sha256:
        raise DigestError(f"{plan} differs from the plan that was built", fix="compile it again")
    trust.register(result.sha256, {"built_as": f"{graph.parent.name}/{PLAN_FILE}", **result.device})
    return request.engine(
        {**result.device, HARDWARE: options.hardware, VERSIONS: options.versions},
        files=(PLAN_FILE, LAYERS_FILE),
        dynamic_batch=result.dynamic_batch,
        provider=result.provider,
        inputs=result.inputs,
        outputs=result.outputs,
        kernels=result.kernels,
    )


def _check_batch(batch: int, profiles: Sequence[Batches]) -> None:
    """Raise TargetError, before the build, for a batch that the finished engine would not support."""
    if not any(smallest <= batch <= largest for smallest, _, largest in profiles):
        raise TargetError(
            f"no profile includes the batch {batch}, at which the engine is compiled",
            found="profiles for " + ", ".join(f"{smallest} to {largest}" for smallest, _, largest in profiles),
            expected=f"a profile that includes {batch}",
            fix="set --batch to a batch within a profile, or change the profiles",
        )


def profiles(inputs: Sequence[TensorSpec], build: BuildOptions | None, batch: int) -> Sequence[Profile]:
    """The optimisation profiles of an engine; errors as in `plan_profiles`."""
    options = build or BuildOptions()
    return plan_profiles(inputs, options.batches or default_batches(batch), options.sizes)


def check_typed(engine: EngineSpec, precision: Precision, placed: int) -> None:
    """Check the precisions of an engine. TensorRT computes in the graph's types, some of which may be wider than
    requested.

    The engine must have as many INT8 and FP8 layers as the placement. A layer that the engine does not name is recorded
    as "unknown" and does not cause an error.
    """
    quantized = precision in ("int8", "fp8")
    ran = engine.kernels.get(precision, 0)
    unknown = engine.kernels.get("unknown", 0)
    if ran + unknown < (max(1, placed) if quantized else 1):
        raise CapabilityError(
            f"tensorrt did not run the graph in {precision}",
            found=f"{ran} layers in {precision}, {unknown} of unknown precision: {engine.kernels}",
            expected=f"at least {max(1, placed) if quantized else 1} in {precision}",
            fix="compare layers.json beside the plan, which lists every layer, with the rules that "
            "`vitdeploy inspect GRAPH --target tensorrt` lists",
        )


BACKEND = CompileBackend(
    compile_graph, probe, examine=findings, check_ran=check_typed, files=(PLAN_FILE, LAYERS_FILE), profiles=profiles
)


# --- The build process: from an ONNX placement to a plan on disk, which it runs once ----------------------------------


def build(data: Any, tell: Tell) -> Any:
    """Build, write and run the engine of an encoded `_BuildRequest`; returns an encoded `_BuildResult`."""
    request = decode(_BuildRequest, data)
    here = fingerprint()
    plan, linears = _build_with_less_and_less(request, here, tell)
    out, digest = Path(request.out), hashlib.sha256(plan).hexdigest()
    trust.write_atomic(out / PLAN_FILE, plan)
    recorded = {**here, HARDWARE: request.options.hardware, VERSIONS: request.options.versions}
    facts = _inspect(plan, linears, request.options)
    trust.write_atomic(out / LAYERS_FILE, (json.dumps(facts, indent=1, sort_keys=True) + "\n").encode())
    runner = TensorRtRunner(
        out / PLAN_FILE,
        name="the new engine",
        batch=request.batch,
        device=recorded,
        image_size=request.options.sizes[0] if request.options.sizes else None,
        trusted=lambda found: found == digest,
    )
    with runner:
        shapes = {tensor.name: [size for size in tensor.shape if isinstance(size, int)] for tensor in runner.inputs}
        runner.infer({tensor.name: np.zeros(shapes[tensor.name], tensor.dtype) for tensor in runner.inputs})
        result = _BuildResult(
            sha256=digest,
            device=here,
            provider=runner.provider,
            inputs=runner.inputs,
            outputs=runner.outputs,
            dynamic_batch=facts["dynamic_batch"],
            kernels=facts["kernels"],
        )
    return encode(result)


def _build_with_less_and_less(request: _BuildRequest, here: dict[str, str], tell: Tell) -> tuple[bytes, list[str]]:
    """The plan, and the metadata of its linears. If the device runs out of memory, retry with half of the workspace,
    repeatedly; raises the last failure."""
    workspace = request.options.workspace or cuda.free_memory()
    while True:
        builder = _Builder(request, here, tell)
        plan = builder.build(workspace)
        if plan is not None:
            return plan, builder.linears
        if not builder.messages.no_memory() or workspace // 2 < SMALLEST_WORKSPACE:
            raise builder.messages.failure(f"TensorRT cannot build {request.graph}")
        del builder  # frees its memory before the next one
        workspace //= 2
        tell(f"too little memory: retrying with a workspace of {workspace >> 20} MiB", 0, 1)


class _Builder:
    """One attempt: a network parsed from the graph, and a configuration."""

    def __init__(self, request: _BuildRequest, here: dict[str, str], tell: Tell) -> None:
        self._request = request
        self._tell = tell
        self._logger, self.messages = tensorrt_api.make_logger()
        try:
            self._builder = trt.Builder(self._logger)
        except TypeError:  # the bindings' error for a builder that could not be created
            raise self.messages.failure("TensorRT cannot create a builder") from None
        self._network = tensorrt_api.create_network(self._builder)
        self._parser = trt.OnnxParser(self._network, self._logger)  # owns the weights until the plan is built
        if not self._parser.parse_from_file(request.graph):
            raise self._refusal()
        self.linears = find_linears(self._network)
        version = here["tensorrt"]
        self._timings = Path(request.cache) / f"tensorrt-{version}-{here['compute_capability']}.timings"

    def _refusal(self) -> EngineError:
        errors = [self._parser.get_error(index) for index in range(self._parser.num_errors)]
        lines = [f"{error.node_name() or 'graph'} ({error.node_operator()}): {error.desc()}" for error in errors]
        more = [f"and {len(lines) - SHOWN_ERRORS} more"] if len(lines) > SHOWN_ERRORS else []
        return EngineError(
            f"TensorRT cannot read {self._request.graph}",
            found="\n".join([*lines[:SHOWN_ERRORS], *more]) or "\n".join(self.messages.errors[-3:]),
            fix="`vitdeploy inspect GRAPH --target tensorrt` shows the rule and a fix",
        )

    def build(self, workspace: int) -> bytes | None:
        """The plan; None if TensorRT fails, with the reason in `messages`. Saves the timings of kernels."""
        config = self._configure(workspace)
        plan = self._builder.build_serialized_network(self._network, config)
        if plan is None:
            return None
        timings = config.get_timing_cache()
        if timings is not None:
            with contextlib.suppress(OSError):  # the timings are optional
                trust.write_atomic(self._timings, tensorrt_api.bytes_of(timings.serialize()))
        return tensorrt_api.bytes_of(plan)

    def _configure(self, workspace: int) -> trt.IBuilderConfig:
        options = self._request.options
        config = self._builder.create_builder_config()
        config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, workspace)
        config.builder_optimization_level = options.level
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # the inspector then names kernels
        config.hardware_compatibility_level = tensorrt_api.hardware_level(options.hardware)
        if options.versions == "newer":
            config.set_flag(trt.BuilderFlag.VERSION_COMPATIBLE)
        for shapes in plan_profiles(self._inputs(), options.batches, options.sizes):
            profile = self._builder.create_optimization_profile()
            for name, sizes in shapes.items():
                smallest, best, largest = (
                    trt.Dims(list(shape)) for shape in (sizes.smallest, sizes.best, sizes.largest)
                )
                profile.set_shape(name, smallest, best, largest)
            if config.add_optimization_profile(profile) < 0:
                raise self.messages.failure(f"TensorRT rejects a profile of {self._request.graph}")
        self._read_timings(config)
        self._monitor = _make_monitor(self._tell)  # the configuration does not keep it alive
        config.progress_monitor = self._monitor
        return config

    def _inputs(self) -> list[TensorSpec]:
        tensors = [self._network.get_input(index) for index in range(self._network.num_inputs)]
        return [tensorrt_api.tensor_spec(tensor.name, tensor.dtype, tensor.shape) for tensor in tensors]

    def _read_timings(self, config: trt.IBuilderConfig) -> None:
        """Start from the timings of earlier builds; TensorRT measures kernels with rejected timings again."""
        known = self._timings.read_bytes() if self._timings.is_file() else b""
        cache = config.create_timing_cache(known)
        if cache is None or not config.set_timing_cache(cache, False):
            config.set_timing_cache(config.create_timing_cache(b""), False)


def _make_monitor(tell: Tell) -> trt.IProgressMonitor:
    """A progress monitor that reports the steps of the outermost phases, and cancels the build if the parent has
    ended."""

    class Monitor(trt.IProgressMonitor):
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._totals: dict[str, int] = {}
            self._told = 0.0

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: SupportsInt) -> None:
            self._totals[phase_name] = int(num_steps)
            if not parent_phase:
                tell(phase_name, 0, int(num_steps))

        def step_complete(self, phase_name: str, step: SupportsInt) -> bool:
            if time.monotonic() - self._told < TELL_SECONDS:
                return True
            self._told = time.monotonic()
            done = int(step) + 1
            total = self._totals.get(phase_name, done)
            return tell(phase_name, min(done, total), total)

        def phase_finish(self, phase_name: str) -> None:
            self._totals.pop(phase_name, None)

    return Monitor()


def _inspect(plan: bytes, linears: list[str], options: BuildOptions) -> dict[str, Any]:
    """The inspector's report on the engine's layers, its profiles, and whether its batch is dynamic."""
    logger, messages = tensorrt_api.make_logger()
    runtime = trt.Runtime(logger)
    runtime.engine_host_code_allowed = options.versions == "newer"
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise messages.failure("TensorRT cannot load the plan that it has just built")
    inspector = engine.create_engine_inspector()
    text = inspector.get_engine_information(trt.LayerInformationFormat.JSON)
    profiles = read_profiles(engine)
    return {
        **count_layers(text, linears),
        "profiles": [{name: str(sizes) for name, sizes in profile.items()} for profile in profiles],
        "dynamic_batch": any(sizes.smallest[:1] != sizes.largest[:1] for p in profiles for sizes in p.values()),
    }


# --- The precisions of an engine's linears and convolutions, and fused attention --------------------------------------
# TensorRT fuses and splits the graph's layers. A layer of the engine names its original nodes in its "Metadata" ("[ONNX
# Layer: name]"), where each linear is looked up; a linear that no layer names counts as "unknown", never as its
# requested precision.


# Words in "Format/Datatype" and in kernel names, in the order of precedence: one INT8 operand decides for INT8.
_WORDS = (
    ("fp8", r"fp8|e4m3"),
    ("int8", r"int8|i8i8|i8f16|i8816|i16832|s8s8|imma"),
    ("bf16", r"bf16|bfloat16"),
    ("fp16", r"fp16|half|f16f16|h884|h1688|h16816"),
    ("fp32", r"fp32|float|f32f32|tf32|sgemm"),
)
# Layers that only move or convert data; they name a linear, but do not compute it.
_MOVES = {"reformat", "noop", "constant", "shuffle", "reshape", "shape_call", "signal", "wait", "cast", "quantize"}
# According to TensorRT's maintainers, a fused attention kernel has "_mha" in its name (NVIDIA/TensorRT issue 3243).
_ATTENTION = re.compile(r"mha|flash|attention", re.IGNORECASE)
_ATTENTION_NAME = re.compile(r"_mha(_|$)", re.IGNORECASE)


def find_linears(network: trt.INetworkDefinition) -> list[str]:
    """The metadata (or name) of each convolution, and of each product with a constant weight, in a parsed network."""
    layers = [network.get_layer(index) for index in range(network.num_layers)]
    makers = {layer.get_output(i).name: layer for layer in layers for i in range(layer.num_outputs)}
    passing = (trt.LayerType.DEQUANTIZE, trt.LayerType.QUANTIZE, trt.LayerType.SHUFFLE, trt.LayerType.CAST)

    def is_constant(layer: trt.ILayer | None) -> bool:
        while layer is not None and layer.type in passing:
            layer = _maker(layer, 0, makers)
        return layer is not None and layer.type == trt.LayerType.CONSTANT

    def is_linear(layer: trt.ILayer) -> bool:
        if layer.type == trt.LayerType.CONVOLUTION:
            return True
        operands = (_maker(layer, index, makers) for index in range(layer.num_inputs))
        return layer.type == trt.LayerType.MATRIX_MULTIPLY and any(is_constant(maker) for maker in operands)

    return [layer.metadata or layer.name for layer in layers if is_linear(layer)]


def _maker(layer: trt.ILayer, index: int, makers: dict[str, trt.ILayer]) -> trt.ILayer | None:
    tensor = layer.get_input(index)
    return None if tensor is None else makers.get(tensor.name)


def count_layers(text: str, linears: list[str]) -> dict[str, Any]:
    """The facts in the inspector's JSON: `kernels` (linears and convolutions by precision, or "unknown"), `attention`
    (the names of fused attention kernels) and `layers` (name, type, kernel and precision of each layer).

    With any other text, everything is unknown.
    """
    layers = _read(text)
    counts: collections.Counter[str] = collections.Counter()
    for linear in linears:
        found = {
            layer["precision"]
            for layer in layers
            if _is_of(linear, layer["made_from"]) and layer["type"].lower() not in _MOVES
        }
        counts[next((name for name, _ in _WORDS if name in found), "unknown")] += 1
    return {
        "kernels": dict(sorted(counts.items())),
        "attention": [layer["kernel"] or layer["name"] for layer in layers if _is_attention(layer)],
        "layers": [{key: layer[key] for key in ("name", "type", "kernel", "precision")} for layer in layers],
    }


def _is_of(linear: str, made_from: str) -> bool:
    """Whether the whole name occurs: "MatMul_1" does not match "MatMul_10"."""
    return re.search(rf"(?<![\w./]){re.escape(linear)}(?![\w./])", made_from) is not None


def _read(text: str) -> list[dict[str, str]]:
    try:
        return [_layer(entry) for entry in json.loads(text)["Layers"] if isinstance(entry, dict)]
    except (ValueError, KeyError, TypeError):
        return []


def _layer(entry: dict[str, Any]) -> dict[str, str]:
    name, kernel = str(entry.get("Name", "")), str(entry.get("TacticName", ""))
    return {
        "name": name,
        "type": str(entry.get("LayerType", "")),
        "kernel": kernel,
        "precision": _precision(entry.get("Inputs") or [], kernel),
        "made_from": f"{entry.get('Metadata', '')}\n{name}",
    }


def _precision(inputs: list[Any], kernel: str) -> str:
    """The precision by the types of the operands, or else by the kernel's name."""
    types = " ".join(
        str(tensor.get("Format/Datatype") or tensor.get("Datatype") or "")
        for tensor in inputs
        if isinstance(tensor, dict)
    )
    for words in (types, kernel):
        for precision, pattern in _WORDS:
            if re.search(pattern, words, re.IGNORECASE):
                return precision
    return "unknown"


def _is_attention(layer: dict[str, str]) -> bool:
    # A node's own path may contain any of these words; names that TensorRT gives to fused kernels have no path.
    named = "/" not in layer["name"] and _ATTENTION_NAME.search(layer["name"])
    return bool(_ATTENTION.search(layer["kernel"]) or _ATTENTION.search(layer["type"]) or named)


if __name__ == "__main__":
    sys.exit(answer_parent(build))
