"""ONNX Runtime on NVIDIA GPUs: its CUDA and TensorRT providers, with CUDA graphs and without silent fallback.

Precision is typed in the graph; no option here changes it. The TensorRT provider builds a strongly typed network unless
`trt_fp16_enable` or `trt_int8_enable` is set; the CUDA provider computes in the types of its inputs.

Option names: onnxruntime.ai, "CUDA Execution Provider" and "TensorRT Execution Provider"; `session.*`:
onnxruntime_session_options_config_keys.h.
"""

import contextlib
import ctypes
import hashlib
import importlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from vitdeploy.backends import TARGETS
from vitdeploy.bundle.read import file_sha256
from vitdeploy.errors import CapabilityError, EngineError, MissingPackageError, UntrustedEngineError
from vitdeploy.runtime import backend, ort, runner, trust
from vitdeploy.runtime.nvidia import describe_gpu
from vitdeploy.spec import TensorSpec

CUDA, TENSORRT = "onnxruntime-cuda", "onnxruntime-tensorrt"
PROVIDERS = {CUDA: "CUDAExecutionProvider", TENSORRT: "TensorrtExecutionProvider"}
LIBRARIES = {CUDA: "cuda", TENSORRT: "tensorrt"}
NO_FALLBACK = "session.disable_cpu_ep_fallback"
# The engine option that lists the nodes that compute shapes; ONNX Runtime keeps those on the CPU.
SHAPE_NODES = "SHAPE_NODES"
DEVICE = "cuda"
# ONNX Runtime's operator for an engine inside a graph, which its TensorRT provider deserialises without a check.
ENGINE_OPERATOR = "EPContext"


def require_provider(target: str) -> ModuleType:
    """Return the module `onnxruntime`, checked to have the target's provider (whose libraries may still be missing).

    Raises:
        MissingPackageError: onnxruntime is not installed.
        CapabilityError: onnxruntime lacks this provider, as the CPU package does.
    """
    row, expected = TARGETS[target], PROVIDERS[target]
    try:
        runtime = ort.require()
    except MissingPackageError:
        raise MissingPackageError(row.package, row.extra, f"the target {target}") from None
    available = runtime.get_available_providers()
    if expected not in available:
        raise CapabilityError(
            f"onnxruntime {runtime.__version__} has no {expected}",
            found=", ".join(available),
            expected=expected,
            fix=f"pip uninstall onnxruntime, then pip install 'vitdeploy[{row.extra}]': they share a folder",
        )
    return runtime


def preload(runtime: ModuleType, target: str) -> None:
    """Load the libraries of NVIDIA's Python packages: CUDA and cuDNN (by ONNX Runtime 1.21 and newer), and TensorRT, by
    importing its module."""
    if target == TENSORRT:
        with contextlib.suppress(Exception):  # not installed, or its libraries are elsewhere
            importlib.import_module("tensorrt")
    if hasattr(runtime, "preload_dlls"):
        with contextlib.redirect_stdout(sys.stderr):  # it prints failures, which `missing_library` reports
            runtime.preload_dlls()


def provider_options(target: str, *, capture: bool, cache: Path | None = None) -> dict[str, str]:
    """Return the options of the target's provider.

    Args:
        capture: record the run as a CUDA graph and replay it; shapes and buffers must then not change.
        cache: the folder for the engines that the TensorRT provider builds, and its timings.
    """
    graph = "1" if capture else "0"
    if target == CUDA:
        # TF32 has only 10 bits of mantissa: float32 would not be computed as float32.
        return {"device_id": "0", "enable_cuda_graph": graph, "use_tf32": "0"}
    folder = str(cache)
    return {
        "device_id": "0",
        "trt_cuda_graph_enable": graph,
        "trt_engine_cache_enable": "1",
        "trt_engine_cache_path": folder,
        "trt_timing_cache_enable": "1",
        "trt_timing_cache_path": folder,
    }


def engine_cache(graph: Path, version: str) -> Path:
    """Return the private folder for the engines that the TensorRT provider builds from one graph.

    The provider names an engine after the graph's structure, not its weights, and needs an empty cache after an ONNX
    Runtime update; so each graph with its weights, and each version, has its own folder. The provider itself refuses or
    rebuilds an engine of another TensorRT version or GPU.
    """
    digests = [file_sha256(path) for path in (graph, *sorted(graph.parent.glob(f"{graph.name}*.data")))]
    key = hashlib.sha256("\n".join([version, *digests]).encode()).hexdigest()
    return trust.private_folder(TENSORRT, key[:32])


def open_session(
    graph: Path, target: str, *, batch: int | None, capture: bool, strict: bool, profile: Path | None = None
) -> Any:
    """Return an `onnxruntime.InferenceSession` with the target's provider and, as the only other one, the CPU's.

    Args:
        batch: the size for a dynamic axis named "batch"; None leaves it dynamic.
        strict: refuse a graph of which ONNX Runtime would run a node on the CPU.
        profile: the prefix of a profile file.

    Raises:
        MissingPackageError, CapabilityError: the provider is missing, its libraries do not load, or (if `strict`) it
            does not support every node.
        UntrustedEngineError: the graph contains an engine.
        EngineError: ONNX Runtime refuses the graph.
    """
    runtime, provider = require_provider(target), PROVIDERS[target]
    cache = engine_cache(graph, runtime.__version__) if target == TENSORRT else None
    _refuse_engine_inside(graph)
    preload(runtime, target)
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # errors are raised; ONNX Runtime would print them too
    if batch is not None:
        options.add_free_dimension_override_by_name("batch", batch)
    options.add_session_config_entry(NO_FALLBACK, "1" if strict else "0")
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = os.fspath(profile)
    chosen = provider_options(target, capture=capture, cache=cache)
    try:
        # Without enable_fallback=0 the Python package retries on the CPU.
        session = runtime.InferenceSession(os.fspath(graph), options, providers=[(provider, chosen)], enable_fallback=0)
    except Exception as error:  # the bindings raise their own C++ exception types, without a common base
        raise _missing(runtime, target) or _refused(graph, provider, ort.first_line(error)) from None
    if session.get_providers()[0] != provider:
        raise _missing(runtime, target) or CapabilityError(
            f"{provider} did not start",
            found=", ".join(session.get_providers()),
            fix=f"vitdeploy doctor --target {target}",
        )
    return session


def _refuse_engine_inside(graph: Path) -> None:
    """Raise UntrustedEngineError for a file that contains the operator's name, anywhere."""
    if ENGINE_OPERATOR.encode() in graph.read_bytes():
        raise UntrustedEngineError(
            f"refused to load {graph}: it contains a compiled engine, which is native code",
            found=f"the operator {ENGINE_OPERATOR}",
            expected="a graph of ONNX operators, from which an engine is built here",
            fix="use the graph that the engine was built from",
        )


def missing_library(runtime: ModuleType, target: str) -> str:
    """Return the loader's error for the provider's library, such as "libcudnn.so.9: cannot open shared object file"; ""
    if it loads."""
    folder = Path(str(runtime.__file__)).parent / "capi"
    for name in ("shared", LIBRARIES[target]):
        for library in sorted(folder.glob(f"*onnxruntime_providers_{name}.*")):
            try:
                ctypes.CDLL(os.fspath(library))
            except OSError as error:
                return str(error)
    return ""


def library_fix(target: str) -> str:
    """Return how to install the libraries of a provider."""
    if target == CUDA:
        return "pip install 'onnxruntime-gpu[cuda,cudnn]', or install the CUDA and cuDNN that it was built for"
    return "install the TensorRT that this onnxruntime-gpu was built for (onnxruntime.ai, TensorRT Execution Provider)"


def _missing(runtime: ModuleType, target: str) -> CapabilityError | None:
    found = missing_library(runtime, target)
    if not found:
        return None
    built = getattr(runtime, "cuda_version", "")
    return CapabilityError(
        f"{PROVIDERS[target]} does not load",
        found=found,
        expected=f"onnxruntime {runtime.__version__}" + (f" is built for CUDA {built}" if built else ""),
        fix=library_fix(target),
    )


def _refused(graph: Path, provider: str, found: str) -> CapabilityError | EngineError:
    if "fallback to CPU EP" in found or "have not been assigned" in found or "have not been partitioned" in found:
        return CapabilityError(
            f"{provider} does not support every node of {graph}",
            found=found,
            expected=f"all nodes on {provider}",
            fix="`vitdeploy inspect GRAPH` lists its operators and types",
        )
    return EngineError(f"ONNX Runtime cannot load {graph}", found=found)


class OnnxRuntimeGpuRunner(runner.Runner):
    """Runs an ONNX file on one of ONNX Runtime's GPU providers, at a fixed batch.

    The run is recorded once as a CUDA graph over GPU buffers and replayed: `infer` copies the inputs into them, and the
    outputs into new arrays.
    """

    native = True

    def __init__(self, graph: Path, *, target: str, name: str, batch: int, options: Mapping[str, str]) -> None:
        super().__init__(name)
        self.graph = graph
        self.target = target
        self.batch = batch
        self.options = options
        self._session: Any = None
        self._binding: Any = None
        self._buffers: dict[str, Any] = {}

    def _load(self) -> None:
        strict = SHAPE_NODES not in self.options
        session = open_session(self.graph, self.target, batch=self.batch, capture=True, strict=strict)
        self.inputs, self.outputs = tensors(session, self.batch)
        runtime = require_provider(self.target)
        self._binding = session.io_binding()
        self._buffers = {}
        for tensor in (*self.inputs, *self.outputs):
            self._buffers[tensor.name] = runtime.OrtValue.ortvalue_from_shape_and_type(
                list(tensor.shape), np.dtype(tensor.dtype), DEVICE, 0
            )
        for tensor in self.inputs:
            self._binding.bind_ortvalue_input(tensor.name, self._buffers[tensor.name])
        for tensor in self.outputs:
            self._binding.bind_ortvalue_output(tensor.name, self._buffers[tensor.name])
        self._session = session
        self.provider = PROVIDERS[self.target]

    def _infer(self, feeds: Mapping[str, runner.Array]) -> dict[str, runner.Array]:
        try:
            for name, array in feeds.items():
                self._buffers[name].update_inplace(array)
            self._session.run_with_iobinding(self._binding)
            return {tensor.name: self._buffers[tensor.name].numpy() for tensor in self.outputs}
        except Exception as error:
            raise EngineError(f"{self.name}: ONNX Runtime failed", found=ort.first_line(error)) from None

    def _close(self) -> None:
        self._binding, self._buffers, self._session = None, {}, None


def tensors(session: Any, batch: int) -> tuple[tuple[TensorSpec, ...], tuple[TensorSpec, ...]]:
    """Return the inputs and outputs of a session, at `batch`.

    Raises:
        CapabilityError: a tensor has another dynamic axis, so its buffer has no fixed size.
    """
    inputs = tuple(ort.tensor_spec(each, batch) for each in session.get_inputs())
    outputs = tuple(ort.tensor_spec(each, batch) for each in session.get_outputs())
    for tensor in (*inputs, *outputs):
        if not all(isinstance(size, int) for size in tensor.shape):
            raise CapabilityError(
                "a CUDA graph needs fixed shapes",
                found=str(tensor),
                expected="a dynamic batch axis only",
                fix="choose another target for this model",
            )
    return inputs, outputs


def _make_runner(request: backend.RunnerRequest) -> runner.Runner:
    engine = request.engine
    return OnnxRuntimeGpuRunner(
        request.file, target=engine.target, name=engine.artifact, batch=request.batch, options=engine.options
    )


BACKEND = backend.RuntimeBackend(_make_runner, require=require_provider, describe_device=describe_gpu)
