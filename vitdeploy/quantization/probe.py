"""Run a float graph whose observed tensors are additional outputs on calibration images."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import DataError
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.io.files import runner_of
from vitdeploy.graph.values import array_of, weight_bytes
from vitdeploy.quantization import observer, ranges
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.runtime.runner import Runner
from vitdeploy.spec import PreprocessSpec

Feeds = Mapping[str, npt.NDArray[Any]]
Self = TypeVar("Self", bound="ImageProbe")


class ImageProbe:
    """A runner of `model`, possibly with additional outputs, and the preparation of its inputs from images. Enter it
    before it runs; the graph is not changed. `preprocess`: None for a graph without images, which takes feeds only."""

    def __init__(self, model: ir.Model, preprocess: PreprocessSpec | None, runner: Runner) -> None:
        self.model, self.preprocess, self.runner = model, preprocess, runner

    def __enter__(self: Self) -> Self:
        self.runner.load()
        return self

    def __exit__(self, *_: object) -> None:
        self.runner.close()

    def feeds(self, pixels: npt.NDArray[np.uint8], further: Feeds | None = None) -> Feeds:
        """The inputs of the graph for images, uint8 [n, height, width, channels], with their further inputs, [n, ...]
        by name."""
        assert self.preprocess is not None, "the graph takes no images"
        tensor = self.runner.inputs[0]
        image = pixels if tensor.dtype == "uint8" else normalise(pixels, self.preprocess)
        return {tensor.name: image, **(further or {})}

    def run(self, feeds: Feeds) -> observer.Arrays:
        """All outputs by name."""
        return self.runner.infer(feeds)


class Probe(ImageProbe):
    """A graph whose `observed` tensors are additional outputs.

    Args:
        threads: threads per run, 0 for the runtime's default. Their number may change the last bits of a product.
        at_once: the number of threads that may call `run` concurrently.
        The others are those of `ImageProbe`.
    """

    def __init__(
        self, model: ir.Model, preprocess: PreprocessSpec | None, *, threads: int = 0, at_once: int = 1
    ) -> None:
        self.at_once, self.observed = at_once, observed_tensors(model)
        runner = runner_of(model, "calibration", sorted(self.observed), threads=threads, streams=at_once)
        super().__init__(model, preprocess, runner)

    def not_finite(self, name: str, feeds: Feeds, shown: str, noun: str = "images") -> DataError:
        """The error for a tensor with a non-finite value. `shown` names the samples, `noun` their kind."""
        return DataError(
            f"the model's activations are not finite on the calibration {noun}",
            found=f"{find_nonfinite(self.model, name, feeds)}, on {shown}",
            expected="finite activations",
            fix="check the checkpoint and the preprocessing, or remove this image"
            if self.preprocess is not None
            else f"check the checkpoint, or remove {shown}",
        )


@dataclass(frozen=True)
class Observed:
    """A tensor to observe: the axis of its channels, whether weights are rounded with its covariance, and the names of
    its statistics."""

    axis: int
    rounds: bool
    labels: tuple[str, ...]


def observed_tensors(model: ir.Model) -> dict[str, Observed]:
    """The inputs of all linears and convolutions, and the outputs that attention scores are computed from, by name."""
    tensors: dict[str, Observed] = {}
    for linear in find_linears(model):
        name = str(linear.input.name)
        tensors.setdefault(name, Observed(-1 if linear.kind == "matmul" else 1, True, (name,)))
    for name, label in ranges.score_tensors(model).items():
        known = tensors.get(name, Observed(-1, False, ()))
        tensors[name] = replace(known, labels=(*known.labels, label))
    return tensors


# --- The origin of a non-finite value: the first node, in graph order, that computes one from finite inputs -----------


# The number of nodes whose outputs are held at once.
WINDOW = 16


def find_nonfinite(model: ir.Model, tensor: str, feeds: Mapping[str, npt.NDArray[Any]]) -> str:
    """Describe the origin of the non-finite values of `tensor` on these inputs: a node, or weights.

    Infinities that a node only passes on, such as those of an attention mask, do not count: only a NaN or an infinity
    that none of its inputs has.
    """
    nodes = _before(model, tensor)
    known = {str(value.name): _kinds(array_of(value)) for node in nodes for value in node.inputs if value is not None}
    broken = next((name for name, kinds in known.items() if "NaN" in kinds), None)
    if broken is not None:
        return f"NaN in the weights {broken}"
    known |= {name: _kinds(array) for name, array in feeds.items()}
    for start in range(0, len(nodes), WINDOW):
        window = nodes[start : start + WINDOW]
        names = [str(value.name) for node in window for value in node.outputs if value.name]
        with runner_of(model, "calibration", names) as runner:
            known |= {name: _kinds(array) for name, array in runner.infer(dict(feeds)).items()}
        for node in window:
            given = set().union(*(known.get(str(value.name), set()) for value in node.inputs if value is not None))
            made = set().union(*(known.get(str(value.name), set()) for value in node.outputs)) - given
            if made:
                return f"{' and '.join(sorted(made))} from the node {node.name} ({node.op_type})"
    return f"the tensor {tensor}"


def _before(model: ir.Model, tensor: str) -> list[ir.Node]:
    """The nodes that `tensor` is computed from, in graph order."""
    expected, found = {tensor}, []
    for node in reversed(list(model.graph)):
        if expected & {str(value.name) for value in node.outputs}:
            found.append(node)
            expected |= {str(value.name) for value in node.inputs if value is not None}
    return found[::-1]


def _kinds(array: npt.NDArray[Any] | None) -> set[str]:
    """The kinds of non-finite values in an array."""
    if array is None or not np.issubdtype(array.dtype, np.floating):
        return set()
    infinite = np.isinf(array)
    return ({"infinity"} if infinite.any() else set()) | ({"NaN"} if np.isnan(array).any() else set())


# --- Estimate the memory of a calibration before it starts ------------------------------------------------------------


FLOAT = 4
# Copies of the weights while ONNX Runtime loads them: as read, serialized, in the session, packed for matrix products.
COPIES = 4


@dataclass(frozen=True)
class CalibrationMemory:
    """The bytes that a calibration needs in addition to the process itself, by purpose."""

    graph: int
    activations: int
    covariances: int

    @property
    def total(self) -> int:
        return self.graph + self.activations + self.covariances


def estimate(model: ir.Model, batch: int, images: int) -> CalibrationMemory:
    """The memory for observing images in batches of `batch`. Tensors of unknown shape are not counted."""
    shapes = {str(value.name): _shape(value, batch) for value in model.graph.inputs}
    shapes |= {str(value.name): _shape(value, batch) for node in model.graph for value in node.outputs}
    covariances, observed = 0, 0
    for name, role in observed_tensors(model).items():
        shape = shapes[name]
        observed += math.prod(shape)
        channels = shape[role.axis] if len(shape) > 1 else 0
        rows = math.prod(shape) // max(channels * batch, 1)
        if role.rounds and channels and observer.covariance_pays(max(rows, 1), channels, images):
            covariances += channels**2
    held = {name: math.prod(shape) for name, shape in shapes.items()}
    widest = max(sum(held.get(str(v.name), 0) for v in (*node.inputs, *node.outputs) if v) for node in model.graph)
    # All observed tensors are held at once, and the widest node; every covariance twice at the end, as sum and result.
    return CalibrationMemory(COPIES * weight_bytes(model), FLOAT * (observed + widest), 2 * FLOAT * covariances)


def _shape(value: ir.Value, batch: int) -> tuple[int, ...]:
    """The shape, with the batch for open sizes; (0,) if unknown."""
    if value.shape is None:
        return (0,)
    return tuple(size if isinstance(size, int) else batch for size in value.shape)
