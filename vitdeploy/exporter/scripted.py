"""Modules as they run: scripts, and lengths as sizes."""

from __future__ import annotations

import builtins
import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

# --- Parts of a model that are TorchScript: `torch.export` runs them, and records the operations that they run --------


class _Run(nn.Module):
    """A scripted module, run by its interpreter. Not registered as a child: `torch.export` makes proxies of children,
    in which a scripted `forward` is given itself twice. Its weights become constants of the graph."""

    def __init__(self, scripted: torch.jit.ScriptModule) -> None:
        super().__init__()
        self._hidden = (scripted,)

    def forward(self, *arguments: Any, **options: Any) -> Any:
        # With gradients, a scripted encoder layer does not take its fused way, which is no operator of ONNX.
        with torch.enable_grad():
            return self._hidden[0]._c._get_method("forward")(*arguments, **options)


@contextlib.contextmanager
def scripts_as_they_run(model: nn.Module) -> Iterator[None]:
    """Inside, scripted parts of `model` can be exported. Sizes that a script reads of a tensor are numbers to it.

    The interpreter's profiles are off: they take every size that a tensor has for the only one.
    """
    replaced = list(_replace(model))
    profiling, optimized = torch._C._jit_set_profiling_executor(False), torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(optimized)
        torch._C._jit_set_profiling_executor(profiling)
        for parent, name, scripted in replaced:
            parent._modules[name] = scripted


def _replace(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for name, child in list(model._modules.items()):
        if isinstance(child, torch.jit.ScriptModule):
            model._modules[name] = _Run(child)
            yield model, name, child
        elif child is not None:
            yield from _replace(child)


# --- `len(tensor)` in a module's own code, which Python makes a number of: inside, it is the tensor's first size ------


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
