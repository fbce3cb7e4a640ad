"""TensorRT: the runner. Each has one stream, one execution context and one captured graph.

A plan is deserialised only after the machine was compared with the one it was built for, and its digest with those
that this user trusts (`runtime/trust.py`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vitdeploy.bundle.sign import signed_digests
from vitdeploy.errors import EngineError, TensorError, VitdeployError
from vitdeploy.runtime import cuda, tensorrt_api
from vitdeploy.runtime.backend import RunnerRequest, RuntimeBackend
from vitdeploy.runtime.device_array import DeviceArray, borrow
from vitdeploy.runtime.profiles import Range, choose_profile
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.runtime.tensorrt_identity import VERSIONS, differences, fingerprint, refuse_other_device
from vitdeploy.runtime.trust import is_trusted, read_trusted, rebuild
from vitdeploy.spec import EngineSpec, TensorSpec

if TYPE_CHECKING:
    import tensorrt as trt


class TensorRtRunner(Runner):
    """Runs a plan at one batch size (and image size, where the plan has several) on device 0.

    `device` is what was recorded when the plan was built: the machine, and how far beyond it the plan may go.
    `trusted` says of a SHA-256 whether the plan may be loaded.
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
        self._keep: tuple[object, ...] = ()  # what the context needs, and what must not go before it
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
            with contextlib.suppress(VitdeployError):  # a GPU that failed may not even take memory back
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
        self._enqueue()  # TensorRT makes ready what depends on shapes at the first run, which cannot be captured
        self._stream.synchronize()
        self._graph = self._stream.capture(self._enqueue)
        if self._graph is not None:
            self._resources.callback(self._graph.close)
        self._messages.errors.clear()  # of a capture that was refused

    def _open(self, data: bytes) -> None:
        """Deserialise the plan, choose its profile, and set `inputs` and `outputs`."""
        import tensorrt as trt

        logger, self._messages = tensorrt_api.make_logger()
        try:
            runtime = trt.Runtime(logger)
        except TypeError:  # what the bindings make of a runtime that could not be created
            raise self._messages.failure(f"{self.name}: TensorRT does not start") from None
        # A version-compatible plan brings a runtime with it, which is code on the host.
        runtime.engine_host_code_allowed = self.device.get(VERSIONS) == "newer"
        engine = runtime.deserialize_cuda_engine(data)
        if engine is None:
            raise self._messages.failure(f"{self.name}: TensorRT refuses the plan", f"rebuild it: {rebuild(self.plan)}")
        context = engine.create_execution_context()
        if context is None:
            raise self._messages.failure(f"{self.name}: TensorRT makes no execution context")
        # The plan has details for the inspector; at every run they would cost time.
        context.nvtx_verbosity = trt.ProfilingVerbosity.NONE
        inputs, outputs = io_tensors(engine)
        index, shapes = choose_profile(read_profiles(engine), inputs, self.batch, self.image_size, self.name)
        if not context.set_optimization_profile_async(index, self._stream.handle):
            raise self._messages.failure(f"{self.name}: TensorRT refuses the profile {index}")
        for tensor in inputs:
            if not context.set_input_shape(tensor.name, shapes[tensor.name]):
                raise self._messages.failure(f"{self.name}: TensorRT refuses the shape of {tensor.name!r}")
        self.inputs = tuple(TensorSpec(tensor.name, tensor.dtype, shapes[tensor.name]) for tensor in inputs)
        self.outputs = tuple(
            tensorrt_api.tensor_spec(
                tensor.name, engine.get_tensor_dtype(tensor.name), context.get_tensor_shape(tensor.name)
            )
            for tensor in outputs
        )
        self._context, self._keep = context, (engine, runtime, logger)

    def _allocate(self, tensor: TensorSpec) -> None:
        shape = tuple(size for size in tensor.shape if isinstance(size, int))
        if len(shape) != len(tensor.shape):
            raise EngineError(
                f"{self.name}: the shape of {tensor.name!r} depends on the data",
                found=str(tensor),
                wanted="shapes that follow from the input's",
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
                raise self._messages.failure(f"{self.name}: TensorRT refuses the memory of {name!r}")

    def _enqueue(self) -> None:
        """From pinned memory to pinned memory, in the stream."""
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
        self._messages.errors.clear()  # what was said before has been raised, or did not matter
        if not self._context.execute_async_v3(self._stream.handle):
            raise self._messages.failure(f"{self.name}: TensorRT failed")

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        for tensor in self.inputs:
            np.copyto(self._host[tensor.name].array, feeds[tensor.name])
        if self._graph is not None:
            self._graph.launch()
        else:
            self._enqueue()
        self._stream.synchronize()
        return {tensor.name: self._host[tensor.name].array.copy() for tensor in self.outputs}

    def stages(self, feeds: Mapping[str, Array]) -> dict[str, float]:
        """By CUDA events between the parts, enqueued one by one: a captured graph has none inside."""
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
        """Run once on arrays in the memory of device 0, without a copy of inputs or outputs.

        `feeds` are objects with `__dlpack__` or `__cuda_array_interface__` by input name, such as PyTorch's and CuPy's,
        C-contiguous. Outputs are new arrays that offer both; they are complete when this returns.

        Raises:
            TensorError: a missing or unknown input name, another dtype or shape than `inputs` say, or other memory.
            DeviceMemoryError: no room for the outputs.
        """
        with self._turn:
            self._require_loaded("infer_device()")
            wanted = self._wanted(feeds)
            taken = {name: borrow(value, self._stream) for name, value in feeds.items()}
            for name, array in taken.items():
                if (array.dtype, array.shape) != (wanted[name].dtype, wanted[name].shape):
                    raise TensorError(
                        f"{self.name}: input {name!r} does not fit",
                        found=f"{array.dtype} {list(array.shape)}",
                        wanted=f"{wanted[name].dtype} {list(wanted[name].shape)}",
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
    """The inputs and outputs of an engine, in its own order.

    Raises:
        TensorError: an element type that numpy lacks.
    """
    import tensorrt as trt

    inputs: list[TensorSpec] = []
    outputs: list[TensorSpec] = []
    for name in (engine.get_tensor_name(index) for index in range(engine.num_io_tensors)):
        side = inputs if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT else outputs
        side.append(tensorrt_api.tensor_spec(name, engine.get_tensor_dtype(name), engine.get_tensor_shape(name)))
    return inputs, outputs


def read_profiles(engine: trt.ICudaEngine) -> list[dict[str, Range]]:
    """The range of every input in every optimisation profile of an engine."""
    inputs = io_tensors(engine)[0]
    return [
        {tensor.name: _range(engine, tensor, index) for tensor in inputs}
        for index in range(max(1, engine.num_optimization_profiles))
    ]


def _range(engine: trt.ICudaEngine, tensor: TensorSpec, profile: int) -> Range:
    fixed = tuple(size for size in tensor.shape if isinstance(size, int))
    if len(fixed) == len(tensor.shape):
        return Range(fixed, fixed, fixed)
    smallest, best, largest = map(tensorrt_api.sizes_of, engine.get_tensor_profile_shape(tensor.name, profile))
    return Range(smallest, best, largest)


def _make_runner(request: RunnerRequest) -> Runner:
    engine, signed = request.engine, signed_digests(request.folder, request.trust)
    return TensorRtRunner(
        request.file,
        name=engine.artifact,
        batch=request.batch,
        device=engine.device,
        trusted=lambda digest: digest in signed or is_trusted(digest),
    )


def _fits_here(engine: EngineSpec) -> bool:
    return not differences(engine.device, fingerprint())


BACKEND = RuntimeBackend(_make_runner, describe_device=fingerprint, engine_is_code=True, fits_here=_fits_here)
