"""Generic tensors: named outputs without a known task, compared as numbers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from vitdeploy.runtime import postprocess, runner
from vitdeploy.runtime.tasks.task import COSINE, DeviceTask, OutputReading, Outputs
from vitdeploy.spec import OutputSpec


@dataclass(frozen=True)
class TensorsSpec(OutputSpec):
    """Outputs without a known task. `exact`: outputs that are not floats (indices, counts, boolean masks), which are
    compared for equality, not by distance."""

    exact: tuple[str, ...] = ()

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Return the outputs that can be compared element by element."""
        return [name for name in outputs if name not in self.exact]


# Largest output that `to_dict` includes completely; for larger ones only statistics.
WHOLE = 1024
# Two models agree roughly if at least this share of non-float elements is equal.
EQUAL_SHARE = 0.9


@dataclass(frozen=True, eq=False, repr=False)
class Tensors:
    """The answer for one image: `outputs` of the engine, without the batch axis, by name."""

    outputs: Mapping[str, runner.Array]

    def to_dict(self) -> dict[str, Any]:
        """Return statistics of each output, and its values if there are at most WHOLE."""
        return {"outputs": {name: _described(array) for name, array in self.outputs.items()}}

    def __str__(self) -> str:
        """One output per line."""
        return "\n".join(f"{name} {line_of(array)}" for name, array in self.outputs.items())

    def __repr__(self) -> str:
        return f"<Tensors: {', '.join(f'{name} {list(each.shape)}' for name, each in self.outputs.items())}>"


def line_of(array: runner.Array) -> str:
    """Return a line with dtype, shape and range of an array."""
    if not array.size:
        return f"{array.dtype}{list(array.shape)}, empty"
    low, high, mean = float(array.min()), float(array.max()), float(array.astype(np.float64).mean())
    return f"{array.dtype}{list(array.shape)} from {low:.4g} to {high:.4g}, mean {mean:.4g}"


def _described(array: runner.Array) -> dict[str, Any]:
    found: dict[str, Any] = {"dtype": str(array.dtype), "shape": list(array.shape)}
    if array.size:
        numbers = array.astype(np.float64)
        described = (("min", numbers.min()), ("max", numbers.max()), ("mean", numbers.mean()), ("std", numbers.std()))
        found |= {name: float(value) for name, value in described}
    if array.size <= WHOLE:
        found["values"] = array.tolist()
    return found


def _answer(outputs: Outputs, reading: OutputReading) -> Tensors:
    return Tensors(outputs)


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    floats = reading.head(TensorsSpec).comparable(theirs)
    exact = [name for name in theirs if name not in floats]
    alike = all(postprocess.cosine(ours[name], theirs[name]) >= COSINE or not np.any(theirs[name]) for name in floats)
    return alike and all(postprocess.equal_share(ours[name], theirs[name]) >= EQUAL_SHARE for name in exact)


TENSORS = DeviceTask(_answer, _same, postprocess=TensorsSpec)
