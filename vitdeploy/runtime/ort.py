"""ONNX Runtime on the CPU."""

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

# --- ONNX Runtime: the runner, and the one way in which a session is made ---------------------------------------------


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
    weights: Path | None = None,
    as_written: bool = False,
    plain: bool = False,
    spinning: bool = True,
) -> Any:
    """An `onnxruntime.InferenceSession` on the CPU.

    A dynamic axis named "batch" is pinned to `batch` before the graph is optimised, so that shapes are static.
    `threads` is the number of intra-operator threads (0: of `default_threads`, else the runtime's own choice).
    `profile` is the prefix of a profile file. `weights` is the folder of the external data of a graph that comes
    as bytes. `as_written` is for graphs that are evaluated, not served: products between Q/DQ are computed in float,
    which INT8 kernels of some CPUs are not exact to, and nodes in their order, which frees tensors as soon as it can
    be. `plain`: no optimisation at all, so that every node is computed by itself. `spinning` as for
    `runtime.engine.make_runner`.

    Raises:
        EngineError: ONNX Runtime refuses the graph.
        CapabilityError: the session would not run on the CPU provider.
    """
    runtime = require()
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # errors are raised; ONNX Runtime would print them too
    options.intra_op_num_threads = threads or default_threads(THREADS)
    if batch is not None:
        options.add_free_dimension_override_by_name("batch", batch)
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = os.fspath(profile)
    if weights is not None:
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", os.fspath(weights))
    if as_written:
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        options.execution_order = runtime.ExecutionOrder.PRIORITY_BASED
    if not spinning:
        options.add_session_config_entry("session.force_spinning_stop", "1")
    if plain:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    model, shown = (graph, "the graph") if isinstance(graph, bytes) else (os.fspath(graph), os.fspath(graph))
    size = len(graph) if isinstance(graph, bytes) else size_of(Path(graph), Path(f"{shown}.data"))
    try:
        with bounded(f"open {Path(shown).name}", size):  # it computes what is constant
            session = runtime.InferenceSession(model, options, providers=[CPU_PROVIDER])
    except LimitError:
        raise
    except Exception as error:  # the bindings raise their own C++ exception types, without a common base
        raise EngineError(f"ONNX Runtime refuses {shown}", found=not_utf8(shown) or first_line(error)) from None
    if session.get_providers()[0] != CPU_PROVIDER:
        raise CapabilityError(
            "ONNX Runtime chose another provider", found=session.get_providers()[0], expected=CPU_PROVIDER
        )
    return session


class OnnxRuntimeRunner(runner.Runner):
    """Runs an ONNX file on ONNX Runtime's CPU provider, pinned to one batch size or, without one, dynamic.

    `external`: the name of a file of unknown origin that the graph is of; what each run of it may take is bounded.
    """

    native = True

    def __init__(
        self,
        graph: Path | bytes,
        *,
        name: str,
        batch: int | None = None,
        threads: int = 0,
        weights: Path | None = None,
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
        # Runs at once would wait for the same pool of threads: each has its share, and one thread is the caller's own.
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
        # Of its own choice ONNX Runtime tells nothing: a pool has a thread less than compute, as one is the caller's.
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
    """The threads of this process; 0 where the system does not tell."""
    return len(list(TASKS.iterdir())) if TASKS.is_dir() else 0


def tensor_spec(tensor: Any, batch: int | None) -> TensorSpec:
    """An input or output of a session (`onnxruntime.NodeArg`), its batch set where one is given."""
    shape = tuple(size if isinstance(size, int) else str(size) for size in tensor.shape)
    spec = TensorSpec(tensor.name, DTYPES.get(tensor.type, tensor.type), shape)
    return spec if batch is None else spec.with_batch(batch)


def first_line(error: Exception) -> str:
    """What an error of ONNX Runtime says, at most 300 characters."""
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


# --- Reads ONNX Runtime's profile of a session: which kernels ran, in which precision, for how long -------------------


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
# Ours are of 4 bits, and no graph with operators that others quantized is taken.
INT4_KERNELS = {"MatMulNBits"}
FLOAT_CONVOLUTIONS = {"Conv", "FusedConv", "NhwcFusedConv"}
# Types of a profile by the precision that they are.
TYPES = {"float": "fp32", "float16": "fp16", "bfloat16": "bf16", "uint8": "int8", "int8": "int8"}
SUFFIX = "_kernel_time"

Event = dict[str, Any]


def run_profiled(session: Any, feeds: Mapping[str, Any]) -> list[Event]:
    """The kernel events of one run of a session that was opened with a profile; its file goes.

    Raises:
        EngineError: the run fails.
    """
    try:
        session.run(None, dict(feeds))
    except Exception as error:
        end_profile(session)
        raise EngineError("ONNX Runtime fails on the graph", found=first_line(error)) from None
    return end_profile(session)


def end_profile(session: Any) -> list[Event]:
    """The kernel events of all runs of such a session, in the order of time; its file goes.

    Raises:
        StorageError: the disk had no room for it.
    """
    path = Path(session.end_profiling())
    text = path.read_text(encoding="utf-8", errors="replace")
    path.unlink()
    with native_writes(path.parent, len(text)):  # a full disk cuts it off
        events = json.loads(text)
    return [e for e in events if e.get("cat") == "Node" and e["name"].endswith(SUFFIX)]


def precision_of(event: Event) -> str:
    """The precision that a kernel ran in: INT8 or INT4 of those that multiply such weights, else that of its first
    input."""
    if event["args"]["op_name"] in INT8_KERNELS:
        return "int8"
    if event["args"]["op_name"] in INT4_KERNELS:
        return "int4"
    first = next((name for entry in event["args"].get("input_type_shape", []) for name in entry), "float")
    return TYPES.get(first, first)
