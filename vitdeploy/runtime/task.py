"""What a task is at run time: a row of functions that read a model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.runner import Runner
from vitdeploy.runtime.topdown import Box
from vitdeploy.spec import Postprocess, PreprocessSpec

Outputs = Mapping[str, npt.NDArray[Any]]
COSINE = 0.9


class Result(Protocol):
    """The answer for one image: values for programs, lines for people."""

    def to_dict(self) -> dict[str, Any]: ...


@dataclass(frozen=True)
class Reading:
    """How the outputs of one image are read. `size`: (width, height) of the original image, upright; `labels`: one name
    per class, or None; `top`: how many classes of a classifier; `box`: the part of the image that a top-down model was
    given, None for all of it."""

    size: tuple[int, int]
    preprocess: PreprocessSpec
    postprocess: Postprocess | None = None
    labels: Sequence[str] | None = None
    top: int = 5
    box: Box | None = None


@dataclass(frozen=True)
class RuntimeTask:
    """A task's row. Outputs are those of one sample, by name, without the batch axis.

    answer: the result that they mean.
    same: whether two models' outputs for a sample mean about the same. It is coarse: it tells a wrong engine from one
        that rounds.
    bind: a runner of images alone, of one with further inputs whose values are given; None where an image is the only
        input.
    """

    answer: Callable[[Outputs, Reading], Result]
    same: Callable[[Outputs, Outputs, Reading], bool]
    bind: Callable[[Runner, Outputs, Postprocess | None], Runner] | None = None


def cosine(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> float:
    """The cosine of the angle between two arrays, taken as vectors; in float64."""
    a, b = a.astype(np.float64).ravel(), b.astype(np.float64).ravel()
    return float(a @ b / max(np.linalg.norm(a) * np.linalg.norm(b), 1e-300))
