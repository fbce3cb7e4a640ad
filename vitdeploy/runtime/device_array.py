"""Arrays in GPU memory, exchanged with PyTorch, CuPy and others without a copy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from vitdeploy.errors import TensorError
from vitdeploy.runtime import cuda, dlpack


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
        return dlpack.CUDA, cuda.DEVICE

    def __dlpack__(
        self, *, stream: int | None = None, dl_device: tuple[int, int] | None = None, copy: bool | None = None, **_: Any
    ) -> Any:
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("this memory is shared as it is: no copy is made, and none on another device")
        return dlpack.export(self.pointer, self.shape, self.dtype.name, self.__dlpack_device__(), self._buffer)


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
        if (int(device[0]), int(device[1])) != (dlpack.CUDA, cuda.DEVICE):
            raise TensorError(
                "an input is not in the memory of the GPU",
                found=f"DLPack device {tuple(map(int, device))}",
                wanted=f"{(dlpack.CUDA, cuda.DEVICE)}",
                fix="move it to the GPU, or call infer with numpy arrays",
            )
        try:
            capsule = value.__dlpack__(stream=stream.handle)  # its owner makes it ready for our stream
        except (BufferError, RuntimeError) as error:  # what the array standard and PyTorch raise
            raise TensorError("an input cannot be shared", found=str(error)) from None
        view = dlpack.read(capsule)
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
    if strides is not None and not dlpack.is_contiguous(shape, tuple(strides), kind.itemsize):
        raise TensorError("an input is not contiguous", found=f"strides {tuple(strides)} for the shape {shape}")
    if facts.get("stream") is not None:  # what fills it may still be under way there
        cuda.check(cuda.require().cudaStreamSynchronize(int(facts["stream"])))
    return Borrowed(int(facts["data"][0]), shape, kind.name, owner)
