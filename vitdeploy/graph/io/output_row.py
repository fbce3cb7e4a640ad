"""The row of a task among those that recognise a graph's outputs, and what such rows share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from vitdeploy.spec import Postprocess, Task

Values = Mapping[str, ir.Value]
# The task's outputs by its names for them, and what they mean.
Found = tuple[dict[str, ir.Value], Postprocess | None]


@dataclass(frozen=True)
class GraphOutputs:
    """How a task's outputs are found among those of a graph.

    find: takes these, by the task's names where they have known aliases, and whether the user asked for this task;
        returns None if they are not of the task. Some are of several tasks: which have to be asked for.
    wanted: the outputs in words.
    """

    task: Task
    find: Callable[[Values, bool], Found | None]
    wanted: str


def floats(outputs: Values, rank: int | None = None) -> dict[str, ir.Value]:
    """The float32 outputs, of that many axes if given."""
    found = {name: value for name, value in outputs.items() if value.dtype == ir.DataType.FLOAT}
    if rank is None:
        return found
    return {name: value for name, value in found.items() if value.shape is not None and len(value.shape) == rank}
