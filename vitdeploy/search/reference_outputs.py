"""The distance of a graph's answers from those of the float graph on calibration images: every search ranks by it.

Evaluation images are never used: a choice made on them could not be judged on them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.search.expected import Expected, expected_loss
from vitdeploy.spec import PreprocessSpec, Task
from vitdeploy.verification.agreement import kl_divergence


class ReferenceOutputs:
    """Some images, the float graph's answers to them, and the distance of other answers from these."""

    def __init__(
        self, runner: Runner, pixels: npt.NDArray[np.uint8], preprocess: PreprocessSpec, task: Task, *, batch: int
    ) -> None:
        """Run the float graph.

        Args:
            runner: of the float graph, loaded, at any batch or at `batch`.
            pixels: uint8 [images, height, width, channels], held in memory.
            batch: how many images run at a time.
        """
        self.pixels, self.preprocess, self.task, self.batch = pixels, preprocess, task, batch
        self.answers = self.ask(runner)

    def first(self, count: int) -> ReferenceOutputs:
        """The reference outputs of the first images only."""
        some = copy.copy(self)
        some.pixels = self.pixels[:count]
        some.answers = {name: answers[:count] for name, answers in self.answers.items()}
        return some

    def ask(self, runner: Runner) -> dict[str, Array]:
        """The outputs of a loaded runner for all images by name, [images, ...] each."""
        found: dict[str, list[Array]] = {}
        for outputs in self.stream(runner):
            for name, output in outputs.items():
                found.setdefault(name, []).append(output)
        return {name: np.concatenate(parts) for name, parts in found.items()}

    def stream(self, runner: Runner) -> Iterator[dict[str, Array]]:
        """As `ask`, but a batch at a time, [n, ...] each: for outputs that are too large to hold for all images."""
        [tensor] = runner.inputs
        for start in range(0, len(self.pixels), self.batch):
            # An engine may be pinned to its batch: the last one is padded with earlier images.
            chosen = np.arange(start, start + self.batch) % len(self.pixels)
            pixels = self.pixels[chosen]
            feed = pixels if tensor.dtype == "uint8" else normalise(pixels, self.preprocess)
            outputs = runner.infer({tensor.name: feed})
            yield {name: output[: len(self.pixels) - start] for name, output in outputs.items()}

    def distance(self, answers: Mapping[str, Array]) -> npt.NDArray[np.float64]:
        """The distance per image, [images]: KL(float || other) of the softmax in nats for a classifier.

        For any other task, the squared error of each float output over its power, mean over the outputs.
        """
        if self.task == "classification":
            [name] = self.answers
            return kl_divergence(self.answers[name].astype(np.float64), answers[name].astype(np.float64))
        errors = [_relative(answers[name], wanted) for name, wanted in self.answers.items() if wanted.dtype.kind == "f"]
        return np.asarray(np.mean(errors, axis=0))

    def expected(self, answers: Mapping[str, Array], share: float = 1.0) -> Expected | None:
        """The expected loss of a classifier's answers (see `expected_loss`); None for any other task."""
        if self.task != "classification":
            return None
        [(name, wanted)] = self.answers.items()
        return expected_loss(answers[name], wanted, share)


def _relative(found: Array, wanted: Array) -> npt.NDArray[np.float64]:
    a, b = (each.reshape(len(each), -1).astype(np.float64) for each in (found, wanted))
    return np.asarray(((a - b) ** 2).sum(axis=1) / np.maximum((b**2).sum(axis=1), 1e-300))
