"""Outputs of no task that vitdeploy knows: numbers with their names, and how far two of them lie apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.task import COSINE, Outputs, Reading, RuntimeTask, cosine
from vitdeploy.spec import Task, TensorsSpec

Array = npt.NDArray[Any]

# Numbers of one output that `to_dict` has whole; of more it has what describes them.
WHOLE = 1024
# Of elements that are no floats, the share that is equal where two models agree, coarsely.
EQUAL_SHARE = 0.9


@dataclass(frozen=True, eq=False, repr=False)
class Tensors:
    """The answer for one image: every output as the engine gives it, without the batch axis, by name."""

    outputs: Mapping[str, Array]

    def to_dict(self) -> dict[str, Any]:
        """What describes each output, and its numbers where they are at most WHOLE."""
        return {"outputs": {name: _described(array) for name, array in self.outputs.items()}}

    def __str__(self) -> str:
        """One output per line."""
        return "\n".join(f"{name} {line_of(array)}" for name, array in self.outputs.items())

    def __repr__(self) -> str:
        return f"<Tensors: {', '.join(f'{name} {list(each.shape)}' for name, each in self.outputs.items())}>"


def line_of(array: Array) -> str:
    """dtype, shape and range of an array."""
    if not array.size:
        return f"{array.dtype}{list(array.shape)}, empty"
    low, high, mean = float(array.min()), float(array.max()), float(array.astype(np.float64).mean())
    return f"{array.dtype}{list(array.shape)} from {low:.4g} to {high:.4g}, mean {mean:.4g}"


def _described(array: Array) -> dict[str, Any]:
    found: dict[str, Any] = {"dtype": str(array.dtype), "shape": list(array.shape)}
    if array.size:
        numbers = array.astype(np.float64)
        described = (("min", numbers.min()), ("max", numbers.max()), ("mean", numbers.mean()), ("std", numbers.std()))
        found |= {name: float(value) for name, value in described}
    if array.size <= WHOLE:
        found["values"] = array.tolist()
    return found


def signal_to_noise(ours: Array, theirs: Array) -> float:
    """10 log10 of sum(b^2) / sum((a - b)^2) in decibels, b theirs; infinite where they are equal, and minus infinity
    where theirs is zero everywhere and ours is not."""
    a, b = ours.astype(np.float64), theirs.astype(np.float64)
    noise, signal = float(np.square(a - b).sum()), float(np.square(b).sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def equal_share(ours: Array, theirs: Array) -> float:
    """The share of equal elements, 0..1; 1 of no elements."""
    return float((ours == theirs).mean()) if theirs.size else 1.0


def last_resort(others: Sequence[Task]) -> str:
    """What a user is told where the outputs are of no task, and which tasks would take them if asked."""
    told = "the outputs are of no task that vitdeploy knows: they are compared as numbers (the task tensors)"
    if not others:
        return f"{told}; a task of its own would add answers in words, labels and a metric"
    named = " or ".join(f"--task {task}" for task in others)
    return f"{told}; {named} would read them, and adds answers in words, labels and a metric"


def _answer(outputs: Outputs, reading: Reading) -> Tensors:
    return Tensors(outputs)


def _same(ours: Outputs, theirs: Outputs, reading: Reading) -> bool:
    assert isinstance(reading.postprocess, TensorsSpec), "a manifest without it is refused when it is read"
    floats = reading.postprocess.comparable(theirs)
    exact = [name for name in theirs if name not in floats]
    alike = all(cosine(ours[name], theirs[name]) >= COSINE or not np.any(theirs[name]) for name in floats)
    return alike and all(equal_share(ours[name], theirs[name]) >= EQUAL_SHARE for name in exact)


TENSORS = RuntimeTask(_answer, _same)
