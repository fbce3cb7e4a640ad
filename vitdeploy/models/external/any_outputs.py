"""Whatever tensors a module returned, for the task of last resort."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vitdeploy.models.external.output_row import Output, OutputRow
from vitdeploy.spec import TensorSpec, TensorsSpec

# What every runtime has, and numpy too.
DTYPES = (torch.float32, torch.float16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.int8, torch.bool)
INPUT = "image"


def _tensors(result: Any, asked: bool) -> list[Output]:
    """Every tensor, however deep in tuples and mappings; [] where one is of a type that no runtime gives."""
    found = [(name or "output", tensor) for name, tensor in _named(result, "")]
    if not found or any(tensor.dtype not in DTYPES or not tensor.ndim or not tensor.numel() for _, tensor in found):
        return []
    taken: dict[str, Tensor] = {}
    for name, tensor in found:
        free = re.sub(r"\W", "_", name)
        while free in taken or free == INPUT:
            free += "_"
        taken[free] = tensor
    return list(taken.items())


def _named(result: Any, name: str) -> Iterator[Output]:
    if isinstance(result, Tensor):
        yield name, result
    elif isinstance(result, Mapping):
        for key, value in result.items():
            yield from _named(value, f"{name}_{key}" if name else str(key))
    elif isinstance(result, tuple | list):
        for index, value in enumerate(result):
            yield from _named(value, f"{name or 'output'}_{index}")


def name_of(result: Any, tensor: Tensor) -> str:
    """By which name a module returned a tensor; "" of a bare one."""
    return next((name for name, each in _named(result, "") if each is tensor), "")


def names_beside(result: Any, outputs: Sequence[Tensor]) -> tuple[str, ...]:
    """The names of what a module returned beside these, and beside what these are views of."""
    kept = {tensor.untyped_storage().data_ptr() for tensor in outputs}
    return tuple(name for name, each in _named(result, "") if each.untyped_storage().data_ptr() not in kept)


def _exact(model: nn.Module, outputs: Sequence[TensorSpec]) -> TensorsSpec:
    return TensorsSpec(tuple(tensor.name for tensor in outputs if not tensor.dtype.startswith("float")))


ROW = OutputRow("tensors", _tensors, "any tensors [batch, ...] (--task tensors)", _exact)
