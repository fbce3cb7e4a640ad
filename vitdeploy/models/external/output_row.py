"""The row of a task among those that recognise what a module returned, and what such rows share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from vitdeploy.spec import Postprocess, Task, TensorSpec

Output = tuple[str, Tensor]


@dataclass(frozen=True)
class OutputRow:
    """How a task's outputs are found in what a module returned.

    find: takes that, and whether the user asked for this task, or the module says that it is made for it; returns the
        outputs by the names of `family.Signature`, [] if it is not of the task. A bare tensor may be of several tasks:
        which have to be asked for.
    wanted: the outputs in words.
    postprocess: what the outputs mean, from the module and their shapes.
    """

    task: Task
    find: Callable[[Any, bool], list[Output]]
    wanted: str
    postprocess: Callable[[nn.Module, Sequence[TensorSpec]], Postprocess | None] = lambda model, outputs: None


def tensors_of(result: Any, *lengths: int) -> Sequence[Tensor]:
    """The tensors of a tuple or list that is made of tensors alone, of one of these lengths; () of all else."""
    several = isinstance(result, tuple | list) and not isinstance(result, Mapping) and len(result) in lengths
    return result if several and all(isinstance(each, Tensor) for each in result) else ()


def field(result: Any, *names: str) -> Tensor | None:
    """The first of these fields of a mapping, such as transformers' outputs, that is a tensor."""
    fields: Mapping[str, Any] = result if isinstance(result, Mapping) else {}
    return next((fields[name] for name in names if isinstance(fields.get(name), Tensor)), None)
