"""One streaming pass over the calibration images, or whatever else a graph takes, on the ONNX graph itself.

The tensors to observe become outputs of the graph; each batch updates fixed-size statistics and is forgotten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir

from vitdeploy.errors import DataError
from vitdeploy.graph.analysis.linears import find_linears
from vitdeploy.graph.io.files import weights_folder
from vitdeploy.quantization.image_checks import ImageChecks
from vitdeploy.quantization.nonfinite import find_nonfinite
from vitdeploy.quantization.observer import MOMENT_IMAGES, Arrays, Observer, covariance_pays
from vitdeploy.quantization.scores import score_tensors
from vitdeploy.quantization.statistics import Statistics
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.spec import PreprocessSpec

# One image at a time: larger batches are no faster for models that take long, and need more memory.
BATCH = 1
# An image stands out where it makes this share of all ranges this much wider than all others do. Of 8 to 64 photographs
# none reaches a share of 0.05, on ViT-Tiny and DETR; noise has 0.42 on DETR (normalisations keep it at 0.04 on a ViT).
STRETCH, SHARE = 1.25, 0.25
CHECKS = "|checks"


class Observation:
    """The statistics of all `observed_tensors` of a graph, while images are shown to it, or feeds of any kind.

    To be entered before `update` or `show`. The graph is not changed.

    Args:
        model: the float graph.
        preprocess: None of a graph that takes no images, to which only feeds can be shown.
        total: how many images will be shown, where that is known: without, more may be kept than can be used.
    """

    def __init__(self, model: ir.Model, preprocess: PreprocessSpec | None, total: int | None = None) -> None:
        self.model, self.preprocess, self.total = model, preprocess, total
        self.images = self.batches = 0
        self.checks = ImageChecks(preprocess) if preprocess is not None else None
        self.observers: dict[str, Observer] = {}
        self._observed = observed_tensors(model)
        data = with_outputs(model, sorted(self._observed))
        self.runner = OnnxRuntimeRunner(data, name="calibration", weights=weights_folder(model))

    def __enter__(self) -> Observation:
        self.runner.load()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.runner.close()

    def update(self, pixels: npt.NDArray[np.uint8], names: Sequence[str] = ()) -> None:
        """Show one batch, uint8 [n, height, width, channels]. `names` are those of its images, for errors.

        Raises:
            DataError: a tensor took a value that is not finite; names the node where it arose, and the images.
        """
        assert self.preprocess is not None
        assert self.checks is not None
        tensor, first = self.runner.inputs[0], self.images + 1
        feed = {tensor.name: pixels if tensor.dtype == "uint8" else normalise(pixels, self.preprocess)}
        last = f" to {self.images + len(pixels)}" * (len(pixels) > 1)
        self.show(feed, ", ".join(names) or f"image {first}{last}")
        self.checks.update(pixels)

    def show(self, feeds: Mapping[str, npt.NDArray[Any]], shown: str, noun: str = "images") -> Arrays:
        """Show what the graph takes in one run, and return what it gives. `shown` names the samples, which are a kind
        of `noun`, for errors, as of `update`."""
        count = len(next(iter(feeds.values())))
        outputs = self.runner.infer(feeds)
        for name, role in self._observed.items():
            values = outputs[name]
            if name not in self.observers:
                channels = values.shape[role.axis]
                rows = values.size // channels // count or 1
                pays = role.rounds and covariance_pays(rows, channels, self.total)
                self.observers[name] = Observer(role.axis, covariance=pays)
            observer = self.observers[name]
            observer.update(values, self.batches, moments=self.images < MOMENT_IMAGES)
            if not observer.finite:
                raise DataError(
                    f"the model's activations are not finite on the calibration {noun}",
                    found=f"{find_nonfinite(self.model, name, feeds)}, on {shown}",
                    wanted="finite activations",
                    fix="check the checkpoint and the preprocessing, or take this image away"
                    if self.preprocess is not None
                    else f"check the checkpoint, or leave {shown} out",
                )
        self.images += count
        self.batches += 1
        return outputs

    def statistics(self) -> dict[str, Statistics]:
        """Statistics by tensor name; for outputs by the name that `scores.output_of` gives."""
        found = {name: observer.statistics() for name, observer in sorted(self.observers.items())}
        return {label: each for name, each in found.items() for label in self._observed[name].labels}

    def standing_out(self) -> dict[int, float]:
        """The batches that stand out, by number, and how many times as wide each makes these ranges, in the median."""
        found = {}
        for batch in {int(number) for observer in self.observers.values() for number in observer.holder}:
            stretches = [observer.stretch(batch) for observer in self.observers.values()]
            stretched = [each for each in stretches if each >= STRETCH]
            if len(stretched) >= SHARE * len(stretches):
                found[batch] = float(np.median(stretched))
        return found

    def state(self) -> Arrays:
        """Everything that `restore` needs to go on."""
        parts = {name: observer.state() for name, observer in self.observers.items()}
        parts[""] = {"images": np.array(self.images), "batches": np.array(self.batches)}
        if self.checks is not None:
            parts[CHECKS] = self.checks.state()
        return {f"{name}|{key}": array for name, part in parts.items() for key, array in part.items()}

    def restore(self, arrays: Arrays) -> None:
        """Go on where the observation stood that gave this state, of the same graph and images."""
        states: dict[str, Arrays] = {}
        for key, array in arrays.items():
            name, _, field = key.rpartition("|")
            states.setdefault(name, {})[field] = array
        counts = states.pop("")
        if self.checks is not None:
            self.checks.restore(states.pop(CHECKS))
        self.images, self.batches = int(counts["images"]), int(counts["batches"])
        self.observers = {name: Observer.restore(self._observed[name].axis, state) for name, state in states.items()}


def observe(
    model: ir.Model,
    batches: Iterable[npt.NDArray[np.uint8]],
    preprocess: PreprocessSpec,
    progress: Callable[[int], None] = lambda images: None,
) -> dict[str, Statistics]:
    """Statistics of the input of every linear and convolution, and of queries and keys that have a linear each, over
    all batches; by tensor name, and for outputs as `scores.output_of` says.

    Args:
        model: the float graph. It is not changed.
        batches: uint8 [n, height, width, channels] each.
        progress: called with the number of images of each batch.

    Raises:
        DataError: a tensor took a value that is not finite.
    """
    with Observation(model, preprocess) as observation:
        for pixels in batches:
            observation.update(pixels)
            progress(len(pixels))
        return observation.statistics()


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
