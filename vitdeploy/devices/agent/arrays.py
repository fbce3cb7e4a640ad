"""Arrays behind a line that lists them."""

from __future__ import annotations

import math
from typing import BinaryIO

import numpy as np

from vitdeploy.devices.agent.stream import BLOCK, BrokenOff
from vitdeploy.runtime.runner import Array
from vitdeploy.spec import TensorSpec


def read_array(stream: BinaryIO, tensor: TensorSpec) -> Array:
    """The next array of a stream: little-endian bytes in C order.

    Raises:
        BrokenOff: there are fewer bytes.
    """
    shape = tuple(size for size in tensor.shape if isinstance(size, int))
    dtype = np.dtype(tensor.dtype)
    data = bytearray(math.prod(shape) * dtype.itemsize)
    view, done = memoryview(data), 0
    while done < len(data):
        count = stream.readinto(view[done : done + BLOCK])  # type: ignore[attr-defined]
        if not count:
            raise BrokenOff(f"broken off in {tensor.name}")
        done += count
    return np.frombuffer(data, dtype).reshape(shape)
