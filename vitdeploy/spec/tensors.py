"""Inputs and outputs by name, dtype and shape."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class TensorSpec:
    """Name, numpy dtype name and shape of one input or output; a string in the shape is a dynamic axis."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def with_batch(self, batch: int) -> TensorSpec:
        """The same tensor with its leading axis, if dynamic, set to `batch`."""
        if self.shape and isinstance(self.shape[0], str):
            return dataclasses.replace(self, shape=(batch, *self.shape[1:]))
        return self

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(str(size) for size in self.shape)}]"


def last_axis(outputs: Iterable[TensorSpec], name: str) -> int | None:
    """The size of the last axis of the output `name`; None if there is no such output, or the size is open."""
    size = next((tensor.shape[-1] for tensor in outputs if tensor.name == name), None)
    return size if isinstance(size, int) else None
