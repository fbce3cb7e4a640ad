"""What searches rank by: how far answers are from those of the float graph, on calibration images.

Evaluation images are never used: a choice made on them could not be judged on them.

How many answers of a classifier a quantization changes is estimated, as a smooth number of few images. Counting changed
answers needs thousands of images. But the margins of a few images, and how far the quantization moves logits, predict
how many would change: for the answer a and a runner-up c with the margin m = l_a - l_c and the rounding error e, normal
with deviation s, P(c overtakes a) = Phi(-m / s).
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from scipy.special import softmax
from scipy.stats import norm

from vitdeploy.graph.io.files import save_graph
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import Budget, PreprocessSpec, Task
from vitdeploy.verification.agreement import kl_divergence

RUNNERS_UP = 5

Logits = npt.NDArray[np.floating]
Distances = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Expected:
    """In percent of the images, and in points of top-1."""

    agreement: float
    drop: float

    def meets(self, budget: Budget) -> bool:
        """Whether this is within a budget's bounds on answers, if it has any."""
        agreement, drop = budget.min_agreement, budget.max_drop
        return (agreement is None or self.agreement >= agreement) and (drop is None or self.drop <= drop)


def expected_loss(found: Logits, wanted: Logits, share: float = 1.0) -> Expected:
    """The expected agreement and drop of logits [images, classes] against those of the float model for the same images.

    The drop treats the float model's probabilities p as true: an answer that changes from a to c loses p_a - p_c.
    Errors of the runners-up count as independent, with one deviation for all images.

    Args:
        share: of the power of the errors; below 1, the result if they were smaller.
    """
    if wanted.shape[1] < 2:
        return Expected(100.0, 0.0)
    order = np.argsort(-wanted, axis=1, kind="stable")[:, : RUNNERS_UP + 1]
    error = np.take_along_axis(found.astype(np.float64) - wanted, order, axis=1)
    logits = np.take_along_axis(wanted.astype(np.float64), order, axis=1)
    p = np.take_along_axis(softmax(wanted.astype(np.float64), axis=1), order, axis=1)
    deviation = max(float(np.sqrt(share * np.mean((error[:, :1] - error[:, 1:]) ** 2))), 1e-12)
    changed = norm.cdf((logits[:, 1:] - logits[:, :1]) / deviation)
    kept = np.prod(1 - changed, axis=1)
    drop = np.minimum((changed * (p[:, :1] - p[:, 1:])).sum(axis=1), p[:, 0])
    return Expected(100 * float(kept.mean()), 100 * float(drop.mean()))


@dataclass(frozen=True)
class Reached:
    """A mean distance over the images, and the expected loss of a classifier's answers; None for other tasks."""

    distance: float
    expected: Expected | None


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

    def of_float(self, model: ir.Model) -> dict[str, Array]:
        """The answers of another float graph, on ONNX Runtime."""
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
            file = Path(folder) / "model.onnx"
            save_graph(model, file)
            with OnnxRuntimeRunner(file, name="the changed graph", batch=self.batch) as runner:
                return self.ask(runner)

    def reached(self, answers: Mapping[str, Array]) -> Reached:
        """What answers to all images say of a graph that gives them."""
        return Reached(float(self.distance(answers).mean()), self.expected(answers))

    def distance(self, answers: Mapping[str, Array]) -> Distances:
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


def _relative(found: Array, wanted: Array) -> Distances:
    a, b = (each.reshape(len(each), -1).astype(np.float64) for each in (found, wanted))
    return np.asarray(((a - b) ** 2).sum(axis=1) / np.maximum((b**2).sum(axis=1), 1e-300))
