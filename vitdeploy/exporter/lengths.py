"""`len(tensor)` in a module's own code, which Python makes a number of: inside, it is the tensor's first size."""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def _length(value: Any) -> Any:
    return value.shape[0] if isinstance(value, Tensor) and value.ndim else builtins.len(value)


@contextlib.contextmanager
def lengths_as_sizes(model: nn.Module) -> Iterator[None]:
    """Inside, `len` of a tensor is `shape[0]` in the files that define the classes of `model` and of its parts.

    `torch.export` would otherwise take the length of the example's batch for the only one: Python's `len` returns an
    `int`, never a free size.
    """
    files = {base.__module__ for part in model.modules() for base in type(part).__mro__}
    spaces = [vars(sys.modules[name]) for name in sorted(files) if name in sys.modules and not _of_torch(name)]
    spaces = [space for space in spaces if "len" not in space]
    for space in spaces:
        space["len"] = _length
    try:
        yield
    finally:
        for space in spaces:
            del space["len"]


def _of_torch(name: str) -> bool:
    return name.partition(".")[0] in ("builtins", "torch", "vitdeploy")
