"""One model in which every layer can be switched between float and INT8 while it is loaded.

A search evaluates hundreds of variants of one model; building an engine for each would take longer than running it. So
each layer is written in all its forms, as branches of ONNX If, and variants differ only in inputs: switches, and the
scale and zero point of a layer's input. It runs on ONNX Runtime whatever the target, as INT8 is exact arithmetic: two
runtimes differ only in the order of float additions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.linears import Linear, find_linears
from vitdeploy.graph.edit import constant
from vitdeploy.graph.io.files import save_graph
from vitdeploy.graph.passes.image_norm import takes_pixels
from vitdeploy.quantization.attention_onnxruntime import DOMAIN
from vitdeploy.quantization.ranges import QuantizedWeight, Range, activation_scale
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.runner import Array

Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Form:
    """One way to compute a layer in INT8: on x[source] * factor + offset, which `bounds` are the range of.

    `source` int64 [channels of the weight], `factor` and `offset` float32 of the same length; None leaves x as it is.
    `output`: the step of an output that is int8 too, as of queries and keys.
    """

    bounds: Range
    weight: QuantizedWeight
    bias: Floats | None
    source: npt.NDArray[np.int64] | None = None
    factor: Floats | None = None
    offset: Floats | None = None
    output: np.float32 | None = None


@dataclass(frozen=True)
class Choice:
    """The form of one layer (its number; None: float), and another range than the form's own."""

    form: int | None = 0
    bounds: Range | None = None


class SwitchedRunner(OnnxRuntimeRunner):
    """A runner with the model's own inputs; `choose` sets how its layers are computed from now on.

    Every layer that has forms starts in its first one.
    """

    def __init__(self, graph: Path, forms: Mapping[str, Sequence[Form]], *, batch: int) -> None:
        super().__init__(graph, name="INT8 by layer", batch=batch)
        self._forms = {layer: tuple(each) for layer, each in forms.items()}
        self._settings: dict[str, Array] = {}
        self.choose({})

    def choose(self, choices: Mapping[str, Choice]) -> None:
        """Set the form of these layers, and that of all others to their first."""
        for layer, forms in self._forms.items():
            choice = choices.get(layer, Choice())
            bounds = choice.bounds or forms[choice.form or 0].bounds
            found = activation_scale(bounds)
            self._settings[f"{layer}|scale"] = np.asarray(found.scale)
            self._settings[f"{layer}|zero"] = np.asarray(found.zero_point)
            for number in range(len(forms)):
                self._settings[f"{layer}|{number}"] = np.asarray(choice.form == number)

    def _load(self) -> None:
        super()._load()
        self.inputs = tuple(tensor for tensor in self.inputs if tensor.name not in self._settings)

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return super()._infer({**feeds, **self._settings})


def write_switched(model: ir.Model, forms: Mapping[str, Sequence[Form]], biases: Mapping[str, Any], path: Path) -> None:
    """Save the graph with every layer of `forms` in float and in each of its forms. The model is changed in place.

    Args:
        biases: of layers in float, if they differ from those in the graph.
    """
    model.opset_imports[DOMAIN] = 1
    for linear in find_linears(model):
        if linear.name in forms:
            _switch(model, linear, forms[linear.name], biases)
    save_graph(model, path)


def _switch(model: ir.Model, linear: Linear, forms: Sequence[Form], biases: Mapping[str, Any]) -> None:
    name, write = linear.name, _INT8[linear.kind]
    scale, zero = (
        _input(model, f"{name}|{part}", kind)
        for part, kind in (("scale", ir.DataType.FLOAT), ("zero", ir.DataType.UINT8))
    )
    branch = _float(linear, biases.get(name, linear.bias))
    for number, form in reversed(list(enumerate(forms))):
        chosen = _Branch(f"{name}|{number}")
        x = _moved(chosen, linear.input, form)
        chosen.result(_rounded(chosen, write(chosen, linear, x, form, scale, zero), form))
        switch = _input(model, f"{name}|{number}", ir.DataType.BOOL)
        then, otherwise = chosen.graph(), branch.graph()
        branch = _Branch(f"{name}|or {number}")
        branch.result(branch.node("If", [switch], then_branch=then, else_branch=otherwise))
    [node] = branch.nodes
    node.name = f"{name}/If"
    old, new = linear.output, node.outputs[0]
    new.name, new.type, new.shape = f"{name}|output", old.type, old.shape
    removed = [linear.node] if linear.bias_add is None else [linear.bias_add, linear.node]
    ir.convenience.replace_nodes_and_values(model.graph, removed[0], removed, [node], [old], [new])


class _Branch:
    """The nodes of one subgraph, with names of its own."""

    def __init__(self, name: str) -> None:
        self.name, self.nodes, self.constants = name, list[ir.Node](), list[ir.Value]()
        self.output: ir.Value | None = None

    def constant(self, array: Any, name: str) -> ir.Value:
        self.constants.append(constant(np.asarray(array), f"{self.name}|{name}"))
        return self.constants[-1]

    def node(self, operator: str, inputs: Sequence[ir.Value | None], domain: str = "", **attributes: Any) -> ir.Value:
        node = ir.node(operator, inputs, attributes, domain=domain, name=f"{self.name}|{operator} {len(self.nodes)}")
        node.outputs[0].name = f"{node.name} output"
        self.nodes.append(node)
        return node.outputs[0]

    def result(self, value: ir.Value) -> None:
        self.output = value

    def graph(self) -> ir.Graph:
        assert self.output is not None
        return ir.Graph([], [self.output], nodes=self.nodes, initializers=self.constants, name=self.name)


def _input(model: ir.Model, name: str, kind: ir.DataType) -> ir.Value:
    value = ir.Value(name=name, type=ir.TensorType(kind), shape=ir.Shape(()))
    model.graph.inputs.append(value)
    return value


def _float(linear: Linear, bias: Floats | None) -> _Branch:
    branch = _Branch(f"{linear.name}|float")
    weight = branch.constant(linear.weight, "weight")
    constant = [] if bias is None else [branch.constant(bias, "bias")]
    if linear.kind == "conv":
        branch.result(branch.node("Conv", [linear.input, weight, *constant], **_attributes(linear)))
        return branch
    product = branch.node("MatMul", [linear.input, weight])
    branch.result(branch.node("Add", [product, *constant]) if constant else product)
    return branch


def _moved(branch: _Branch, x: ir.Value, form: Form) -> ir.Value:
    if form.source is not None:
        x = branch.node("Gather", [x, branch.constant(form.source, "source")], axis=-1)
    for operator, vector in (("Mul", form.factor), ("Add", form.offset)):
        if vector is not None:
            x = branch.node(operator, [x, branch.constant(vector, operator.lower())])
    return x


def _rounded(branch: _Branch, y: ir.Value, form: Form) -> ir.Value:
    """The output as its readers see it."""
    if form.output is None:
        return y
    parameters = [branch.constant(form.output, "step"), branch.constant(np.array(0, np.int8), "middle")]
    return branch.node("DequantizeLinear", [branch.node("QuantizeLinear", [y, *parameters]), *parameters])


def _matmul(branch: _Branch, linear: Linear, x: ir.Value, form: Form, scale: ir.Value, zero: ir.Value) -> ir.Value:
    weight, scales = form.weight
    inputs = [
        branch.node("QuantizeLinear", [x, scale, zero]),
        branch.constant(weight, "weight"),
        scale,
        branch.constant(scales, "scales"),
        zero,
        branch.constant(np.zeros(len(scales), np.int8), "zeros"),
    ]
    bias = [] if form.bias is None else [branch.constant(form.bias, "bias")]
    return branch.node("MatMulIntegerToFloat", [*inputs, *bias], domain=DOMAIN)


def _conv(branch: _Branch, linear: Linear, x: ir.Value, form: Form, scale: ir.Value, zero: ir.Value) -> ir.Value:
    """A convolution in float on INT8 values: ONNX Runtime has no INT8 convolution with a float output."""
    weight, scales = form.weight
    if not takes_pixels(linear):  # every placement keeps these exact
        x = branch.node("DequantizeLinear", [branch.node("QuantizeLinear", [x, scale, zero]), scale, zero])
    rounded = branch.constant((weight * scales[:, None, None, None]).astype(np.float32), "weight")
    bias = [] if form.bias is None else [branch.constant(form.bias, "bias")]
    return branch.node("Conv", [x, rounded, *bias], **_attributes(linear))


_INT8: dict[str, Callable[..., ir.Value]] = {"matmul": _matmul, "conv": _conv}


def _attributes(linear: Linear) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in linear.node.attributes.items()}
