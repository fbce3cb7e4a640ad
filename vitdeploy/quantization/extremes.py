"""Measure the magnitudes of every tensor, and how many values rounding makes zero, in one pass over images."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import DataError
from vitdeploy.graph.analysis.layout import is_layout
from vitdeploy.graph.edit import Names
from vitdeploy.graph.half.emulated import HALVES
from vitdeploy.graph.io.files import weights_folder
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.quantization.nonfinite import find_nonfinite
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.preprocess import normalise
from vitdeploy.spec import PreprocessSpec

LARGEST, LOST = "extremes/largest", "extremes/lost"


class Extremes:
    """The largest magnitude of every float32 tensor that a node of the graph computes, and of a graph that emulates
    half precision the share of each tensor's numbers that underflow, while images are shown to it.

    To be entered before `update`. The graph is not changed. Memory does not depend on the number of images.

    Args:
        precision, fix: what errors say of the graph, and what would fix them.
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
        probe, self._measured, self._rounded = with_extremes(model)
        self._largest, self._lost = np.zeros(len(self._measured)), np.zeros(len(self._rounded))
        data = ir.to_proto(probe).SerializeToString()
        self._runner = OnnxRuntimeRunner(data, name="range pass", weights=weights_folder(model), as_written=True)

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
        broken = [name for name, size in zip(self._measured, largest, strict=True) if not np.isfinite(size)]
        broken += [name for name, array in outputs.items() if array.dtype.kind == "f" and np.isnan(array).any()]
        if broken:
            raise DataError(
                f"the activations are not finite in {self.precision}",
                found=f"{find_nonfinite(self.model, broken[0], feed)}, on image {self.images + 1} or one after it",
                wanted="finite activations",
                fix=self.fix,
            )
        self._largest = np.maximum(self._largest, largest)
        if self._rounded:
            self._lost += outputs[LOST].astype(np.float64) * len(pixels)
        self.images += len(pixels)

    def largest(self) -> dict[str, float]:
        """The largest magnitude of each tensor over all images, by name. What only a rounding reads is measured behind
        it."""
        return dict(zip(self._measured, self._largest.tolist(), strict=True))

    def lost(self) -> dict[str, float]:
        """The share of the numbers of each rounded tensor that the rounding made zero, by the name of the tensor as it
        was before."""
        return dict(zip(self._rounded, (self._lost / max(self.images, 1)).tolist(), strict=True))


def with_extremes(model: ir.Model) -> tuple[ir.Model, list[str], list[str]]:
    """A copy of a float graph with one or two outputs more: the largest magnitude of each tensor, and of each tensor
    that is rounded to half precision and back the share of its numbers that became zero. Then the names of both.

    Tensors that layout operations make hold no other numbers than those they are made of, and are left out.
    """
    probe = model.clone()
    Inference(probe)
    names = Names(probe)
    zero = names.constant(np.array(0, np.float32), "extremes/zero")
    one = names.constant(np.array([1], np.int64), "extremes/one")
    largest, lost = dict[str, ir.Value](), dict[str, ir.Value]()
    for node in [node for node in probe.graph if not (is_layout(node) or _is_fixed(node))]:
        for value in node.outputs:
            if value.dtype != ir.DataType.FLOAT or not value.name or _is_only_rounded(value):
                continue
            behind = _Behind(node, names, value.name)  # so that no tensor is kept for longer than it was
            size = behind.append("ReduceMax", behind.append("Abs", value), keepdims=0)
            largest[str(value.name)] = behind.append("Reshape", size, one)
            before = _before_rounding(value)
            if before is not None:
                was_number = behind.append("Not", behind.append("Equal", before, zero))
                is_lost = behind.append("And", was_number, behind.append("Equal", value, zero))
                ones = behind.append("Cast", is_lost, to=int(ir.DataType.FLOAT))
                lost[str(before.name)] = behind.append("Reshape", behind.append("ReduceMean", ones, keepdims=0), one)
    for name, numbers in ((LARGEST, largest), (LOST, lost)):
        if numbers:
            together = _Behind(probe.graph[-1], names, name).append("Concat", *numbers.values(), axis=0)
            together.name, together.shape = name, ir.Shape([len(numbers)])
            together.type = ir.TensorType(ir.DataType.FLOAT)
            probe.graph.outputs.append(together)
    return probe, list(largest), list(lost)


class _Behind:
    """Puts nodes behind `node`, in their order; their names have `name` in them."""

    def __init__(self, node: ir.Node, names: Names, name: str) -> None:
        self._last, self._names, self._name, self._count = node, names, f"extremes/{name}", 0

    def append(self, operator: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
        node = self._names.node(operator, inputs, f"{self._name}/{self._count}", attributes)
        self._last.append(node)
        self._last, self._count = node, self._count + 1
        return node.outputs[0]


def _is_fixed(node: ir.Node) -> bool:
    """Whether a node computes a constant, such as weights in another type."""
    return all(value is None or value.is_initializer() for value in node.inputs)


def _is_only_rounded(value: ir.Value) -> bool:
    readers = [use.node for use in value.uses()]
    return bool(readers) and all(node.op_type == "Cast" and node.outputs[0].dtype in HALVES for node in readers)


def _before_rounding(value: ir.Value) -> ir.Value | None:
    """The float32 tensor that `value` is the rounded one of, if it is."""
    up = value.producer()
    down = up.inputs[0].producer() if up is not None and up.op_type == "Cast" and up.inputs[0] is not None else None
    if down is None or down.op_type != "Cast" or down.outputs[0].dtype not in HALVES:
        return None
    return down.inputs[0]
