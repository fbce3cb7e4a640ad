"""How large and how small the numbers of every tensor get, in one pass over images: what half precision must hold."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import DataError
from vitdeploy.graph.canonical.edit import add_constant
from vitdeploy.graph.canonical.infer import Inference
from vitdeploy.graph.io import weights_folder
from vitdeploy.graph.layout import is_layout
from vitdeploy.quantize.nonfinite import find_nonfinite
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.spec import PreprocessSpec

# float16 rounds to zero what is not above half of its smallest subnormal number, 2^-24.
LOST = 2.0**-25
LARGEST, SHARE_LOST = "extremes/largest", "extremes/lost"


@dataclass(frozen=True)
class Extreme:
    """Of one tensor, over all images: the largest magnitude, and the share of its numbers that are not zero but would
    be in float16."""

    largest: float
    lost: float


class Extremes:
    """The extremes of every float32 tensor that a node of the graph computes, while images are shown to it.

    To be entered before `update`. The graph is not changed. Memory does not depend on the number of images.

    Args:
        precision, fix: what errors say of the graph, and what would mend them.
    """

    def __init__(
        self,
        model: ir.Model,
        preprocess: PreprocessSpec,
        precision: str = "float32",
        fix: str = "check the checkpoint and the preprocessing",
    ) -> None:
        self.model, self.preprocess, self.precision, self.fix = model, preprocess, precision, fix
        self.images = 0
        probe, self.names = with_extremes(model)
        self._largest = np.zeros(len(self.names))
        self._lost = np.zeros(len(self.names))
        data = ir.to_proto(probe).SerializeToString()
        self._runner = OnnxRuntimeRunner(data, name="range pass", weights=weights_folder(model), fused=False)

    def __enter__(self) -> Extremes:
        self._runner.load()
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.close()

    def update(self, pixels: npt.NDArray[np.uint8]) -> None:
        """Show one batch, uint8 [n, height, width, channels].

        Raises:
            DataError: a tensor took a value that is not finite; names the node where it arose.
        """
        tensor = self._runner.inputs[0]
        feed = {tensor.name: pixels if tensor.dtype == "uint8" else normalise(pixels, self.preprocess)}
        outputs = self._runner.infer(feed)
        largest = outputs[LARGEST].astype(np.float64)
        broken = [name for name, size in zip(self.names, largest, strict=True) if not np.isfinite(size)]
        broken += [name for name, array in outputs.items() if array.dtype.kind == "f" and np.isnan(array).any()]
        if broken:
            raise DataError(
                f"the activations are not finite in {self.precision}",
                found=f"{find_nonfinite(self.model, broken[0], feed)}, on image {self.images + 1} or one after it",
                wanted="finite activations",
                fix=self.fix,
            )
        self._largest = np.maximum(self._largest, largest)
        self._lost += outputs[SHARE_LOST].astype(np.float64) * len(pixels)
        self.images += len(pixels)

    def found(self) -> dict[str, Extreme]:
        """By tensor name."""
        shares = self._lost / max(self.images, 1)
        return {
            name: Extreme(float(largest), float(lost))
            for name, largest, lost in zip(self.names, self._largest, shares, strict=True)
        }


def with_extremes(model: ir.Model) -> tuple[ir.Model, list[str]]:
    """A copy of a float graph with two outputs more, of a number for each tensor, and the names of these tensors.

    Tensors that layout operations make hold no other numbers than those they are made of, and are left out.
    """
    probe = model.clone()
    Inference(probe)
    limit, zero = (add_constant(probe, np.array(number, np.float32), "extremes/limit") for number in (LOST, 0))
    one = add_constant(probe, np.array([1], np.int64), "extremes/one")
    names, columns = [], (list[ir.Value](), list[ir.Value]())

    def append(operator: str, inputs: list[ir.Value], name: str, **attributes: int) -> ir.Value:
        node = ir.node(operator, inputs, attributes, name=f"extremes/{name}/{operator}")
        node.outputs[0].name = node.name
        probe.graph.append(node)
        return node.outputs[0]

    for value in [value for node in probe.graph for value in node.outputs if not is_layout(node)]:
        if value.dtype != ir.DataType.FLOAT or not value.name:
            continue
        name = str(value.name)
        size = append("Abs", [value], name)
        small = append("And", [append("Greater", [size, zero], name), append("LessOrEqual", [size, limit], name)], name)
        lost = append("ReduceMean", [append("Cast", [small], name, to=int(ir.DataType.FLOAT))], name, keepdims=0)
        largest = append("ReduceMax", [size], name, keepdims=0)
        names.append(name)
        for column, number, label in zip(columns, (largest, lost), (LARGEST, SHARE_LOST), strict=True):
            column.append(append("Reshape", [number, one], f"{name}/{label}"))
    for label, column in zip((LARGEST, SHARE_LOST), columns, strict=True):
        together = append("Concat", column, label, axis=0)
        together.name, together.shape = label, ir.Shape([len(names)])
        together.type = ir.TensorType(ir.DataType.FLOAT)
        probe.graph.outputs.append(together)
    return probe, names
