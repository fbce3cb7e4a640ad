"""Arrays on a device."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitdeploy.errors import TensorError
from vitdeploy.runtime import cuda

# --- DLPack in ctypes: a tensor's memory is handed over without a copy, whatever library owns it ----------------------
# Structures and names as in DLPack 0.8 (dmlc/dlpack, include/dlpack/dlpack.h) and Python's array API standard: a
# capsule called "dltensor" holds a DLManagedTensor; who takes it over renames it "used_dltensor" and calls its deleter
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

# What was handed out and not given back, by the address of its structure: keeps the memory and the structure alive.
_exported: dict[int, tuple[Any, ...]] = {}


@dataclass(frozen=True)
class View:
    """Memory of another library: address, C-contiguous shape, numpy dtype name, DLPack device (type, number)."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    device: tuple[int, int]


def export(pointer: int, shape: tuple[int, ...], dtype: str, device: tuple[int, int], owner: object) -> Any:
    """A "dltensor" capsule of C-contiguous memory; `owner` lives until the capsule, or who took it over, is done."""
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
    if _is_valid(capsule, _NAME):  # nobody took it over, so nobody else will call the deleter
        _exported.pop(_dying_pointer(capsule, _NAME), None)


# C holds on to these, so they live as long as this module.
_forget_callback, _destroy_callback = _Deleter(_forget), _Destructor(_destroy)


def read(capsule: Any) -> View:
    """What a capsule holds. It is not taken over: the memory is there as long as the capsule is.

    Raises:
        TensorError: another kind of capsule, an element type that numpy lacks, or memory that is not C-contiguous.
    """
    try:
        address = _pointer(capsule, _NAME)
    except (ValueError, ctypes.ArgumentError) as error:
        raise TensorError("not a DLPack capsule that can be read", found=str(error)) from None
    tensor = _ManagedTensor.from_address(address).tensor
    shape = tuple(tensor.shape[axis] for axis in range(tensor.ndim))
    strides = tuple(tensor.strides[axis] for axis in range(tensor.ndim)) if tensor.strides else None
    if tensor.code not in _CODES or tensor.lanes != 1:
        raise TensorError(
            "a DLPack tensor has a type that numpy lacks",
            found=f"type code {tensor.code}, {tensor.bits} bits, {tensor.lanes} lanes",
            wanted="integers, floats or booleans",
        )
    if strides is not None and not is_contiguous(shape, strides):
        raise TensorError("a DLPack tensor is not contiguous", found=f"strides {strides} for the shape {shape}")
    name = "bool" if _CODES[tensor.code] == "bool" else f"{_CODES[tensor.code]}{tensor.bits}"
    pointer = (tensor.data or 0) + tensor.byte_offset
    return View(pointer, shape, name, (tensor.device_type, tensor.device_id))


def is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int = 1) -> bool:
    """Whether strides (in elements, or in bytes of `itemsize`) are those of a C-contiguous array."""
    expected = itemsize
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


# --- Arrays in GPU memory, exchanged with PyTorch, CuPy and others without a copy -------------------------------------


class DeviceArray:
    """A C-contiguous array that owns its GPU memory, offered by `__cuda_array_interface__` (version 3) and DLPack.

    Its contents are complete when it is handed out, so no stream synchronization is needed.
    """

    def __init__(self, shape: tuple[int, ...], dtype: str) -> None:
        self.shape = shape
        self.dtype = np.dtype(dtype)
        self._buffer = cuda.DeviceBuffer(max(1, int(np.prod(shape, dtype=np.int64)) * self.dtype.itemsize))

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
        return CUDA, cuda.DEVICE

    def __dlpack__(
        self, *, stream: int | None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = None, **_: Any
    ) -> Any:
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("this memory is shared as it is: no copy is made, and none on another device")
        return export(self.pointer, self.shape, self.dtype.name, self.__dlpack_device__(), self._buffer)


@dataclass(frozen=True)
class Borrowed:
    """Another library's array in GPU memory; `keeper` keeps the memory there while this value is in use."""

    pointer: int
    shape: tuple[int, ...]
    dtype: str
    keeper: object


def borrow(value: Any, stream: cuda.Stream) -> Borrowed:
    """The memory of an object with `__cuda_array_interface__` or `__dlpack__`, ready to be read in `stream`.

    Raises:
        TensorError: neither of the two, memory that its owner does not share, not C-contiguous, or not on device 0
            (which `__cuda_array_interface__` does not say: there it is taken for granted).
    """
    if hasattr(value, "__dlpack__"):
        device = value.__dlpack_device__()
        if (int(device[0]), int(device[1])) != (CUDA, cuda.DEVICE):
            raise TensorError(
                "an input is not in the memory of the GPU",
                found=f"DLPack device {tuple(map(int, device))}",
                wanted=f"{(CUDA, cuda.DEVICE)}",
                fix="move it to the GPU, or call infer with numpy arrays",
            )
        try:
            capsule = value.__dlpack__(stream=stream.handle)  # its owner makes it ready for our stream
        except (BufferError, RuntimeError) as error:  # what the array standard and PyTorch raise
            raise TensorError("an input cannot be shared", found=str(error)) from None
        view = read(capsule)
        return Borrowed(view.pointer, view.shape, view.dtype, capsule)
    facts = getattr(value, "__cuda_array_interface__", None)
    if facts is None:
        raise TensorError(
            "an input is no array in GPU memory",
            found=type(value).__name__,
            wanted="__dlpack__ or __cuda_array_interface__",
            fix="call infer with numpy arrays",
        )
    return _from_interface(facts, value)


def _from_interface(facts: dict[str, Any], owner: object) -> Borrowed:
    kind, shape = np.dtype(facts["typestr"]), tuple(facts["shape"])
    strides = facts.get("strides")
    if strides is not None and not is_contiguous(shape, tuple(strides), kind.itemsize):
        raise TensorError("an input is not contiguous", found=f"strides {tuple(strides)} for the shape {shape}")
    if facts.get("stream") is not None:  # what fills it may still be under way there
        cuda.check(cuda.require().cudaStreamSynchronize(int(facts["stream"])))
    return Borrowed(int(facts["data"][0]), shape, kind.name, owner)
