"""ONNX Runtime on the CPU: the runner, sessions and profiles."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from vitdeploy.errors import CapabilityError, EngineError, LimitError
from vitdeploy.limits import bounded, size_of
from vitdeploy.paths import not_utf8
from vitdeploy.publish import native_writes
from vitdeploy.runtime import backend, runner
from vitdeploy.runtime.host import default_threads, usable_cores
from vitdeploy.spec import TensorSpec

# --- The runner, and the creation of sessions -------------------------------------------------------------------------


CPU_PROVIDER = "CPUExecutionProvider"
TASKS = Path("/proc/self/task")
THREADS = "ORT_INTRA_OP_NUM_THREADS"
DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(uint8)": "uint8",
    "tensor(int8)": "int8",
    "tensor(int32)": "int32",
    "tensor(int64)": "int64",
    "tensor(bool)": "bool",
}


def require() -> ModuleType:
    return backend.import_runtime("onnxruntime", "onnxruntime", "onnxruntime", "running a graph on ONNX Runtime")


def open_session(
    graph: str | Path | bytes,
    *,
    batch: int | None = None,
    threads: int = 0,
    profile: Path | None = None,
    weights: Mapping[str, runner.Array] | None = None,
    as_written: bool = False,
    plain: bool = False,
    spinning: bool = True,
) -> Any:
    """Return an `onnxruntime.InferenceSession` on the CPU.

    A dynamic axis named "batch" is pinned to `batch` before the graph is optimised, so that shapes are static.
    `threads` is the number of intra-operator threads (0: `default_threads`, else the runtime's choice). `profile` is
    the prefix of a profile file. `weights` are the external tensors of a graph passed as bytes, by
    name; the session uses the arrays in place, so the caller keeps them. `as_written`
    is for graphs that are evaluated, not served: products between Q/DQ are computed in float, because INT8 kernels of
    some CPUs are not exact, and nodes in graph order, which frees tensors early. `plain` disables all optimisation, so
    every node is computed separately. `spinning` as for `runtime.engine.make_runner`.

    Raises:
        EngineError: ONNX Runtime cannot load the graph.
        CapabilityError: the session would not run on the CPU provider.
    """
    runtime = require()
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # errors are raised; do not print them as well
    options.intra_op_num_threads = threads or default_threads(THREADS)
    if batch is not None:
        options.add_free_dimension_override_by_name("batch", batch)
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = os.fspath(profile)
    weights = weights or {}
    if weights:
        values = [runtime.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
        options.add_external_initializers(list(weights), values)
    if as_written:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.execution_order = runtime.ExecutionOrder.PRIORITY_BASED
    if not spinning:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if plain:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    model, shown = (graph, "the graph") if isinstance(graph, bytes) else (os.fspath(graph), os.fspath(graph))
    size = len(graph) if isinstance(graph, bytes) else size_of(Path(graph), Path(f"{shown}.data"))
    size += sum(array.nbytes for array in weights.values())
    try:
        with bounded(f"open {Path(shown).name}", size):  # loading folds constants
            session = runtime.InferenceSession(model, options, providers=[CPU_PROVIDER])
    except LimitError:
        raise
    except Exception as error:  # the bindings raise their own C++ exception types, without a common base
        raise EngineError(f"ONNX Runtime cannot load {shown}", found=not_utf8(shown) or first_line(error)) from None
    if session.get_providers()[0] != CPU_PROVIDER:
        raise CapabilityError(
            "ONNX Runtime does not use the CPU provider", found=session.get_providers()[0], expected=CPU_PROVIDER
        )
    return session


class OnnxRuntimeRunner(runner.Runner):
    """Runs an ONNX file on ONNX Runtime's CPU provider, at a fixed batch, or a dynamic one if `batch` is None.

    `external`: the name of the untrusted file that the graph comes from; its runs have time and memory limits. "" for
    none.
    """

    native = True

    def __init__(
        self,
        graph: Path | bytes,
        *,
        name: str,
        batch: int | None = None,
        threads: int = 0,
        weights: Mapping[str, runner.Array] | None = None,
        as_written: bool = False,
        plain: bool = False,
        streams: int = 1,
        spinning: bool = True,
        external: str = "",
    ) -> None:
        super().__init__(name, streams)
        self.external = external
        self.graph = graph
        self.weights = weights
        self.as_written = as_written
        self.plain = plain
        self.spinning = spinning
        self.batch = batch
        self.threads = threads
        self._session: Any = None
        self._names: list[str] = []

    def _load(self) -> None:
        whole = self.threads or default_threads(THREADS) or usable_cores()
        # Concurrent runs would wait for one thread pool: each gets its share, which includes the caller's thread.
        threads = self.threads if self.at_once == 1 else max(1, whole // self.at_once)
        require()
        before = _tasks()
        self._session = open_session(
            self.graph,
            batch=self.batch,
            threads=threads,
            weights=self.weights,
            as_written=self.as_written,
            plain=self.plain,
            spinning=self.spinning,
        )
        self.inputs = tuple(tensor_spec(tensor, self.batch) for tensor in self._session.get_inputs())
        self.outputs = tuple(tensor_spec(tensor, self.batch) for tensor in self._session.get_outputs())
        # ONNX Runtime does not report its own choice: count its pool, plus the caller's thread, which computes too.
        set_to = self._session.get_session_options().intra_op_num_threads
        self.engine_threads = set_to or (_tasks() - before + 1 if before else None)
        self._names = [tensor.name for tensor in self.outputs]
        self.provider = CPU_PROVIDER

    def _infer(self, feeds: Mapping[str, runner.Array]) -> dict[str, runner.Array]:
        try:
            if self.external:
                with bounded(f"run {self.external}"):
                    outputs = self._session.run(self._names, feeds)
            else:
                outputs = self._session.run(self._names, feeds)
            return dict(zip(self._names, outputs, strict=True))
        except LimitError:
            raise
        except Exception as error:
            raise EngineError(f"{self.name}: ONNX Runtime failed", found=first_line(error)) from None

    def _close(self) -> None:
        self._session = None


def _tasks() -> int:
    """The number of threads of this process; 0 if unknown."""
    return len(list(TASKS.iterdir())) if TASKS.is_dir() else 0


def tensor_spec(tensor: Any, batch: int | None) -> TensorSpec:
    """Return the spec of an input or output of a session (`onnxruntime.NodeArg`), at `batch` unless it is None."""
    shape = tuple(size if isinstance(size, int) else str(size) for size in tensor.shape)
    spec = TensorSpec(tensor.name, DTYPES.get(tensor.type, tensor.type), shape)
    return spec if batch is None else spec.with_batch(batch)


def first_line(error: Exception) -> str:
    """Return the first line of an ONNX Runtime error, at most 300 characters."""
    text = str(error).strip()
    return text.splitlines()[0][:300] if text else type(error).__name__


def _make_runner(request: backend.RunnerRequest) -> runner.Runner:
    return OnnxRuntimeRunner(
        request.file,
        name=request.engine.artifact,
        batch=request.batch,
        threads=request.threads,
        streams=request.streams,
        spinning=request.spinning,
    )


BACKEND = backend.RuntimeBackend(_make_runner)


# --- Profile of an ONNX Runtime session: kernels, precisions and times ------------------------------------------------


INT8_KERNELS = {
    "MatMulIntegerToFloat",
    "QLinearMatMul",
    "QLinearConv",
    "QGemm",
    "DynamicQuantizeMatMul",
    "MatMulInteger",
    "ConvInteger",
}
FLOAT_PRODUCTS = {"MatMul", "FusedMatMul", "Gemm", "FusedGemm"}
# vitdeploy's have 4 bits, and graphs with other quantized operators are refused.
INT4_KERNELS = {"MatMulNBits"}
FLOAT_CONVOLUTIONS = {"Conv", "FusedConv", "NhwcFusedConv"}
# Precision by type name in a profile.
TYPES = {"float": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "int8", "int8": "int8"}
SUFFIX = "_kernel_time"

Event = dict[str, Any]


def run_profiled(session: Any, feeds: Mapping[str, Any]) -> list[Event]:
    """Return the kernel events of one run of a session opened with a profile; delete the profile file.

    Raises:
        EngineError: the run fails.
    """
    try:
        session.run(None, dict(feeds))
    except Exception as error:
        end_profile(session)
        raise EngineError("ONNX Runtime failed to run the graph", found=first_line(error)) from None
    return end_profile(session)


def end_profile(session: Any) -> list[Event]:
    """Return the kernel events of all runs of such a session, in order of time; delete the profile file.

    Raises:
        StorageError: the disk is too full for the profile.
    """
    path = Path(session.end_profiling())
    text = path.read_text(encoding="utf-8", errors="replace")
    path.unlink()
    with native_writes(path.parent, len(text)):  # a full disk truncates it
        events = json.loads(text)
    return [e for e in events if e.get("cat") == "Node" and e["name"].endswith(SUFFIX)]


def precision_of(event: Event) -> str:
    """Return the precision that a kernel ran in: INT8 or INT4 for kernels that multiply such weights, else that of its
    first input."""
    if event["args"]["op_name"] in INT8_KERNELS:
        return "int8"
    if event["args"]["op_name"] in INT4_KERNELS:
        return "int4"
    first = next((name for entry in event["args"].get("input_type_shape", []) for name in entry), "float")
    return TYPES.get(first, first)
