"""Find batch sizes at which an ONNX file is one function: an image's outputs do not depend on the other images.

A file may leave its batch open and still contain sizes of the batch that it was traced with, or mix data of different
images. Such a file is right only at some batch sizes, mostly at one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vitdeploy.errors import EngineError, ExportError, TensorError
from vitdeploy.exporter.parity import BATCHES, SEED, TOLERANCE, refuse_two_answers, worst_difference
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import PreprocessSpec

# Asked one after the other where the file is not one function at all sizes.
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 16, 32)

Answers = Mapping[str, Array]


@dataclass(frozen=True)
class OneFunction:
    """`sizes` are the batch sizes at which the file is one function, () if it is at all that were tried; `why` says
    what happens at the first other one."""

    sizes: tuple[int, ...]
    why: str = ""


def one_function(runner: Runner, preprocess: PreprocessSpec) -> OneFunction:
    """Compare the outputs of a loaded runner with an open batch for seeded random images, alone and among others.

    Raises:
        ExportError: it gives different outputs for the same image, or runs at no size.
    """
    images = _images(preprocess, max(SIZES))
    asker = _Asker(runner, images if runner.inputs[0].dtype == "uint8" else normalise(images, preprocess))
    again = asker.together([0])
    if not isinstance(again, str) and not isinstance(first := asker.alone(0), str):
        refuse_two_answers(again, first)
    wrong = next(((size, what) for size in BATCHES if (what := asker.trouble(size))), None)
    if wrong is None:
        return OneFunction(())
    why = f"at batch {wrong[0]} it {wrong[1]}"
    sizes = tuple(size for size in SIZES if not asker.trouble(size))
    if not sizes:
        raise ExportError(
            "the ONNX file runs at no batch size",
            found=why,
            wanted=f"one of {', '.join(map(str, SIZES))}",
            fix="export the model again with a fixed batch of 1",
        )
    return OneFunction(sizes, why)


class _Asker:
    """Asks a runner about the images `feed`, by their numbers; an answer in words says why it does not run."""

    def __init__(self, runner: Runner, feed: Array) -> None:
        self._runner, self._feed = runner, feed
        self._alone: dict[int, Answers | str] = {}

    def together(self, numbers: Sequence[int]) -> Answers | str:
        try:
            return self._runner.infer({self._runner.inputs[0].name: self._feed[list(numbers)]})
        except (EngineError, TensorError) as error:
            return error.found

    def alone(self, number: int) -> Answers | str:
        if number not in self._alone:
            self._alone[number] = self.together([number])
        return self._alone[number]

    def trouble(self, size: int) -> str:
        """The problem at a size; "" without one. Checks the first and the last image."""
        numbers = list(range(size))
        found = self.together(numbers)
        if isinstance(found, str):
            return f"does not run ({found})"
        if any(len(array) != size for array in found.values()):
            return f"gives {', '.join(f'{name} {list(array.shape)}' for name, array in found.items())}"
        # Where it does not run at 1: the same images in another order.
        turned = self.together(numbers[::-1]) if isinstance(self.alone(0), str) else None
        for row in sorted({0, size - 1}):
            other, at = (self.alone(row), 0) if turned is None else (turned, size - 1 - row)
            if isinstance(other, str):
                return f"does not run ({other})"
            theirs = {name: array[at : at + 1] for name, array in other.items()}
            mine = {name: array[row : row + 1] for name, array in found.items()}
            if any(mine[name].shape != theirs[name].shape for name in mine):
                return "says of an image what it does not say of it alone"
            apart = worst_difference(mine, theirs)
            if not apart <= TOLERANCE:
                return f"says of an image what it does not say of it alone (max|a-b| / max|b| = {apart:.1e})"
        return ""


def _images(preprocess: PreprocessSpec, count: int) -> np.ndarray:
    generator = np.random.default_rng(SEED)
    height, width = preprocess.crop
    return generator.integers(0, 256, (count, height, width, preprocess.channels), dtype=np.uint8)
