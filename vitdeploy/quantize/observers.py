"""One streaming pass over the calibration images, on the ONNX graph itself.

The tensors to observe become outputs of the graph; each batch updates fixed-size statistics and is forgotten. Memory
therefore depends on the model and the batch, not on how many images are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import DataError
from vitdeploy.graph.io import weights_folder
from vitdeploy.graph.linears import find_linears
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.spec import PreprocessSpec

BATCH = 4


@dataclass(frozen=True)
class Range:
    """The smallest and largest value that a tensor took."""

    low: float
    high: float


class MinMaxObserver:
    """Running minimum and maximum of one tensor."""

    def __init__(self) -> None:
        self.low, self.high = np.inf, -np.inf

    def update(self, values: npt.NDArray[np.float32]) -> None:
        # numpy's minimum, unlike Python's min, keeps a NaN once there is one.
        self.low = float(np.minimum(self.low, values.min()))
        self.high = float(np.maximum(self.high, values.max()))

    def range(self) -> Range:
        return Range(self.low, self.high)


def observe(
    model: ir.Model,
    batches: Iterable[npt.NDArray[np.uint8]],
    preprocess: PreprocessSpec,
    progress: Callable[[int], None] = lambda images: None,
) -> dict[str, Range]:
    """The range of the input of every linear and convolution, by tensor name, over all batches.

    Args:
        model: the float graph. It is not changed.
        batches: uint8 [n, height, width, channels] each.
        progress: called with the number of images of each batch.

    Raises:
        DataError: a tensor took a value that is not finite.
    """
    names = sorted({str(linear.input.name) for linear in find_linears(model)})
    observers = {name: MinMaxObserver() for name in names}
    observed = _with_outputs(model, names)
    with OnnxRuntimeRunner(observed, name="calibration", weights=weights_folder(model)) as runner:
        tensor = runner.inputs[0]
        for pixels in batches:
            feed = pixels if tensor.dtype == "uint8" else normalise(pixels, preprocess)
            outputs = runner.infer({tensor.name: feed})
            for name, observer in observers.items():
                observer.update(outputs[name])
            progress(len(pixels))
    ranges = {name: observer.range() for name, observer in observers.items()}
    broken = [name for name, found in ranges.items() if not np.isfinite([found.low, found.high]).all()]
    if broken:
        raise DataError(
            "the model's activations are not finite on the calibration images",
            found=", ".join(broken[:5]),
            fix="check the checkpoint and the preprocessing",
        )
    return ranges


def _with_outputs(model: ir.Model, names: Sequence[str]) -> bytes:
    """The serialized graph with the named tensors as outputs, beside its own. External data stay where they are."""
    observed = ir.from_proto(ir.to_proto(model))
    values = {str(v.name): v for node in observed.graph for v in node.outputs}
    values.update({str(v.name): v for v in observed.graph.inputs})
    own = {str(v.name) for v in observed.graph.outputs}
    observed.graph.outputs.extend(values[name] for name in names if name not in own)
    return bytes(ir.to_proto(observed).SerializeToString())
