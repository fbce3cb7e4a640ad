"""One streaming pass over the calibration images, on the ONNX graph itself.

The tensors to observe become outputs of the graph; each batch updates fixed-size statistics and is forgotten. Memory
therefore depends on the model and the batch, not on how many images are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import DataError
from vitdeploy.graph.io import weights_folder
from vitdeploy.graph.linears import find_linears
from vitdeploy.quantize.scores import score_tensors
from vitdeploy.quantize.statistics import Statistics
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.spec import PreprocessSpec

BATCH = 4
# Second moments converge fast and cost most: all rows of this many images, and of all where one has few rows.
MOMENT_IMAGES, FEW_ROWS = 32, 4096


class Observer:
    """Running bounds and moments of one tensor by its channels along `axis`."""

    def __init__(self, axis: int) -> None:
        self.axis, self.rows = axis, 0
        self.low: npt.NDArray[np.float32] | None = None
        self.high: npt.NDArray[np.float32] | None = None
        self.total: npt.NDArray[np.float64] = np.zeros(0)
        self.products: npt.NDArray[np.float64] = np.zeros(0)

    def update(self, values: npt.NDArray[np.float32], *, moments: bool = True) -> None:
        """One batch; its bounds only where `moments` is False and there are rows enough."""
        rows = np.moveaxis(values, self.axis, -1).reshape(-1, values.shape[self.axis])
        low, high = rows.min(axis=0), rows.max(axis=0)
        # numpy's minimum, unlike Python's min, keeps a NaN once there is one.
        self.low = low if self.low is None else np.minimum(self.low, low)
        self.high = high if self.high is None else np.maximum(self.high, high)
        if moments or self.rows < FEW_ROWS:
            total, products = rows.sum(axis=0, dtype=np.float64), (rows.T @ rows).astype(np.float64)
            self.total, self.products = (
                (self.total + total, self.products + products) if self.rows else (total, products)
            )
            self.rows += len(rows)

    def statistics(self) -> Statistics:
        assert self.low is not None and self.high is not None
        mean = self.total / self.rows
        covariance = self.products / self.rows - np.outer(mean, mean)
        return Statistics(self.low.astype(np.float64), self.high.astype(np.float64), mean, covariance, self.rows)


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
    observers: dict[str, Observer] = {}
    for linear in find_linears(model):
        observers.setdefault(str(linear.input.name), Observer(-1 if linear.kind == "matmul" else 1))
    outputs_of_linears = score_tensors(model)
    for name in outputs_of_linears:
        observers.setdefault(name, Observer(-1))
    observed = with_outputs(model, sorted(observers))
    images = 0
    with OnnxRuntimeRunner(observed, name="calibration", weights=weights_folder(model)) as runner:
        tensor = runner.inputs[0]
        for pixels in batches:
            feed = pixels if tensor.dtype == "uint8" else normalise(pixels, preprocess)
            outputs = runner.infer({tensor.name: feed})
            for name, observer in observers.items():
                observer.update(outputs[name], moments=images < MOMENT_IMAGES)
            images += len(pixels)
            progress(len(pixels))
    found = {name: observer.statistics() for name, observer in sorted(observers.items())}
    broken = [name for name, each in found.items() if not np.isfinite([each.low, each.high]).all()]
    if broken:
        raise DataError(
            "the model's activations are not finite on the calibration images",
            found=", ".join(broken[:5]),
            fix="check the checkpoint and the preprocessing",
        )
    return {outputs_of_linears.get(name, name): each for name, each in found.items()}


def with_outputs(model: ir.Model, names: Sequence[str]) -> bytes:
    """The serialized graph with the named tensors as outputs, beside its own. External data stay where they are."""
    observed = ir.from_proto(ir.to_proto(model))
    values = {str(v.name): v for node in observed.graph for v in node.outputs}
    values.update({str(v.name): v for v in observed.graph.inputs})
    own = {str(v.name) for v in observed.graph.outputs}
    observed.graph.outputs.extend(values[name] for name in names if name not in own)
    return bytes(ir.to_proto(observed).SerializeToString())
