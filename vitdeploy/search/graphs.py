"""Run graphs with parts in another precision."""

import dataclasses
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import DataError
from vitdeploy.graph.analysis.prunable import part
from vitdeploy.graph.analysis.rows import Linear, find_linears
from vitdeploy.graph.edit import constant, drop_unused
from vitdeploy.graph.io.files import save_graph
from vitdeploy.graph.passes.folds import takes_pixels
from vitdeploy.quantization import place_onnxruntime, placement_reader, ranges
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.ort import OnnxRuntimeRunner
from vitdeploy.runtime.runner import Array, Runner
from vitdeploy.search.frame import ReferenceOutputs
from vitdeploy.spec import EngineSpec

# --- Facts about a tensor that is hard to quantize, for reports -------------------------------------------------------


# The most outlier channels in a list, and the minimum ratio of their largest magnitude to that of the median channel.
SHOWN_CHANNELS, OUTLIER_RATIO = 4, 10.0


@dataclass(frozen=True)
class OutlierFacts:
    """Over all images: the smallest and the largest value, the 99.9th percentile of |x|, the median over the channels
    of max |x|, and outlier channels with their max |x|, largest first. `finite` is the share of finite values; the
    other facts use only these."""

    low: float
    high: float
    percentile: float
    median_channel: float
    outliers: dict[int, float]
    finite: float


def facts_of(batches: Iterable[Array], images: int, axis: int) -> OutlierFacts:
    """Facts of a tensor that arrives in batches [n, ...] of `images` in total; channels lie along `axis`.

    Only the largest thousandth of the values is kept in memory.
    """
    low, high, count, finite = np.inf, -np.inf, 0, 0
    largest: npt.NDArray[np.float32] = np.zeros(0, np.float32)
    reach: npt.NDArray[np.float32] = np.zeros(0, np.float32)
    for batch in batches:
        rows = np.moveaxis(batch, axis, -1).reshape(-1, batch.shape[axis])
        good = np.isfinite(rows)
        count, finite = count + rows.size, finite + int(good.sum())
        values = np.where(good, rows, np.float32(0))
        low, high = min(low, float(values.min())), max(high, float(values.max()))
        power = np.abs(values)
        most = power.max(axis=0)
        reach = np.maximum(reach, most) if len(reach) else most
        # The k largest of all values are among the k largest of each batch.
        kept = _held(images * rows.size // len(batch))
        largest = np.concatenate([largest, power.ravel()])
        if len(largest) > kept:
            largest = np.partition(largest, len(largest) - kept)[-kept:]
    order = np.argsort(-reach, kind="stable")[:SHOWN_CHANNELS]
    median = float(np.median(reach))
    return OutlierFacts(
        low=low,
        high=high,
        percentile=float(np.sort(largest)[-_held(count)]),
        median_channel=median,
        outliers={int(i): float(reach[i]) for i in order if reach[i] > OUTLIER_RATIO * median},
        finite=finite / count,
    )


def _held(count: int) -> int:
    """The number of the `count` values at or above the 99.9th percentile, which 999 of 1,000 do not exceed."""
    return count // 1000 + 1


# --- Parts of an engine between parts of the float graph, to measure their effect on the answers ----------------------
# image -> float graph -> `given` -> a part of the placement, on its runtime -> `expected` -> float graph -> answers
#
# The float graph runs on ONNX Runtime in float32. Only one batch of intermediate tensors is held in memory.


class Splice:
    """The float graph and the placement of an engine, joined at tensors with the same name in both."""

    def __init__(
        self, graph: ir.Model, placement: ir.Model, engine: EngineSpec, reference_outputs: ReferenceOutputs
    ) -> None:
        """`engine`: gives the runtime, options and batch for the parts of the placement. `ran` is called after every
        run.

        Raises:
            DataError: the float graph's answers are not finite.
        """
        if not _finite(reference_outputs.answers):
            raise DataError(
                "the outputs of the float graph are not finite",
                found="NaN or infinity on these images",
                expected="finite outputs",
                fix="check the checkpoint and the preprocessing",
            )
        self.graph, self.placement, self.engine, self.reference_outputs = graph, placement, engine, reference_outputs
        self.outputs = [str(value.name) for value in graph.graph.outputs]
        self.runs, self.ran = 0, _nothing

    def distance(self, given: Sequence[str] = (), expected: Sequence[str] = (), floats: Collection[str] = ()) -> float:
        """The mean distance over the images with a part of the float graph replaced by the placement's; infinite for
        non-finite answers.

        Args:
            given: the tensors that the part starts from; empty: the input of the graph.
            expected: the tensors that it ends with; empty: the outputs of the graph.
            floats: quantized tensors that stay in float.
        """
        batch = self.reference_outputs.batch
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
            chain = _Chain(Path(folder), self.outputs)
            ends: Sequence[str] = self.outputs
            if given:
                chain.add(part(self.graph, (), given, batch))
            if expected:
                rest = part(self.graph, [*given, *expected], self.outputs, batch)
                read = {str(value.name) for value in rest.graph.inputs}
                ends = [name for name in expected if name in read]
            if ends:
                placed = part(self.placement, given, ends, batch)
                placement_reader.make_float(placed, floats)
                chain.add(placed, self.engine)
            if expected:
                chain.add(rest)
            with chain:
                answers = self.reference_outputs.ask(chain)
        self.count()
        return self.mean_distance(answers)

    def mean_distance(self, answers: Mapping[str, Array]) -> float:
        """The mean distance over the images; infinite for non-finite answers."""
        return float(self.reference_outputs.distance(answers).mean()) if _finite(answers) else np.inf

    def count(self) -> None:
        """Count one more run."""
        self.runs += 1
        self.ran()

    def facts(self, tensor: str, given: Sequence[str] = (), *, placed: bool) -> OutlierFacts | None:
        """Facts about a tensor of the placement with nothing quantized before it (of the float graph if not `placed`),
        computed from `given`; None if its shape is unknown."""
        model = part(self.placement if placed else self.graph, given, [tensor], self.reference_outputs.batch)
        placement_reader.make_float(model, [quantized.tensor for quantized in placement_reader.find_quantized(model)])
        [value] = model.graph.outputs
        if value.shape is None or value.dtype != ir.DataType.FLOAT:
            return None
        with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
            chain = _Chain(Path(folder), [tensor])
            if given:
                chain.add(part(self.graph, (), given, self.reference_outputs.batch))
            chain.add(model)
            with chain:
                axis = 1 if len(value.shape) == 4 else -1
                return facts_of(
                    (each[tensor] for each in self.reference_outputs.stream(chain)),
                    len(self.reference_outputs.pixels),
                    axis,
                )


class _Chain(Runner):
    """Several runners in sequence: each takes its inputs from the outputs of all previous ones."""

    def __init__(self, folder: Path, outputs: Sequence[str]) -> None:
        """`folder` holds the files of the parts; `outputs` are the output tensors of the chain."""
        super().__init__("chain")
        self.folder, self.names = folder, tuple(outputs)
        self._parts: list[tuple[Runner, list[str], list[str]]] = []

    def add(self, model: ir.Model, engine: EngineSpec | None = None) -> None:
        """Add a part that runs like `engine`; without one, on ONNX Runtime."""
        file = self.folder / f"part{len(self._parts)}.onnx"
        save_graph(model, file)
        runner: Runner = OnnxRuntimeRunner(file, name="float")
        if engine is not None:
            runner = make_runner(self.folder, dataclasses.replace(engine, files=(file.name,)))
        names = [[str(value.name) for value in values] for values in (model.graph.inputs, model.graph.outputs)]
        self._parts.append((runner, names[0], names[1]))

    def _load(self) -> None:
        for runner, _, _ in self._parts:
            runner.load()
        first, names, _ = self._parts[0]
        self.inputs = tuple(dataclasses.replace(t, name=name) for t, name in zip(first.inputs, names, strict=True))
        self.provider = first.provider

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        known = dict(feeds)
        for runner, inputs, outputs in self._parts:
            # By position: a runtime may have several names for a tensor.
            given = {t.name: known[name] for t, name in zip(runner.inputs, inputs, strict=True)}
            known |= dict(zip(outputs, runner.infer(given).values(), strict=True))
        return {name: known[name] for name in self.names}

    def _close(self) -> None:
        for runner, _, _ in self._parts:
            runner.close()


def _nothing() -> None:
    pass


def _finite(answers: Mapping[str, Array]) -> bool:
    return all(np.isfinite(answer).all() for answer in answers.values() if answer.dtype.kind == "f")


# --- One loaded model in which every layer can be switched between float and INT8 -------------------------------------
# A search evaluates hundreds of variants of one model; building an engine for each would take longer than running it.
# So each layer has all its forms, as branches of ONNX If, and variants differ only in inputs: switches, and the scale
# and zero point of a layer's input. It runs on ONNX Runtime for every target, since INT8 is exact arithmetic: two
# runtimes differ only in the order of float additions.


Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class LayerForm:
    """One way to compute a layer in INT8: on x[source] * factor + offset, with the range `bounds`.

    `source` int64 [channels of the weight], `factor` and `offset` float32 of the same length; None leaves x unchanged.
    `output`: the step of an output that is int8 too, such as queries and keys.
    """

    bounds: ranges.Range
    weight: ranges.QuantizedWeight
    bias: Floats | None
    source: npt.NDArray[np.int64] | None = None
    factor: Floats | None = None
    offset: Floats | None = None
    output: np.float32 | None = None


@dataclass(frozen=True)
class LayerChoice:
    """The form of one layer (its number; None: float), and a range that replaces the form's own."""

    form: int | None = 0
    bounds: ranges.Range | None = None


class SwitchedRunner(OnnxRuntimeRunner):
    """A runner with the model's own inputs; `choose` sets the forms of its layers for all later runs.

    Every layer with forms starts in its first one.
    """

    def __init__(self, graph: Path, forms: Mapping[str, Sequence[LayerForm]], *, batch: int) -> None:
        super().__init__(graph, name="INT8 by layer", batch=batch)
        self._forms = {layer: tuple(each) for layer, each in forms.items()}
        self._settings: dict[str, Array] = {}
        self.choose({})

    def choose(self, choices: Mapping[str, LayerChoice]) -> None:
        """Set the forms of these layers; all others get their first form."""
        for layer, forms in self._forms.items():
            choice = choices.get(layer, LayerChoice())
            bounds = choice.bounds or forms[choice.form or 0].bounds
            for key, parameter in zip(("scale", "zero"), ranges.activation_scale(bounds), strict=True):
                self._settings[f"{layer}|{key}"] = np.asarray(parameter)
            for number in range(len(forms)):
                self._settings[f"{layer}|{number}"] = np.asarray(choice.form == number)

    def _load(self) -> None:
        super()._load()
        self.inputs = tuple(tensor for tensor in self.inputs if tensor.name not in self._settings)

    def _infer(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        return super()._infer({**feeds, **self._settings})


def write_switched(
    model: ir.Model, forms: Mapping[str, Sequence[LayerForm]], biases: Mapping[str, Any], path: Path
) -> None:
    """Save the graph with every layer of `forms` in float and in each of its forms. Changes the model in place.

    Args:
        biases: biases of layers in float that differ from those in the graph.
    """
    model.opset_imports[place_onnxruntime.DOMAIN] = 1
    for linear in find_linears(model):
        if linear.name in forms:
            _switch(model, linear, forms[linear.name], biases)
    drop_unused(model)
    # Unchecked: only this process opens it. The runtime reads the external weights without an extra copy.
    ir.save(model, path, external_data=f"{path.name}.data")


def _switch(model: ir.Model, linear: Linear, forms: Sequence[LayerForm], biases: Mapping[str, Any]) -> None:
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
    """The nodes of one subgraph, with its own names."""

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


def _moved(branch: _Branch, x: ir.Value, form: LayerForm) -> ir.Value:
    if form.source is not None:
        x = branch.node("Gather", [x, branch.constant(form.source, "source")], axis=-1)
    for operator, vector in (("Mul", form.factor), ("Add", form.offset)):
        if vector is not None:
            x = branch.node(operator, [x, branch.constant(vector, operator.lower())])
    return x


def _rounded(branch: _Branch, y: ir.Value, form: LayerForm) -> ir.Value:
    """The output of a layer, rounded if the form has an int8 output."""
    if form.output is None:
        return y
    parameters = [branch.constant(form.output, "step"), branch.constant(np.array(0, np.int8), "middle")]
    return branch.node("DequantizeLinear", [branch.node("QuantizeLinear", [y, *parameters]), *parameters])


def _matmul(branch: _Branch, linear: Linear, x: ir.Value, form: LayerForm, scale: ir.Value, zero: ir.Value) -> ir.Value:
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
    return branch.node("MatMulIntegerToFloat", [*inputs, *bias], domain=place_onnxruntime.DOMAIN)


def _conv(branch: _Branch, linear: Linear, x: ir.Value, form: LayerForm, scale: ir.Value, zero: ir.Value) -> ir.Value:
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
