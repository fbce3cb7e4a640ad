"""OpenVINO on the CPU: the runner, and the compilation of a model."""

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import numpy as np

from vitdeploy.errors import CapabilityError, ClosedError, EngineError, LimitError, TensorError
from vitdeploy.limits import bounded, size_of
from vitdeploy.paths import not_utf8
from vitdeploy.runtime import backend, host, runner
from vitdeploy.spec import FloatRest, TensorSpec

# --- Workaround for a bug of OpenVINO's CPU plugin: exchange operands, which changes no sum and no product ------------
# On CPUs with AMX, the attention kernel that the plugin generates fuses an addition or multiplication after a product,
# if the other operand is a vector along its last axis: a mask of keys, the sizes of merged tokens. The answers are then
# completely wrong without an error, in bf16, and also in f32 after INT8 scores (entry `openvino-vector-behind-scores`
# of the known-bad table). The plugin matches the product as the first operand only (FuseBinaryEltwise in
# src/plugins/intel_cpu/src/transformations/snippets/x64/pass/fuse_brgemm_cpu_postops.cpp). As the second operand it is
# not matched.


_ELEMENTWISE = ("Add", "Multiply")
# Operations allowed between the product and the addition.
_PASSED = (*_ELEMENTWISE, "Convert", "FakeQuantize", "Subtract")


def put_vectors_first(model: Any) -> int:
    """Exchange the operands of each Add and Multiply in an `openvino.Model` whose second operand is a vector along the
    last axis of a product of two activations. Return their number."""
    found = [operation for operation in model.get_ordered_ops() if _adds_vector_to_scores(operation)]
    for operation in found:
        opset = require().opset13
        make = opset.add if operation.get_type_name() == "Add" else opset.multiply
        exchanged = make(operation.input_value(1), operation.input_value(0))
        exchanged.set_friendly_name(operation.get_friendly_name())
        exchanged.output(0).set_names(operation.output(0).get_names())
        operation.output(0).replace(exchanged.output(0))
    return len(found)


def _adds_vector_to_scores(operation: Any) -> bool:
    if operation.get_type_name() not in _ELEMENTWISE:
        return False
    scores, vector = operation.input_value(0), operation.input_value(1)
    return _is_row(vector, operation.get_output_partial_shape(0)) and _is_of_scores(scores)


def _is_row(vector: Any, shape: Any) -> bool:
    """Whether a value has only a last axis, of the size of the last axis of `shape`. A dynamic size matches any."""
    if not (_ranked(vector) and shape.rank.is_static):
        return False
    sizes = list(vector.get_partial_shape())
    if not sizes or any(size.is_static and size.get_length() != 1 for size in sizes[:-1]):
        return False
    last = list(shape)[-1]
    return bool(sizes[-1].is_dynamic or last.is_dynamic or 1 != sizes[-1].get_length() == last.get_length())


def _is_of_scores(value: Any) -> bool:
    """Whether a value is a product of two activations, up to scaling and additions."""
    seen, queue = set[str](), [value]
    while queue:
        node = queue.pop().get_node()
        if node.get_name() in seen:
            continue
        seen.add(node.get_name())
        operands = [node.input_value(i) for i in range(node.get_input_size())]
        if node.get_type_name() == "MatMul":
            if all(len(operand.get_partial_shape()) > 2 for operand in operands if _ranked(operand)):
                return True
        elif node.get_type_name() in _PASSED:
            queue += operands[:2]
    return False


def _ranked(value: Any) -> bool:
    return bool(value.get_partial_shape().rank.is_static)


# --- The runner, and the compilation of a model for the CPU -----------------------------------------------------------


DTYPES = {
    "f32": "float32",
    "f16": "float16",
    "f64": "float64",
    "u8": "uint8",
    "i8": "int8",
    "i32": "int32",
    "i64": "int64",
    "boolean": "bool",
}
HALVES = {"f16": "fp16", "bf16": "bf16"}
PRECISION_HINTS = {"fp32": "f32", "fp16": "f16", "bf16": "bf16", "int8": "f32", "mixed": "f32", "int4": "f32"}
# Precision by the plugin's name of the type that a kernel computes in, or of packed weights.
KERNEL_PRECISIONS = {
    "f32": "fp32",
    "f16": "fp16",
    "bf16": "bf16",
    "u8": "int8",
    "i8": "int8",
    "u4": "int4",
    "i4": "int4",
}
_cores: dict[int, Any] = {}  # by process: a forked child inherits its parent's Core without the threads


def hint_of(precision: str, float_rest: FloatRest = "fp32") -> str:
    """Return the INFERENCE_PRECISION_HINT of an engine; for INT8 that of its float operators, if this CPU supports
    it."""
    return "bf16" if precision == "int8" and float_rest == "bf16" and has_bf16() else PRECISION_HINTS[precision]


def has_bf16() -> bool:
    """Return whether OpenVINO computes in bf16 on this CPU."""
    return "BF16" in the_core().get_property("CPU", "OPTIMIZATION_CAPABILITIES")


def float_precision(options: Mapping[str, str]) -> str:
    """Return the precision that an engine with these options uses for a float32 graph, from its hint."""
    hint = options.get("INFERENCE_PRECISION_HINT", "f32")
    return KERNEL_PRECISIONS.get(hint, hint)


def require() -> ModuleType:
    # Else the import sends an event to Intel's analytics, in a process that it forks.
    sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
    return backend.import_runtime("openvino", "openvino", "openvino", "running a graph on OpenVINO")


def the_core() -> Any:
    """Return the `openvino.Core` of this process, which is never deleted.

    On CPUs with AVX-512 a Core installs an alternate signal stack in the thread that creates it. If the Core is deleted
    in another thread, or before an older Core, OpenVINO 2026.4 leaves a dangling stack: the next signal that Python
    handles, such as Ctrl-C, ends the process with SIGSEGV. A forked child creates its own Core.
    """
    openvino, process = require(), os.getpid()
    if process not in _cores:
        _cores[process] = openvino.Core()
    return _cores[process]


def compile_model(
    model_file: str | Path, *, batch: int | None, options: Mapping[str, str], threads: int = 0, streams: int = 1
) -> tuple[Any, tuple[str, ...]]:
    """Return an `openvino.CompiledModel` for the CPU from an IR (.xml) or ONNX file, and the output names in the file.

    A dynamic leading axis is reshaped to `batch` first: the CPU plugin fuses attention only with static shapes.
    `options` are plugin properties, which override those of `needed_options`. INFERENCE_PRECISION_HINT defaults to
    "f32": the plugin's default is half precision on CPUs that support it, as most Arm CPUs do, where sums overflow.
    `threads` 0 uses `default_threads`, else the plugin's choice. The `streams` share the threads; each runs its own
    request independently.

    Raises:
        EngineError: OpenVINO cannot read or compile the model.
    """
    core = the_core()
    config = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32", **options}
    if streams > 1:
        config |= {"PERFORMANCE_HINT": "THROUGHPUT", "NUM_STREAMS": str(streams)}
    if threads := threads or host.default_threads():
        config["INFERENCE_NUM_THREADS"] = str(threads)
    try:
        with bounded(f"open {Path(model_file).name}", size_of(Path(model_file), Path(model_file).with_suffix(".bin"))):
            model = core.read_model(str(model_file))
            set_batch(model, batch)
            put_vectors_first(model)  # for an IR that vitdeploy did not make, or made before this workaround
            names = tuple(port.get_any_name() for port in model.outputs)
            return core.compile_model(model, "CPU", {**needed_options(model), **config}), names
    except LimitError:
        raise
    except Exception as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        found = not_utf8(str(model_file)) or (lines[-1] if lines else repr(error))[:300]
        raise EngineError(f"OpenVINO cannot load {model_file}", found=found) from None


def set_batch(model: Any, batch: int | None) -> None:
    """Set the dynamic leading axes of an `openvino.Model` to `batch`; None leaves them."""
    if batch is not None:
        shapes = {port: list(port.get_partial_shape()) for port in model.inputs}
        model.reshape(
            {port: [batch, *sizes[1:]] if sizes and sizes[0].is_dynamic else sizes for port, sizes in shapes.items()}
        )


def needed_options(model: Any) -> dict[str, str]:
    """Return the options without which a model gives wrong numbers with OpenVINO 2026.4: they disable the code
    generator in two cases.

    If an axis other than the batch is dynamic, attention that first ran over one key is wrong for 16 keys and more,
    which occurs in decoding with a cache. If the numbers of queries and heads are equal, their Transpose keeps the
    shape, and the generated code drops it in all but the simplest attention.
    """
    lengths = any(size.is_dynamic for port in model.inputs for size in list(port.get_partial_shape())[1:])
    return {"SNIPPETS_MODE": "DISABLE"} if lengths or any(map(_moves_as_many_heads, model.get_ops())) else {}


def _moves_as_many_heads(operation: Any) -> bool:
    """Whether it is a Transpose of heads and tokens with static shape [b, n, n, d]."""
    if operation.get_type_name() != "Transpose" or operation.get_output_partial_shape(0).is_dynamic:
        return False
    sizes, order = list(operation.get_output_shape(0)), operation.input_value(1).get_node()
    if len(sizes) != 4 or sizes[1] != sizes[2] or sizes[1] == 1 or order.get_type_name() != "Constant":
        return False
    return list(order.get_data()) == [0, 2, 1, 3]


class OpenVinoRunner(runner.Runner):
    """Runs an OpenVINO IR or an ONNX file on the CPU plugin."""

    native = True

    def __init__(
        self,
        model_file: Path,
        *,
        name: str,
        batch: int | None = None,
        options: Mapping[str, str] | None = None,
        threads: int = 0,
        streams: int = 1,
    ) -> None:
        super().__init__(name, streams)
        self.model_file = model_file
        self.batch = batch
        self.options = dict(options or {})
        self.threads = threads
        self.compiled: Any = None
        self._requests: SimpleQueue[Any] = SimpleQueue()

    def _compile(self) -> tuple[Any, tuple[str, ...]]:
        """The compiled model, and the output names in the file."""
        return compile_model(
            self.model_file, batch=self.batch, options=self.options, threads=self.threads, streams=self.at_once
        )

    def _load(self) -> None:
        self.compiled, names = self._compile()
        _require_asked_precision(self.name, self.options, self.compiled)
        self._requests = SimpleQueue()
        for _ in range(self.at_once):
            self._requests.put(self.compiled.create_infer_request())
        self.inputs = tuple(_spec(port) for port in self.compiled.inputs)
        # In the file's order. The plugin may add names of fused operations to an output and report one of them.
        found = zip(map(_spec, self.compiled.outputs), names, strict=True)
        self.outputs = tuple(dataclasses.replace(spec, name=name) for spec, name in found)
        self.provider = "+".join(self.compiled.get_property("EXECUTION_DEVICES"))
        if "INFERENCE_NUM_THREADS" in self.compiled.get_property("SUPPORTED_PROPERTIES"):  # AUTO lacks it
            self.engine_threads = max(1, int(self.compiled.get_property("INFERENCE_NUM_THREADS")) // self.at_once)

    def _require_loaded(self, call: str) -> None:
        if self._inherited and self.at_once > 1 and not self._closed:
            raise ClosedError(
                f"{self.name} was loaded with {self.at_once} streams before this process was forked",
                found="a forked child, which does not have the threads of these streams and would deadlock",
                expected="an engine loaded in this process",
                fix=runner.AFTER_FORK,
            )
        super()._require_loaded(call)

    def _infer(self, feeds: Mapping[str, runner.Array]) -> dict[str, runner.Array]:
        request = self._requests.get()
        try:
            request.infer(feeds, share_inputs=True, share_outputs=True)
            # Copy: the request reuses its output buffers.
            return {tensor.name: np.array(request.get_output_tensor(i).data) for i, tensor in enumerate(self.outputs)}
        except Exception as error:
            raise EngineError(f"{self.name}: OpenVINO failed", found=str(error).strip()[:300]) from None
        finally:
            self._requests.put(request)

    def _close(self) -> None:
        self._requests = SimpleQueue()
        self.compiled = None


def _require_asked_precision(name: str, options: Mapping[str, str], compiled: Any) -> None:
    """Raise CapabilityError if the plugin does not compute in the half precision that an engine was made for. On a CPU
    without it the plugin silently uses another one, even with fewer digits (bf16 instead of fp16)."""
    asked = options.get("INFERENCE_PRECISION_HINT")
    if asked not in HALVES:
        return
    ran = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    if ran != asked:
        half = HALVES[asked]
        raise CapabilityError(
            f"{name} needs a CPU with {half}",
            found=f"OpenVINO runs it in {KERNEL_PRECISIONS.get(ran, ran)} on this CPU",
            expected=f"a CPU on which `vitdeploy doctor` lists {half} for openvino-cpu",
            fix="use an engine of the bundle with another precision, or make one here: "
            "vitdeploy compile GRAPH --target openvino-cpu -o DIR",
        )


def _spec(port: Any) -> TensorSpec:
    # OpenVINO keeps no axis names: the leading axis is the batch, any other dynamic axis is "dynamic".
    shape = tuple(
        size.get_length() if not size.is_dynamic else "dynamic" if axis else "batch"
        for axis, size in enumerate(port.get_partial_shape())
    )
    kind = port.get_element_type().get_type_name()
    if kind not in DTYPES:
        raise TensorError(
            f"tensor {port.get_any_name()} has a type that numpy lacks", found=kind, expected=", ".join(DTYPES)
        )
    return TensorSpec(port.get_any_name(), DTYPES[kind], shape)


def _make_runner(request: backend.RunnerRequest) -> runner.Runner:
    engine = request.engine
    # An INT8 engine does not require bf16: a CPU without it computes the float operators in f32.
    hint = {"INFERENCE_PRECISION_HINT": hint_of("int8", engine.float_rest)} if engine.float_rest is not None else {}
    return OpenVinoRunner(
        request.file,
        name=engine.artifact,
        batch=request.batch,
        options={**engine.options, **hint},
        threads=request.threads,
        streams=request.streams,
    )


BACKEND = backend.RuntimeBackend(_make_runner, float_precision=float_precision)
