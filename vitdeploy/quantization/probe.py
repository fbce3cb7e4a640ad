"""A float graph whose observed tensors are outputs too, and one run of it on calibration images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from vitdeploy.errors import DataError
from vitdeploy.graph.analysis.rows import find_linears
from vitdeploy.graph.io.files import weights_folder
from vitdeploy.quantization.nonfinite import find_nonfinite
from vitdeploy.quantization.observer import Arrays
from vitdeploy.quantization.ranges import score_tensors
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.spec import PreprocessSpec

Feeds = Mapping[str, npt.NDArray[Any]]
Self = TypeVar("Self", bound="Probe")


class Probe:
    """A graph that gives all `observed` tensors. To be entered before it runs; the graph is not changed.

    Args:
        model: the float graph.
        preprocess: None of a graph that takes no images, to which only feeds can be shown.
        threads: of each run, 0: the runtime's own choice. How a product is cut for them may change its last bits.
        at_once: how many threads may call `run` at a time.
    """

    def __init__(
        self, model: ir.Model, preprocess: PreprocessSpec | None, *, threads: int = 0, at_once: int = 1
    ) -> None:
        self.model, self.preprocess, self.at_once = model, preprocess, at_once
        self.observed = observed_tensors(model)
        data = with_outputs(model, sorted(self.observed))
        self.runner = OnnxRuntimeRunner(
            data, name="calibration", weights=weights_folder(model), threads=threads, streams=at_once
        )

    def __enter__(self: Self) -> Self:
        self.runner.load()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.runner.close()

    def feeds(self, pixels: npt.NDArray[np.uint8]) -> Feeds:
        """What the graph takes of images, uint8 [n, height, width, channels]."""
        assert self.preprocess is not None, "asked of a graph that takes no images"
        tensor = self.runner.inputs[0]
        return {tensor.name: pixels if tensor.dtype == "uint8" else normalise(pixels, self.preprocess)}

    def run(self, feeds: Feeds) -> Arrays:
        """All outputs, and all observed tensors, by name."""
        return self.runner.infer(feeds)

    def not_finite(self, name: str, feeds: Feeds, shown: str, noun: str = "images") -> DataError:
        """The error of a tensor with a value that is not finite. `shown` names the samples, which are a kind of
        `noun`."""
        return DataError(
            f"the model's activations are not finite on the calibration {noun}",
            found=f"{find_nonfinite(self.model, name, feeds)}, on {shown}",
            wanted="finite activations",
            fix="check the checkpoint and the preprocessing, or take this image away"
            if self.preprocess is not None
            else f"check the checkpoint, or leave {shown} out",
        )


@dataclass(frozen=True)
class Observed:
    """A tensor to observe: the axis of its channels, whether weights are rounded by its covariance, and what its
    statistics are called."""

    axis: int
    rounds: bool
    labels: tuple[str, ...]


def observed_tensors(model: ir.Model) -> dict[str, Observed]:
    """The inputs of all linears and convolutions, and the outputs that make scores of attention, by name."""
    tensors: dict[str, Observed] = {}
    for linear in find_linears(model):
        name = str(linear.input.name)
        tensors.setdefault(name, Observed(-1 if linear.kind == "matmul" else 1, True, (name,)))
    for name, label in score_tensors(model).items():
        known = tensors.get(name, Observed(-1, False, ()))
        tensors[name] = replace(known, labels=(*known.labels, label))
    return tensors


def with_outputs(model: ir.Model, names: Sequence[str]) -> bytes:
    """The serialized graph with the named tensors as additional outputs. External data stay where they are."""
    proto = ir.to_proto(model)
    own = {value.name for value in proto.graph.output}
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in own)
    return bytes(proto.SerializeToString())
