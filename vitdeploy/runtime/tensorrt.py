"""TensorRT: the runner, and the use of its API."""

from __future__ import annotations

import contextlib
import platform
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from vitdeploy.bundle.sign import signed_digests
from vitdeploy.errors import CapabilityError, DeviceMemoryError, EngineError, TensorError, VitdeployError
from vitdeploy.extensions import lazy
from vitdeploy.runtime import backend, cuda, profiles, runner
from vitdeploy.runtime.cuda import DeviceArray, borrow
from vitdeploy.runtime.trust import is_trusted, read_trusted, rebuild
from vitdeploy.spec import TensorSpec

if TYPE_CHECKING:
    import tensorrt as trt
else:
    trt = lazy("tensorrt")

# --- TensorRT 10.3 to 11 in one code path: import, messages, and differences between versions -------------------------
# TensorRT is imported at first use. All differences between the versions are handled here: version 10 types a network
# strongly only on request, and builds for all GPUs of one compute capability only from 10.9 on.


OLDEST = (10, 3)
# numpy dtypes by TensorRT's names; types that numpy lacks cannot be inputs or outputs.
DTYPES = {
    "FLOAT": "float32",
    "HALF": "float16",
    "INT8": "int8",
    "INT32": "int32",
    "INT64": "int64",
    "UINT8": "uint8",
    "BOOL": "bool",
}
_NO_MEMORY = re.compile(r"out of memory|outofmemory|insufficient memory|memoryallocation", re.IGNORECASE)


def require() -> str:
    """Import TensorRT and return its version.

    Raises:
        MissingPackageError: it is not installed.
        EngineError: it is installed but does not load.
        CapabilityError: it is older than 10.3.
    """
    module = backend.import_runtime(
        *("tensorrt", "tensorrt", "tensorrt", "building or running a TensorRT engine", "tensorrt"),
        expected="TensorRT's libraries of the same version, for this driver's CUDA",
        fix="pip install --force-reinstall tensorrt (for CUDA 12: tensorrt-cu12); on a Jetson use JetPack's TensorRT",
    )
    version = str(module.__version__)
    if version_numbers(version)[:2] < OLDEST:
        raise CapabilityError(
            "this TensorRT is too old",
            found=version,
            expected=".".join(map(str, OLDEST)) + " or newer",
            fix="pip install --upgrade tensorrt",
        )
    return version


def version_numbers(version: str) -> tuple[int, ...]:
    """Return (11, 4, 0, 106) for "11.4.0.106"; anything after the numbers is ignored."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


class Messages:
    """TensorRT's error messages, oldest first: it reports failures by messages and empty results."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def failure(self, what: str, fix: str = "") -> VitdeployError:
        """Return the error for a failed call: DeviceMemoryError if memory ran out, otherwise EngineError."""
        found = "\n".join(self.errors[-3:])[:600] or "no message"
        if self.no_memory():
            return DeviceMemoryError(
                f"{what}: the GPU has too little free memory",
                found=found,
                fix="stop other processes on the GPU, or use a smaller batch",
            )
        return EngineError(what, found=found, fix=fix)

    def no_memory(self) -> bool:
        return any(_NO_MEMORY.search(text) for text in self.errors)


def make_logger() -> tuple[trt.ILogger, Messages]:
    """Return a logger for TensorRT, and the messages that it collects."""
    messages = Messages()

    class Logger(trt.ILogger):
        def __init__(self) -> None:
            trt.ILogger.__init__(self)  # required by the bindings

        def log(self, severity: trt.ILogger.Severity, msg: str) -> None:
            if severity in (trt.ILogger.Severity.INTERNAL_ERROR, trt.ILogger.Severity.ERROR):
                messages.errors.append(msg.strip())

    return Logger(), messages


def create_network(builder: trt.Builder) -> trt.INetworkDefinition:
    """Return an empty strongly typed network, whose tensors have the graph's types. Version 10 needs this flag; version
    11 has another value for it and ignores it."""
    return builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))


def hardware_level(name: str) -> trt.HardwareCompatibilityLevel:
    """Return TensorRT's value for "this", "same-compute-capability" or "ampere+".

    Raises:
        CapabilityError: this TensorRT version lacks it.
    """
    names = {"this": "NONE", "same-compute-capability": "SAME_COMPUTE_CAPABILITY", "ampere+": "AMPERE_PLUS"}
    level: trt.HardwareCompatibilityLevel | None = getattr(trt.HardwareCompatibilityLevel, names[name], None)
    if level is None:
        raise CapabilityError(
            f"this TensorRT version cannot build for the hardware {name!r}",
            found=str(trt.__version__),
            expected="this, or ampere+",
        )
    return level


def sizes_of(dims: trt.Dims) -> tuple[int, ...]:
    """Return Dims as a tuple; -1 is a dynamic axis."""
    return tuple(int(dims[axis]) for axis in range(len(dims)))


def bytes_of(memory: trt.IHostMemory) -> bytes:
    """Return a copy of memory that TensorRT owns; it supports the buffer protocol, although its type does not declare
    it."""
    return bytes(memoryview(cast(Any, memory)))


def tensor_spec(name: str, dtype: trt.DataType, dims: trt.Dims) -> TensorSpec:
    """Return a TensorSpec; a dynamic axis (-1) is named "batch" if it is the first, otherwise "dynamic".

    Raises:
        TensorError: an element type that numpy lacks.
    """
    if dtype.name not in DTYPES:
        raise TensorError(
            f"tensor {name!r} has a type that numpy lacks",
            found=dtype.name,
            expected=", ".join(DTYPES),
            fix="use a graph with float32 inputs and outputs",
        )
    shape = tuple(size if size >= 0 else "dynamic" if axis else "batch" for axis, size in enumerate(sizes_of(dims)))
    return TensorSpec(name, DTYPES[dtype.name], shape)


# --- Dependencies of a TensorRT engine: TensorRT's version, the GPU, the driver and the operating system --------------


# The requested compatibility of an engine with other hardware and newer versions, recorded when it was built.
HARDWARE, VERSIONS = "built_for_hardware", "built_for_versions"
KEYS = ("tensorrt", "gpu", "compute_capability", "driver", "os")


def fingerprint() -> dict[str, str]:
    """Return the identity of this machine, as recorded in EngineSpec.device.

    Raises:
        MissingPackageError, EngineError, CapabilityError: no usable TensorRT, cuda-python, driver or GPU.
    """
    version = require()
    device = cuda.describe_device()
    return {
        "tensorrt": version,
        "gpu": device.name,
        "compute_capability": device.compute_capability,
        "driver": device.driver,
        "cuda": device.cuda,
        "os": f"{platform.system()} {platform.machine()}",
    }


def differences(recorded: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Return the keys in which a machine differs from those that an engine was built for.

    An engine built for the hardware "ampere+" runs on every compute capability from 8.0 on; one built for
    "same-compute-capability" on every GPU with the same one; one built for "newer" versions also on later TensorRT
    versions. These engines do not depend on the driver.
    """
    keys = set(KEYS)
    hardware, versions = recorded.get(HARDWARE, "this"), recorded.get(VERSIONS, "this")
    if hardware != "this":
        keys -= {"gpu", "driver"}
    if hardware == "ampere+" and _numbers(here, "compute_capability") >= (8, 0):
        keys -= {"compute_capability"}
    if versions == "newer":
        keys -= {"driver"}
        if _numbers(here, "tensorrt") >= _numbers(recorded, "tensorrt") > ():
            keys -= {"tensorrt"}
    return [key for key in KEYS if key in keys and recorded.get(key) != here.get(key)]


def _numbers(facts: Mapping[str, str], key: str) -> tuple[int, ...]:
    return version_numbers(facts.get(key, ""))


def refuse_other_device(name: str, recorded: Mapping[str, str], here: Mapping[str, str], rebuild: str) -> None:
    """Raise EngineError unless this machine is one that the engine was built for."""
    keys = differences(recorded, here)
    if keys:
        raise EngineError(
            f"{name} was built for a different machine",
            found=", ".join(f"{key} {recorded.get(key, 'not recorded')}" for key in keys),
            expected=", ".join(f"{key} {here.get(key, 'unknown')}" for key in keys),
            fix=f"rebuild it: {rebuild}",
        )


# --- The runner, with one stream, one execution context and one captured graph ----------------------------------------
# A plan is deserialised only if it was built for a machine like this one and its digest is trusted by this user
# (`runtime/trust.py`).


class TensorRtRunner(runner.Runner):
    """Runs a plan at one batch size (and image size, if the plan has several) on device 0.

    `device` is the record from when the plan was built: the machine, and the compatibility with others. `trusted`
    returns whether the plan with a SHA-256 may be loaded.
    """

    native = True

    def __init__(
        self,
        plan: Path,
        *,
        name: str,
        batch: int,
        device: Mapping[str, str],
        image_size: tuple[int, int] | None = None,
        trusted: Callable[[str], bool] = is_trusted,
    ) -> None:
        super().__init__(name)
        self.plan = plan
        self.batch = batch
        self.device = dict(device)
        self.image_size = image_size
        self.trusted = trusted
        self._resources = contextlib.ExitStack()
        self._context: trt.IExecutionContext | None = None
        self._keep: tuple[object, ...] = ()  # objects that must outlive the context
        self._host: dict[str, cuda.PinnedArray] = {}
        self._memory: dict[str, int] = {}
        self._graph: cuda.Graph | None = None

    def _load(self) -> None:
        here = fingerprint()
        refuse_other_device(self.name, self.device, here, rebuild(self.plan))
        data = read_trusted(self.plan, self.trusted)
        try:
            self._prepare(data)
        except BaseException:
            with contextlib.suppress(VitdeployError):  # freeing memory may fail too after a GPU error
                self._close()
            raise
        mode = "CUDA graph" if self._graph is not None else "no CUDA graph"
        self.provider = f"TensorRT {here['tensorrt']} on {here['gpu']}, {mode}"

    def _prepare(self, data: bytes) -> None:
        self._stream = cuda.Stream()
        self._resources.callback(self._stream.close)
        self._open(data)
        for tensor in (*self.inputs, *self.outputs):
            self._allocate(tensor)
        self._bind(self._memory)
        self._enqueue()  # the first run prepares shape-dependent state and cannot be captured
        self._stream.synchronize()
        self._graph = self._stream.capture(self._enqueue)
        if self._graph is not None:
            self._resources.callback(self._graph.close)
        self._messages.errors.clear()  # from a failed capture

    def _open(self, data: bytes) -> None:
        """Deserialise the plan, choose its profile, and set `inputs` and `outputs`."""
        logger, self._messages = make_logger()
        try:
            runtime = trt.Runtime(logger)
        except TypeError:  # raised by the bindings if the runtime could not be created
            raise self._messages.failure(f"{self.name}: TensorRT failed to start") from None
        # A version-compatible plan includes a runtime, which is host code.
        runtime.engine_host_code_allowed = self.device.get(VERSIONS) == "newer"
        engine = runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise self._messages.failure(
                f"{self.name}: TensorRT cannot deserialise the plan", f"rebuild it: {rebuild(self.plan)}"
            )
        context = engine.create_execution_context()
        if context is None:
            raise self._messages.failure(f"{self.name}: TensorRT failed to create an execution context")
        # The plan has details for the inspector, which would cost time at every run.
        context.nvtx_verbosity = trt.ProfilingVerbosity.NONE
        inputs, outputs = io_tensors(engine)
        index, shapes = profiles.choose_profile(read_profiles(engine), inputs, self.batch, self.image_size, self.name)
        if not context.set_optimization_profile_async(index, self._stream.handle):
            raise self._messages.failure(f"{self.name}: TensorRT rejected the profile {index}")
        for tensor in inputs:
            if not context.set_input_shape(tensor.name, shapes[tensor.name]):
                raise self._messages.failure(f"{self.name}: TensorRT rejected the shape of {tensor.name!r}")
        self.inputs = tuple(TensorSpec(tensor.name, tensor.dtype, shapes[tensor.name]) for tensor in inputs)
        self.outputs = tuple(
            tensor_spec(tensor.name, engine.get_tensor_dtype(tensor.name), context.get_tensor_shape(tensor.name))
            for tensor in outputs
        )
        self._context, self._keep = context, (engine, runtime, logger)

    def _allocate(self, tensor: TensorSpec) -> None:
        shape = tuple(size for size in tensor.shape if isinstance(size, int))
        if len(shape) != len(tensor.shape):
            raise EngineError(
                f"{self.name}: the shape of {tensor.name!r} depends on the data",
                found=str(tensor),
                expected="shapes determined by the input shapes",
            )
        host = cuda.PinnedArray(shape, tensor.dtype)
        self._resources.callback(host.close)
        buffer = cuda.DeviceBuffer(max(1, host.array.nbytes))
        self._resources.callback(buffer.close)
        self._host[tensor.name], self._memory[tensor.name] = host, buffer.pointer

    def _bind(self, addresses: Mapping[str, int]) -> None:
        assert self._context is not None
        for name, address in addresses.items():
            if not self._context.set_tensor_address(name, address):
                raise self._messages.failure(f"{self.name}: TensorRT rejected the memory of {name!r}")

    def _enqueue(self) -> None:
        """Enqueue copy in, run and copy out, between pinned buffers, on the stream."""
        self._copy_in()
        self._execute()
        self._copy_out()

    def _copy_in(self) -> None:
        for tensor in self.inputs:
            self._stream.copy_to_device(self._memory[tensor.name], self._host[tensor.name])

    def _copy_out(self) -> None:
        for tensor in self.outputs:
            self._stream.copy_to_host(self._host[tensor.name], self._memory[tensor.name])

    def _execute(self) -> None:
        assert self._context is not None
        self._messages.errors.clear()  # earlier messages were raised or are irrelevant
        if not self._context.execute_async_v3(self._stream.handle):
            raise self._messages.failure(f"{self.name}: TensorRT failed")

    def _infer(self, feeds: Mapping[str, runner.Array]) -> dict[str, runner.Array]:
        for tensor in self.inputs:
            np.copyto(self._host[tensor.name].array, feeds[tensor.name])
        if self._graph is not None:
            self._graph.launch()
        else:
            self._enqueue()
        self._stream.synchronize()
        return {tensor.name: self._host[tensor.name].array.copy() for tensor in self.outputs}

    def stages(self, feeds: Mapping[str, runner.Array]) -> dict[str, float]:
        """Measure with CUDA events between separately enqueued phases: a captured graph has no events."""
        with self._turn, contextlib.ExitStack() as events:
            self._require_loaded("stages()")
            marks = [cuda.Event() for _ in range(4)]
            for mark in marks:
                events.callback(mark.close)
            for tensor in self.inputs:
                np.copyto(self._host[tensor.name].array, feeds[tensor.name])
            marks[0].record(self._stream)
            for work, mark in zip((self._copy_in, self._execute, self._copy_out), marks[1:], strict=True):
                work()
                mark.record(self._stream)
            self._stream.synchronize()
            names = ("copy_in", "execute", "copy_out")
            return {name: marks[i + 1].milliseconds_since(marks[i]) for i, name in enumerate(names)}

    def infer_device(self, feeds: Mapping[str, Any]) -> dict[str, DeviceArray]:
        """Run once on arrays in the memory of device 0, without copying inputs or outputs.

        `feeds` are objects with `__dlpack__` or `__cuda_array_interface__` by input name, such as PyTorch's and CuPy's,
        C-contiguous. Outputs are new arrays that support both; they are complete when this returns.

        Raises:
            TensorError: a missing or unknown input name, the wrong dtype or shape, or other memory.
            DeviceMemoryError: not enough memory for the outputs.
        """
        with self._turn:
            self._require_loaded("infer_device()")
            expected = self._expected(feeds)
            taken = {name: borrow(value, self._stream) for name, value in feeds.items()}
            for name, array in taken.items():
                if (array.dtype, array.shape) != (expected[name].dtype, expected[name].shape):
                    raise TensorError(
                        f"{self.name}: wrong dtype or shape of input {name!r}",
                        found=f"{array.dtype} {list(array.shape)}",
                        expected=f"{expected[name].dtype} {list(expected[name].shape)}",
                    )
            outputs = {
                tensor.name: DeviceArray(self._host[tensor.name].array.shape, tensor.dtype) for tensor in self.outputs
            }
            try:
                self._bind({name: array.pointer for name, array in taken.items()})
                self._bind({name: array.pointer for name, array in outputs.items()})
                self._execute()
            finally:
                self._stream.synchronize()  # before the inputs' owners may change them
                self._bind(self._memory)
        return outputs

    def _close(self) -> None:
        self._graph = None
        self._context, self._keep = None, ()
        self._host, self._memory = {}, {}
        self._resources.close()


def io_tensors(engine: trt.ICudaEngine) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Return the inputs and outputs of an engine, in its order.

    Raises:
        TensorError: an element type that numpy lacks.
    """
    inputs: list[TensorSpec] = []
    outputs: list[TensorSpec] = []
    for name in (engine.get_tensor_name(index) for index in range(engine.num_io_tensors)):
        side = inputs if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else outputs
        side.append(tensor_spec(name, engine.get_tensor_dtype(name), engine.get_tensor_shape(name)))
    return inputs, outputs


def read_profiles(engine: trt.ICudaEngine) -> list[dict[str, profiles.Range]]:
    """Return the range of every input in every optimisation profile of an engine."""
    inputs = io_tensors(engine)[0]
    return [
        {tensor.name: _range(engine, tensor, index) for tensor in inputs}
        for index in range(max(1, engine.num_optimization_profiles))
    ]


def _range(engine: trt.ICudaEngine, tensor: TensorSpec, profile: int) -> profiles.Range:
    fixed = tuple(size for size in tensor.shape if isinstance(size, int))
    if len(fixed) == len(tensor.shape):
        return profiles.Range(fixed, fixed, fixed)
    smallest, best, largest = map(sizes_of, engine.get_tensor_profile_shape(tensor.name, profile))
    return profiles.Range(smallest, best, largest)


def _make_runner(request: backend.RunnerRequest) -> runner.Runner:
    engine, signed = request.engine, signed_digests(request.folder, request.trust)
    return TensorRtRunner(
        request.file,
        name=engine.artifact,
        batch=request.batch,
        device=engine.device,
        trusted=lambda digest: digest in signed or is_trusted(digest),
    )


BACKEND = backend.RuntimeBackend(
    _make_runner,
    describe_device=fingerprint,
    engine_is_code=True,
    fits_here=lambda engine: not differences(engine.device, fingerprint()),
)
