"""The few CUDA calls that an engine needs, through cuda-python (`cuda.bindings.runtime`), imported at first use.

`check` turns the error code of each call into a typed error. Only device 0 is used; CUDA_VISIBLE_DEVICES selects
another GPU. Source of the calls: CUDA Runtime API, the same in CUDA 12 and 13.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from vitdeploy.errors import CapabilityError, DeviceMemoryError, EngineError, HostError, TensorError, VitdeployError
from vitdeploy.runtime import backend, nvidia, runner

DEVICE = 0
LOOK = "`nvidia-smi` and `vitdeploy doctor --target tensorrt` show what is available"


def require() -> ModuleType:
    """Import and return the module `cuda.bindings.runtime`.

    Raises:
        MissingPackageError: cuda-python is not installed.
        EngineError: it is installed but does not load.
    """
    return backend.import_runtime("cuda.bindings.runtime", "cuda-python", "tensorrt", "calling CUDA", "tensorrt")


def check(result: tuple[Any, ...]) -> Any:
    """Return the results of a cuda-python call without its error code: None, one value, or a tuple.

    Raises:
        DeviceMemoryError: too little device memory, or too little pinnable host memory.
        CapabilityError: no device, or a driver too old for the CUDA runtime.
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
            fix="stop other processes on the GPU, or use a smaller batch",
        )
    if code in (cudart.cudaError_t.cudaErrorNoDevice, cudart.cudaError_t.cudaErrorInsufficientDriver):
        return CapabilityError(
            "no NVIDIA GPU can be used here",
            found=code.name,
            expected="an NVIDIA GPU, and a driver that supports this CUDA version",
            fix=f"install or update NVIDIA's driver, or install the cuda-python that matches it; {LOOK}",
        )
    _, text = cudart.cudaGetErrorString(code)
    shown = text.decode(errors="replace") if isinstance(text, bytes) else str(text)
    return EngineError("a CUDA call failed", found=f"{code.name}: {shown}")


@dataclass(frozen=True)
class Device:
    """The GPU: its name, compute capability such as "8.9", memory in bytes, and versions of driver and CUDA."""

    name: str
    compute_capability: str
    memory: int
    driver: str
    cuda: str


def describe_device() -> Device:
    """Return the properties of device 0.

    Raises:
        MissingPackageError, EngineError: no usable cuda-python.
        CapabilityError: no driver or no GPU.
    """
    cudart = require()
    try:
        count = check(cudart.cudaGetDeviceCount())
    except RuntimeError as error:  # cuda-python does not find the driver's library
        raise CapabilityError(
            "no NVIDIA GPU can be used here",
            found=str(error)[:200],
            expected="an NVIDIA GPU with its driver",
            fix=f"install NVIDIA's driver; {LOOK}",
        ) from None
    if not count:
        raise CapabilityError(
            "no NVIDIA GPU can be used here",
            found="no device",
            expected="an NVIDIA GPU",
            fix=f"check CUDA_VISIBLE_DEVICES; {LOOK}",
        )
    properties = check(cudart.cudaGetDeviceProperties(DEVICE))
    name = properties.name
    return Device(
        name=(name.decode(errors="replace") if isinstance(name, bytes) else str(name)).rstrip("\0"),
        compute_capability=f"{properties.major}.{properties.minor}",
        memory=int(properties.totalGlobalMem),
        driver=nvidia.driver_version() or _dotted(check(cudart.cudaDriverGetVersion())),
        cuda=_dotted(check(cudart.cudaDriverGetVersion())),
    )


def _dotted(version: int) -> str:
    """CUDA writes 12.6 as 12060."""
    return f"{version // 1000}.{version % 1000 // 10}"


def free_memory() -> int:
    """Return the bytes of free device memory."""
    free, _ = check(require().cudaMemGetInfo())
    return int(free)


class DeviceBuffer:
    """Device memory of `size` bytes at `pointer`, freed by `close` or with the last reference."""

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
    """A numpy array in page-locked host memory, for direct copies to and from the device."""

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        kind = np.dtype(dtype)
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        self.pointer = 0
        self.pointer = int(check(require().cudaMallocHost(size)))
        memory = (ctypes.c_uint8 * size).from_address(self.pointer)
        self.array: runner.Array = np.ndarray(shape, kind, memoryview(memory))
        self.array.fill(0)  # uninitialised memory may hold indices outside the model's range

    def close(self) -> None:
        """Free the memory; the array must not be used afterwards."""
        if self.pointer:
            pointer, self.pointer = self.pointer, 0
            check(require().cudaFreeHost(pointer))

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()


class Event:
    """A CUDA event: a point in a stream, with a time."""

    def __init__(self) -> None:
        self._event = check(require().cudaEventCreate())

    def record(self, stream: Stream) -> None:
        check(require().cudaEventRecord(self._event, stream.handle))

    def milliseconds_since(self, earlier: Event) -> float:
        """Return the GPU time between two recorded events that have completed."""
        return float(check(require().cudaEventElapsedTime(earlier._event, self._event)))

    def close(self) -> None:
        check(require().cudaEventDestroy(self._event))


class Stream:
    """A non-blocking stream, independent of the default stream. `handle` is its cudaStream_t as a number."""

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
        """Return the work that `work` enqueues on this stream as a graph for one launch; None if part of it cannot be
        captured. Nothing is executed. Other errors appear when `work` runs without capture."""
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
            cudart.cudaGetLastError()  # clear the error, else the next call reports it
            if int(code) == 0:
                check(cudart.cudaGraphDestroy(captured))

    def close(self) -> None:
        check(require().cudaStreamDestroy(self.handle))


class Graph:
    """Captured work that one call launches on its stream; the captured objects are no longer needed."""

    def __init__(self, captured: Any, stream: Stream) -> None:
        self._executable = check(require().cudaGraphInstantiate(captured, 0))
        self._stream = stream

    def launch(self) -> None:
        check(require().cudaGraphLaunch(self._executable, self._stream.handle))

    def close(self) -> None:
        check(require().cudaGraphExecDestroy(self._executable))


# --- DLPack in ctypes: exchange tensors with any library without a copy -----------------------------------------------
# Structures and names as in DLPack 0.8 (dmlc/dlpack, include/dlpack/dlpack.h) and Python's array API standard: a
# capsule called "dltensor" holds a DLManagedTensor; its consumer renames it "used_dltensor" and calls its deleter
# later.


CPU, CUDA = 1, 2
_CODES = {0: "int", 1: "uint", 2: "float", 6: "bool"}
_KINDS = {"i": 0, "u": 1, "f": 2, "b": 6}
_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _ManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_ManagedTensor))
_ManagedTensor._fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]
# A capsule is passed by its address: while it is being destroyed, no reference to it may be taken.
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)

_text, _address = ctypes.c_char_p, ctypes.c_void_p
_new = ctypes.PYFUNCTYPE(ctypes.py_object, _address, _text, _Destructor)(("PyCapsule_New", ctypes.pythonapi))
_pointer = ctypes.PYFUNCTYPE(_address, ctypes.py_object, _text)(("PyCapsule_GetPointer", ctypes.pythonapi))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, _address, _text)(("PyCapsule_IsValid", ctypes.pythonapi))
_dying_pointer = ctypes.PYFUNCTYPE(_address, _address, _text)(("PyCapsule_GetPointer", ctypes.pythonapi))

# Exported tensors that were not released yet, by address: keeps their memory and structures alive.
_exported: dict[int, tuple[Any, ...]] = {}


@dataclass(frozen=True)
class Borrowed:
    """Another library's C-contiguous array: its address, shape and numpy dtype. `device`: of DLPack, (type, number).
    `keeper` keeps the memory alive while this value is in use."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    keeper: object
    device: tuple[int, int]


def export(pointer: int, shape: tuple[int, ...], dtype: str, device: tuple[int, int], owner: object) -> Any:
    """Return a "dltensor" capsule of C-contiguous memory; `owner` lives until the capsule or its consumer releases
    it."""
    kind = np.dtype(dtype)
    managed = _ManagedTensor()
    sizes = (ctypes.c_int64 * max(1, len(shape)))(*shape)
    tensor = managed.tensor
    tensor.data, (tensor.device_type, tensor.device_id), tensor.ndim = pointer, device, len(shape)
    tensor.code, tensor.bits, tensor.lanes = _KINDS[kind.kind], kind.itemsize * 8, 1
    tensor.shape, tensor.strides, tensor.byte_offset = sizes, None, 0
    managed.deleter = _forget_callback
    address = ctypes.addressof(managed)
    _exported[address] = (managed, sizes, owner)
    return _new(address, _NAME, _destroy_callback)


def _forget(managed: Any) -> None:
    _exported.pop(ctypes.addressof(managed.contents), None)


def _destroy(capsule: int) -> None:
    if _is_valid(capsule, _NAME):  # not consumed, so no consumer will call the deleter
        _exported.pop(_dying_pointer(capsule, _NAME), None)


# C code keeps pointers to these, so they live as long as this module.
_forget_callback, _destroy_callback = _Deleter(_forget), _Destructor(_destroy)


def read(capsule: Any) -> Borrowed:
    """Return the array in a capsule, without consuming it: the memory is valid as long as the capsule.

    Raises:
        TensorError: not a "dltensor" capsule, an element type that numpy lacks, or memory that is not C-contiguous.
    """
    try:
        address = _pointer(capsule, _NAME)
    except (ValueError, ctypes.ArgumentError) as error:
        raise TensorError("not a readable DLPack capsule", found=str(error)) from None
    tensor = _ManagedTensor.from_address(address).tensor
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else None
    if tensor.code not in _CODES or tensor.lanes != 1:
        raise TensorError(
            "a DLPack tensor has a type that numpy lacks",
            found=f"type code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes",
            expected="integers, floats or booleans",
        )
    if strides is not None and not is_contiguous(shape, strides):
        raise TensorError("a DLPack tensor is not contiguous", found=f"strides {strides} for the shape {shape}")
    name = "bool" if _CODES[tensor.code] == "bool" else f"{_CODES[tensor.code]}{tensor.bits}"
    pointer = (tensor.data or 0) + tensor.byte_offset
    return Borrowed(pointer, shape, name, capsule, (tensor.device_type, tensor.device_id))


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = 1) -> bool:
    """Return whether strides (in elements, or in bytes of `itemsize`) describe a C-contiguous array."""
    expected = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# --- Arrays in GPU memory, exchanged with PyTorch, CuPy and others without a copy -------------------------------------


class DeviceArray:
    """A C-contiguous array that owns its GPU memory, offered by `__cuda_array_interface__` (version 3) and DLPack.

    Its contents are complete before it is exported, so no stream synchronization is needed.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self._buffer = DeviceBuffer(max(1, int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize))

    @property
    def pointer(self) -> int:
        return self._buffer.pointer

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": self.dtype.str,
            "data": (self.pointer, False),
            "strides": None,
            "stream": None,
        }

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, DEVICE

    def __dlpack__(
        self, *, stream: int | None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = None, **_: Any
    ) -> Any:
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("this array cannot be exported as a copy, or to another device")
        return export(self.pointer, self.shape, self.dtype.name, self.__dlpack_device__(), self._buffer)


def borrow(value: Any, stream: Stream) -> Borrowed:
    """Return the memory of an object with `__cuda_array_interface__` or `__dlpack__`, ready to be read on `stream`.

    Raises:
        TensorError: neither of the two, memory that its owner does not share, not C-contiguous, or not on device 0
            (`__cuda_array_interface__` does not tell the device: 0 is assumed).
    """
    if hasattr(value, "__dlpack__"):
        device = value.__dlpack_device__()
        if (int(device[0]), int(device[1])) != (CUDA, DEVICE):
            raise TensorError(
                "an input is not in GPU memory",
                found=f"DLPack device {tuple(map(int, device))}",
                expected=f"DLPack device {(CUDA, DEVICE)}",
                fix="move it to the GPU, or call infer with numpy arrays",
            )
        try:
            capsule = value.__dlpack__(stream=stream.handle)  # its owner synchronizes it with our stream
        except (BufferError, RuntimeError) as error:  # what the array standard and PyTorch raise
            raise TensorError("an input cannot be shared", found=str(error)) from None
        return read(capsule)
    facts = getattr(value, "__cuda_array_interface__", None)
    if facts is None:
        raise TensorError(
            "an input is not an array in GPU memory",
            found=type(value).__name__,
            expected="an object with __dlpack__ or __cuda_array_interface__",
            fix="call infer with numpy arrays",
        )
    return _from_interface(facts, value)


def _from_interface(facts: dict[str, Any], owner: object) -> Borrowed:
    kind, shape = np.dtype(facts["typestr"]), tuple(facts["shape"])
    strides = facts.get("strides")
    if strides is not None and not is_contiguous(shape, tuple(strides), kind.itemsize):
        raise TensorError("an input is not contiguous", found=f"strides {tuple(strides)} for the shape {shape}")
    if facts.get("stream") is not None:  # its producer may still be running there
        check(require().cudaStreamSynchronize(int(facts["stream"])))
    return Borrowed(int(facts["data"][0]), shape, kind.name, owner, (CUDA, DEVICE))
