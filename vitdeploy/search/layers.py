"""Shapes of layers, and small graphs of copies of one layer for timing."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.rows import Linear, find_linears
from vitdeploy.graph.edit import constant
from vitdeploy.graph.shapes.infer import Inference
from vitdeploy.graph.shapes.sizes import UNKNOWN, Dims, FreeSize
from vitdeploy.quantization.ranges import Range

OPSET = 20
SEED = 0
# Any range: times depend on shapes, not on values.
BOUNDS = Range(-4.0, 4.0)
# Enough layers in one graph, each with its own weights, so that no cache holds them between two calls.
COPIES, MOST_BYTES = 8, 128 * 2**20


@dataclass(frozen=True)
class Convolution:
    """The properties that a convolution's time depends on besides its matrix product: image and ONNX attributes."""

    channels: int
    height: int
    width: int
    kernel: tuple[int, ...]
    strides: tuple[int, ...]
    pads: tuple[int, ...]
    dilations: tuple[int, ...]
    group: int


@dataclass(frozen=True)
class Shape:
    """One layer at batch 1 as a matrix product: `rows` x `k` times `k` x `n`.

    For a convolution, the rows are its output positions, and k the weights of one output channel. `front`: the chain of
    operators before the layer that are timed with it ("Gelu", "Mul", "Add").
    """

    rows: int
    k: int
    n: int
    convolution: Convolution | None = None
    front: tuple[str, ...] = ()

    @property
    def kind(self) -> Literal["matmul", "conv"]:
        return "matmul" if self.convolution is None else "conv"

    @property
    def macs(self) -> int:
        return self.rows * self.k * self.n

    @property
    def copies(self) -> int:
        """The number of copies of the layer in a small graph."""
        return max(1, min(COPIES, MOST_BYTES // (4 * self.k * self.n)))

    def __str__(self) -> str:
        return " ".join([*self.front, f"{self.kind} {self.rows} x {self.k} x {self.n}"])


def shapes_of(model: ir.Model, layers: Collection[str]) -> dict[str, Shape]:
    """The shape of each of these layers by name, at batch 1 if the batch is dynamic.

    Raises:
        GraphError: a layer's input has a dynamic axis besides the batch, or a convolution has automatic padding.
    """
    dims = Inference(model).dims
    inputs = [dims[value] for value in model.graph.inputs if dims.get(value)]
    batch = {name for sizes in inputs if isinstance(sizes[0], FreeSize) for name in sizes[0].names}
    chosen = [linear for linear in find_linears(model) if linear.name in layers]
    return {
        linear.name: _shape(
            linear, *(_at_batch_one(linear, dims.get(each), batch) for each in (linear.input, linear.output))
        )
        for linear in chosen
    }


def _at_batch_one(linear: Linear, sizes: Dims | None, batch: Collection[str]) -> list[int]:
    found = [
        each.factor if isinstance(each, FreeSize) and set(each.names) <= set(batch) else each
        for each in sizes or (UNKNOWN,)
    ]
    numbers = [each for each in found if isinstance(each, int)]
    if len(numbers) < len(found):
        raise GraphError(
            f"the input size of {linear.name} is unknown",
            found=" x ".join(map(str, found)),
            expected="fixed sizes, except for the batch",
            fix="export with a fixed image size",
        )
    return numbers


def _shape(linear: Linear, before: list[int], after: list[int]) -> Shape:
    if linear.kind == "matmul":
        k, n = linear.weight.shape
        return Shape(int(np.prod(before[:-1])), k, n)
    attributes = {name: each.value for name, each in linear.node.attributes.items()}
    if attributes.get("auto_pad", "NOTSET") not in ("NOTSET", "VALID"):
        found = f"auto_pad={attributes['auto_pad']}"
        raise GraphError(f"{linear.name} has automatic padding", found=found, expected="explicit pads")
    n, inside, *kernel = linear.weight.shape
    _, channels, height, width = before

    def numbers(name: str, default: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(int(each) for each in attributes.get(name, default))

    layout = Convolution(
        channels,
        height,
        width,
        tuple(kernel),
        numbers("strides", (1, 1)),
        numbers("pads", (0, 0, 0, 0)),
        numbers("dilations", (1, 1)),
        int(attributes.get("group", 1)),
    )
    return Shape(int(np.prod(after[2:])), inside * kernel[0] * kernel[1], n, layout)


def layer_graph(shape: Shape, copies: int | None = None) -> ir.Model:
    """A graph of `copies` such layers, by default `shape.copies`, named "0", "1" ..., each with its own input, weights
    and bias.

    Only one row of each output is a graph output, so that the time does not include copying the results.
    """
    generator = np.random.default_rng(SEED)
    graph = ir.Graph([], [], nodes=[], opset_imports={"": OPSET}, name="layers")
    model = ir.Model(graph, ir_version=9, producer_name="vitdeploy")

    def initializer(array: Any, name: str) -> ir.Value:
        value = constant(array, name)
        graph.register_initializer(value)
        return value

    def node(operator: str, name: str, inputs: list[ir.Value], sizes: list[int], **attributes: Any) -> ir.Value:
        made = ir.node(operator, inputs, attributes, name=f"{name}/{operator}")
        output = made.outputs[0]
        output.name, output.type, output.shape = f"{name}/{operator}", inputs[0].type, ir.Shape(sizes)
        graph.append(made)
        return output

    row = initializer(np.array([0], np.int64), "row")
    for i in range(shape.copies if copies is None else copies):
        layout = shape.convolution
        sizes = [1, shape.rows, shape.k] if layout is None else [1, layout.channels, layout.height, layout.width]
        x = ir.Value(name=f"x{i}", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(sizes))
        graph.inputs.append(x)
        for operator in shape.front:
            vector = () if operator == "Gelu" else (generator.uniform(0.5, 2, sizes[-1]).astype(np.float32),)
            constants = [initializer(each, f"{i}.{operator}") for each in vector]
            x = node(operator, f"{i}.front", [x, *constants], sizes)
        bias = initializer(generator.standard_normal(shape.n, dtype=np.float32), f"{i}.bias")
        if layout is None:
            weight = initializer(generator.standard_normal((shape.k, shape.n), dtype=np.float32), f"{i}.weight")
            wide = [1, shape.rows, shape.n]
            y = node("Add", str(i), [node("MatMul", str(i), [x, weight], wide), bias], wide)
            last = node("Gather", f"row {i}", [y, row], [1, 1, shape.n], axis=1)
        else:
            filters = (shape.n, layout.channels // layout.group, *layout.kernel)
            weight = initializer(generator.standard_normal(filters, dtype=np.float32), f"{i}.weight")
            attributes = {name: getattr(layout, name) for name in ("strides", "pads", "dilations", "group")}
            y = node("Conv", str(i), [x, weight, bias], [], **attributes)
            y.shape = None
            last = node("Gather", f"row {i}", [y, row], [], axis=2)
            last.shape = ir.Shape([1, shape.n, 1, None])
        graph.outputs.append(last)
    return model
