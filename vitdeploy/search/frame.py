"""The parts shared by all searches: the distance of answers from those of the float graph, and the choice of the best.

The candidates and their costs are in the file of each search: `rows`, `precision`, `pruning`.
"""

from __future__ import annotations

import copy
import datetime
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from scipy import stats
from scipy.special import softmax
from scipy.stats import norm

from vitdeploy.compilation.engine import compile_engine
from vitdeploy.graph.analysis.rows import count_int8
from vitdeploy.graph.io.files import runner_of, save_graph
from vitdeploy.progress import Progress
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.spec import Budget, EngineSpec, FloatRest, Precision, PreprocessSpec, Task
from vitdeploy.verification.agreement import kl_divergence

T = TypeVar("T")


# --- The ranking criterion of searches: the distance from the float graph's answers, on calibration images -----------
# Evaluation images are never used: a choice made on them could not be evaluated on them.
#
# The number of a classifier's answers that a quantization changes is estimated, as a smooth function of few images.
# Counting changed answers needs thousands of images. But the margins of a few images and the logit errors predict how
# many would change: for the answer a and a runner-up c with the margin m = l_a - l_c and the rounding error e, normal
# with deviation s, P(c overtakes a) = Phi(-m / s).


RUNNERS_UP = 5

Logits = npt.NDArray[np.floating]
Distances = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Expected:
    """The expected agreement in percent of the images, and the expected drop in points of top-1."""

    agreement: float
    drop: float

    def meets(self, budget: Budget) -> bool:
        """Whether this is within a budget's bounds on answers, if it has any."""
        agreement, drop = budget.min_agreement, budget.max_drop
        return (agreement is None or self.agreement >= agreement) and (drop is None or self.drop <= drop)


def expected_loss(found: Logits, expected: Logits, share: float = 1.0) -> Expected:
    """The expected agreement and drop of logits [images, classes] against those of the float model for the same images.

    The drop treats the float model's probabilities p as true: an answer that changes from a to c loses p_a - p_c.
    Errors of the runners-up count as independent, with one deviation for all images.

    Args:
        share: a factor of the power of the errors; below 1, the result for smaller errors.
    """
    if expected.shape[1] < 2:
        return Expected(100.0, 0.0)
    order = np.argsort(-expected, axis=1, kind="stable")[:, : RUNNERS_UP + 1]
    error = np.take_along_axis(found.astype(np.float64) - expected, order, axis=1)
    logits = np.take_along_axis(expected.astype(np.float64), order, axis=1)
    p = np.take_along_axis(softmax(expected.astype(np.float64), axis=1), order, axis=1)
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
    """Images, the float graph's answers to them, and the distance of other answers from these."""

    def __init__(
        self, runner: Runner, pixels: npt.NDArray[np.uint8], preprocess: PreprocessSpec, task: Task, *, batch: int
    ) -> None:
        """Run the float graph.

        Args:
            runner: a loaded runner of the float graph, at any batch or at `batch`.
            pixels: uint8 [images, height, width, channels], held in memory.
            batch: the number of images per run.
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
        """As `ask`, but batch by batch, [n, ...] each: for outputs that are too large to hold for all images."""
        [tensor] = runner.inputs
        for start, feed in self.feeds(tensor.dtype):
            outputs = runner.infer({tensor.name: feed})
            yield {name: output[: len(self.pixels) - start] for name, output in outputs.items()}

    def feeds(self, dtype: str, batch: int | None = None) -> Iterator[tuple[int, Array]]:
        """The images as inputs of a graph, in batches, each with the number of its first image."""
        batch = batch or self.batch
        for start in range(0, len(self.pixels), batch):
            # An engine may have a fixed batch: the last one is padded with earlier images.
            pixels = self.pixels[np.arange(start, start + batch) % len(self.pixels)]
            yield start, pixels if dtype == "uint8" else normalise(pixels, self.preprocess)

    def of_float(self, model: ir.Model) -> dict[str, Array]:
        """The answers of another float graph, on ONNX Runtime."""
        with runner_of(model, "the changed graph", batch=self.batch) as runner:
            return self.ask(runner)

    def reached(self, answers: Mapping[str, Array]) -> Reached:
        """The mean distance and expected loss of answers to all images."""
        return Reached(float(self.distance(answers).mean()), self.expected(answers))

    def distance(self, answers: Mapping[str, Array]) -> Distances:
        """The distance per image, [images]: KL(float || other) of the softmax in nats for a classifier.

        For any other task, the squared error of each float output over its power, mean over the outputs.
        """
        if self.task == "classification":
            [name] = self.answers
            return kl_divergence(self.answers[name].astype(np.float64), answers[name].astype(np.float64))
        errors = [
            _relative(answers[name], expected) for name, expected in self.answers.items() if expected.dtype.kind == "f"
        ]
        return np.asarray(np.mean(errors, axis=0))

    def expected(self, answers: Mapping[str, Array], share: float = 1.0) -> Expected | None:
        """The expected loss of a classifier's answers (see `expected_loss`); None for any other task."""
        if self.task != "classification":
            return None
        [(name, expected)] = self.answers.items()
        return expected_loss(answers[name], expected, share)


def _relative(found: Array, expected: Array) -> Distances:
    a, b = (each.reshape(len(each), -1).astype(np.float64) for each in (found, expected))
    return np.asarray(((a - b) ** 2).sum(axis=1) / np.maximum((b**2).sum(axis=1), 1e-300))


# --- Measure answers --------------------------------------------------------------------------------------------------


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def answers_of(
    model: ir.Model,
    target: str,
    precision: Precision,
    reference_outputs: ReferenceOutputs,
    float_rest: FloatRest = "fp32",
) -> dict[str, Array]:
    """The outputs of a placement on its own runtime, [images, ...] by name.

    Raises:
        EngineError, CapabilityError: as `compilation.engine.compile_engine`.
    """
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        graph, out = Path(folder) / "model.onnx", Path(folder) / "engine"
        save_graph(model, graph)
        engine = engine_of(model, graph, out, target, precision, reference_outputs.batch, float_rest)
        with make_runner(out, engine) as runner:
            return reference_outputs.ask(runner)


def engine_of(
    model: ir.Model, graph: Path, out: Path, target: str, precision: Precision, batch: int, float_rest: FloatRest
) -> EngineSpec:
    """Compile a placed model, stored in the file `graph`, into the new folder `out`."""
    out.mkdir()
    placed = count_int8(model)
    return compile_engine(
        graph, out, target=target, precision=precision, batch=batch, placed=placed, float_rest=float_rest
    )


# --- Decide -----------------------------------------------------------------------------------------------------------


def undominated(items: Sequence[T], distance: Callable[[T], float], faster: Callable[[T, T], bool]) -> list[T]:
    """The items for which no other item with at most their `distance` is provably `faster`, in ascending order of
    distance: a Pareto front for noisy times."""
    order = sorted(items, key=distance)
    return [
        item
        for item in order
        if not any(other is not item and distance(other) <= distance(item) and faster(other, item) for other in order)
    ]


def pareto_front(items: Sequence[T], measures: Callable[[T], tuple[float, float]]) -> list[T]:
    """The items that no other matches or beats in both measures, in ascending order of the first.

    Args:
        measures: the two measures of an item; less is better. Among items equal in both, the first is kept.
    """
    front: list[T] = []
    for item in sorted(items, key=measures):
        if not front or measures(item)[1] < measures(front[-1])[1]:
            front.append(item)
    return front


def counted(items: Sequence[T], text: str, progress: Progress) -> Iterator[T]:
    """Yield the items and report to `progress` how many are done."""
    for done, item in enumerate(items):
        progress(text, done, len(items))
        yield item
    progress(text, len(items), len(items))


def mean_interval(values: npt.NDArray[np.floating]) -> tuple[float, float, float]:
    """The mean of some values with its 95 % t-interval. For a single value, whose interval is unbounded, both bounds
    are the mean."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, mean, mean
    reach = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / len(values) ** 0.5)
    return mean, mean - reach, mean + reach
