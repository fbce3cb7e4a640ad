"""The few CUDA calls that an engine needs, through cuda-python (`cuda.bindings.runtime`), imported at first use.

Every call goes through `check`, which turns its error code into a typed error. All of it is for device 0: another one
is chosen with CUDA_VISIBLE_DEVICES. Source of the calls: CUDA Runtime API, the same in CUDA 12 and 13.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from vitdeploy.errors import (
    CapabilityError,
    DeviceMemoryError,
    EngineError,
    HostError,
    MissingPackageError,
    VitdeployError,
)
from vitdeploy.runtime.nvidia import driver_version
from vitdeploy.runtime.runner import Array

DEVICE = 0
LOOK = "`nvidia-smi` and `vitdeploy doctor --target tensorrt` say what is there"


def require() -> ModuleType:
    """The module `cuda.bindings.runtime`.

    Raises:
        MissingPackageError: cuda-python is not installed.
        EngineError: it is installed but does not load.
    """
    try:
        return importlib.import_module("cuda.bindings.runtime")
    except ModuleNotFoundError as error:
        raise MissingPackageError("cuda-python", "tensorrt", "calling CUDA", "tensorrt", error=error) from None
    except (ImportError, OSError, RuntimeError) as error:
        raise EngineError(
            "cuda-python is installed but does not load",
            found=str(error)[:300],
            fix="pip install --force-reinstall cuda-python",
        ) from None


def check(result: tuple[Any, ...]) -> Any:
    """The results of a cuda-python call without its error code: None, one value, or a tuple.

    Raises:
        DeviceMemoryError: too little memory on the device, or too little that can be pinned.
        CapabilityError: no device, or a driver that is too old for the CUDA runtime.
        EngineError: any other error.
    """
    code, *values = result
    if int(code) != 0:
        raise _typed_error(code)
    return None if not values else values[0] if len(values) == 1 else tuple(values)


def _typed_error(code: Any) -> VitdeployError:
    cudart = require()
    if code == cudart.cudaError_t.cudaErrorMemoryAllocation:
        return DeviceMemoryError(
            "the GPU has too little free memory",
            found=code.name,
            fix="close what else uses the GPU, or take a smaller batch",
        )
    if code in (cudart.cudaError_t.cudaErrorNoDevice, cudart.cudaError_t.cudaErrorInsufficientDriver):
        return CapabilityError(
            "no NVIDIA GPU can be used here",
            found=code.name,
            wanted="a GPU, and a driver that is new enough for this CUDA",
            fix=f"install or update NVIDIA's driver, or install the cuda-python of the driver's CUDA; {LOOK}",
        )
    _, text = cudart.cudaGetErrorString(code)
    shown = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    return EngineError("a CUDA call failed", found=f"{code.name}: {shown}")


@dataclass(frozen=True)
class Device:
    """The GPU: its name, compute capability such as "8.9", memory in bytes; the driver and CUDA that serve it."""

    name: str
    compute_capability: str
    memory: int
    driver: str
    cuda: str


def describe_device() -> Device:
    """Device 0.

    Raises:
        MissingPackageError, EngineError: no usable cuda-python.
        CapabilityError: no driver or no GPU.
    """
    cudart = require()
    try:
        count = check(cudart.cudaGetDeviceCount())
    except RuntimeError as error:  # cuda-python cannot even find the driver's library
        raise CapabilityError(
            "no NVIDIA GPU can be used here",
            found=str(error)[:200],
            wanted="a GPU with NVIDIA's driver",
            fix=f"install NVIDIA's driver; {LOOK}",
        ) from None
    if not count:
        raise CapabilityError(
            "no NVIDIA GPU can be used here",
            found="no device",
            wanted="a GPU",
            fix=f"look at CUDA_VISIBLE_DEVICES; {LOOK}",
        )
    properties = check(cudart.cudaGetDeviceProperties(DEVICE))
    name = properties.name
    return Device(
        name=(name.decode(errors="replace") if isinstance(name, bytes) else str(name)).rstrip("\0"),
        compute_capability=f"{properties.major}.{properties.minor}",
        memory=int(properties.totalGlobalMem),
        driver=driver_version() or _dotted(check(cudart.cudaDriverGetVersion())),
        cuda=_dotted(check(cudart.cudaDriverGetVersion())),
    )


def _dotted(version: int) -> str:
    """CUDA writes 12.6 as 12060."""
    return f"{version // 1000}.{version % 1000 // 10}"


def free_memory() -> int:
    """Bytes of device memory that are free now."""
    free, _ = check(require().cudaMemGetInfo())
    return int(free)


class DeviceBuffer:
    """Device memory of `size` bytes at `pointer`, freed by `close` or when nothing refers to it any more."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.pointer = 0
        self.pointer = int(check(require().cudaMalloc(size)))

    def close(self) -> None:
        if self.pointer:
            pointer, self.pointer = self.pointer, 0
            check(require().cudaFree(pointer))

    def __del__(self) -> None:
        # At the end of the interpreter the driver may be gone already.
        with contextlib.suppress(Exception):
            self.close()


class PinnedArray:
    """A numpy array in page-locked host memory, which copies to and from the device without a detour."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        self.pointer = 0
        self.pointer = int(check(require().cudaMallocHost(size)))
        memory = (ctypes.c_uint8 * size).from_address(self.pointer)
        self.array: Array = np.ndarray(shape, kind, memoryview(memory))
        self.array.fill(0)  # what lies there may be no index that a model can look up

    def close(self) -> None:
        """Free the memory; the array must not be used afterwards."""
        if self.pointer:
            pointer, self.pointer = self.pointer, 0
            check(require().cudaFreeHost(pointer))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class Event:
    """A point in a stream, with a time."""

    def __init__(self) -> None:
        self._event = check(require().cudaEventCreate())

    def record(self, stream: Stream) -> None:
        check(require().cudaEventRecord(self._event, stream.handle))

    def milliseconds_since(self, earlier: Event) -> float:
        """GPU time between two recorded events that have both been reached."""
        return float(check(require().cudaEventElapsedTime(earlier._event, self._event)))

    def close(self) -> None:
        check(require().cudaEventDestroy(self._event))


class Stream:
    """A stream of its own, which does not wait for the default stream. `handle` is its cudaStream_t as a number."""

    def __init__(self) -> None:
        cudart = require()
        self.handle = int(check(cudart.cudaStreamCreateWithFlags(cudart.cudaStreamNonBlocking)))

    def copy_to_device(self, device: int, host: PinnedArray) -> None:
        kind = require().cudaMemcpyKind.cudaMemcpyHostToDevice
        check(require().cudaMemcpyAsync(device, host.pointer, host.array.nbytes, kind, self.handle))

    def copy_to_host(self, host: PinnedArray, device: int) -> None:
        kind = require().cudaMemcpyKind.cudaMemcpyDeviceToHost
        check(require().cudaMemcpyAsync(host.pointer, device, host.array.nbytes, kind, self.handle))

    def synchronize(self) -> None:
        check(require().cudaStreamSynchronize(self.handle))

    def capture(self, work: Callable[[], None]) -> Graph | None:
        """The work that `work` puts into this stream, as a graph that is launched at once; None if a part of it
        cannot be captured. Nothing is executed. Errors other than the refusal of a capture come through `work` when it
        is run without one."""
        cudart = require()
        check(cudart.cudaStreamBeginCapture(self.handle, cudart.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal))
        refused = False
        try:
            work()
        except HostError:
            refused = True
        finally:
            code, captured = cudart.cudaStreamEndCapture(self.handle)
        try:
            return None if refused or int(code) != 0 else Graph(captured, self)
        except HostError:
            return None
        finally:
            cudart.cudaGetLastError()  # an error that stays behind would be taken for the next call's
            if int(code) == 0:
                check(cudart.cudaGraphDestroy(captured))

    def close(self) -> None:
        check(require().cudaStreamDestroy(self.handle))


class Graph:
    """Captured work that one call launches in its stream again; the captured objects are no longer needed."""

    def __init__(self, captured: Any, stream: Stream) -> None:
        self._executable = check(require().cudaGraphInstantiate(captured, 0))
        self._stream = stream

    def launch(self) -> None:
        check(require().cudaGraphLaunch(self._executable, self._stream.handle))

    def close(self) -> None:
        check(require().cudaGraphExecDestroy(self._executable))
