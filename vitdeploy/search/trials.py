"""Trials of a search: what is tried, what it costs, which are kept."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.compilation.engine import compile_engine
from vitdeploy.graph.analysis.rows import Linear, count_int8, find_linears
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.io.files import save_graph
from vitdeploy.quantization.channel_split import ANY_GAIN, ChannelSplit, best_split, hidden_first
from vitdeploy.quantization.placement import QUANTIZE, check_calibrated, choose, shape
from vitdeploy.quantization.prepare import Overrides, Prepared, prepare, widened
from vitdeploy.quantization.ranges import Range, output_of, range_of, symmetric_step
from vitdeploy.quantization.rounding import round_linear
from vitdeploy.quantization.statistics import Statistics
from vitdeploy.runtime.engine import make_runner
from vitdeploy.runtime.runner import Array
from vitdeploy.search.expected import Expected
from vitdeploy.search.graphs import Choice, Form, ReferenceOutputs, SwitchedRunner, write_switched
from vitdeploy.search.latency import Shape, shapes_of
from vitdeploy.spec import FloatRest, Precision, WeightBits

# --- One trial: a placement compiled for its target, run on the images of the reference outputs, and discarded --------


def answers_of(
    model: ir.Model,
    target: str,
    precision: Precision,
    reference_outputs: ReferenceOutputs,
    float_rest: FloatRest = "fp32",
) -> dict[str, Array]:
    """The outputs of a placement on its own runtime, [images, ...] by name.

    Raises:
        EngineError, CapabilityError: as `compilation.engine.compile_engine`.
    """
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        graph, out = Path(folder) / "model.onnx", Path(folder) / "engine"
        out.mkdir()
        save_graph(model, graph)
        placed = count_int8(model)
        engine = compile_engine(
            graph,
            out,
            target=target,
            precision=precision,
            batch=reference_outputs.batch,
            placed=placed,
            float_rest=float_rest,
        )
        with make_runner(out, engine) as runner:
            return reference_outputs.ask(runner)


# --- The result of a mixed-precision search: layers whose precision or ranges differ from those of plain INT8 ---------


@dataclass(frozen=True)
class PrecisionOverride:
    """One layer's override. `share`: of its range, if that is clipped; `price_us`: what it adds to the latency of one
    image (negative: it is faster); `left`: the share of the layer's cost that remains."""

    kind: Literal["clipped", "scaled", "float"]
    layer: str
    price_us: float
    left: float = 0.0
    share: float | None = None

    def __str__(self) -> str:
        return {
            "float": f"{self.layer} in float",
            "scaled": f"{self.layer}: hidden channels scaled",
            "clipped": f"{self.layer}: {100 * (self.share or 1):.0f} % of its range",
        }[self.kind]


@dataclass(frozen=True)
class Reached:
    """A mean distance over the images, and the expected loss of a classifier's answers; None for other tasks."""

    distance: float
    expected: Expected | None


@dataclass(frozen=True)
class Taken:
    """A chosen override, and the result that was predicted for it."""

    override: PrecisionOverride
    reached: Reached


@dataclass(frozen=True)
class Mixed:
    """`int8`, `reached`: measured without and with all overrides; `saved_us`: the time that INT8 saves over all layers;
    `met`: whether the budget's bounds are expected to be met, None without any."""

    target: str
    images: int
    int8: Reached
    reached: Reached
    saved_us: float
    taken: tuple[Taken, ...]
    met: bool | None

    @property
    def float_fallback(self) -> tuple[str, ...]:
        """The layers left in float."""
        return tuple(each.override.layer for each in self.taken if each.override.kind == "float")

    @property
    def overrides(self) -> Overrides:
        """The other overrides, of layers that stay in INT8."""
        kept = [each.override for each in self.taken if each.override.layer not in self.float_fallback]
        scaled = tuple(override.layer for override in kept if override.kind == "scaled")
        return Overrides(scaled, {override.layer: override.share for override in kept if override.share is not None})


# --- Many trials of one model in INT8: the distance of its answers with given layers in given forms -------------------


PLAIN, SCALED = 0, 1
FLOAT = Choice(None)


@dataclass(frozen=True)
class Layer:
    """One layer that a target computes in INT8.

    `tensor`, `found`: its input in the float graph, and the statistics there. `bounds`, `readers`: the range of its
    input after all folds, and the layers that read the same input, including itself. `scaled`: how its hidden channels
    are split if any gain justifies the operators; None if that brings nothing more.
    """

    name: str
    tensor: str
    found: Statistics
    shape: Shape
    bounds: Range
    readers: tuple[str, ...]
    scaled: ChannelSplit | None


class Trials:
    """Runs a prepared model on the images of the reference outputs. Use `opened`.

    `whole`: reference outputs of more images, for the few trials of all layers at once.
    """

    def __init__(
        self,
        runner: SwitchedRunner,
        reference_outputs: ReferenceOutputs,
        whole: ReferenceOutputs,
        layers: Sequence[Layer],
        prepared: Prepared,
    ) -> None:
        self._runner, self.reference_outputs, self.whole = runner, reference_outputs, whole
        self.layers, self.prepared = tuple(layers), prepared

    @property
    def images(self) -> int:
        return len(self.reference_outputs.pixels)

    def answers(self, choices: Mapping[str, Choice]) -> dict[str, Array]:
        """The outputs for all images of `whole`, with these layers in these forms, and all others in plain INT8."""
        self._runner.choose(choices)
        return self.whole.ask(self._runner)

    def distance(self, choices: Mapping[str, Choice]) -> npt.NDArray[np.float64]:
        """The distance per image, [images], with these layers in these forms, and all others in plain INT8."""
        self._runner.choose(choices)
        return self.reference_outputs.distance(self.reference_outputs.ask(self._runner))

    def only(self, choices: Mapping[str, Choice]) -> npt.NDArray[np.float64]:
        """The distance per image, [images], with these layers in these forms, and all others in float."""
        return self.distance({**{layer.name: FLOAT for layer in self.layers}, **choices})


def reached_by(answers: Mapping[str, Array], whole: ReferenceOutputs) -> Reached:
    """What answers to all images of the reference outputs say of an engine that gives them."""
    return Reached(float(whole.distance(answers).mean()), whole.expected(answers))


@contextmanager
def opened(
    model: ir.Model,
    statistics: Mapping[str, Statistics],
    target: str,
    reference_outputs: ReferenceOutputs,
    ignore: Sequence[str] = (),
    whole: ReferenceOutputs | None = None,
    bits: WeightBits = 8,
) -> Iterator[Trials]:
    """Trials of a float graph, which is changed in place, on the layers that `target` computes in INT8.

    Args:
        statistics: of the input of every layer, by tensor name.
        ignore: as of `placement.choose`.
        whole: as of `Trials`; by default the reference outputs themselves.
        bits: of the weights.

    Raises:
        TargetError, GraphError: as `placement.choose`; or a layer was not calibrated.
    """
    shape(model, target, ignore)
    names = choose(model, target, ignore).int8
    before = [linear for linear in find_linears(model) if linear.name in names]
    check_calibrated(before, statistics)
    tensors = {linear.name: str(linear.input.name) for linear in before}
    prepared = prepare(model, statistics, names, target, bits=bits)
    shapes = shapes_of(model, names)
    linears = [linear for linear in find_linears(model) if linear.name in names]
    splits = _splits(model, statistics, prepared, names, bits)
    steps = _output_steps(model, names, prepared, target)
    forms = {each.name: _forms(each, prepared, splits.get(each.name), steps.get(each.name), bits) for each in linears}
    layers = [
        Layer(
            linear.name,
            tensors[linear.name],
            statistics[tensors[linear.name]],
            shapes[linear.name],
            forms[linear.name][PLAIN].bounds,
            tuple(each.name for each in linears if each.input is linear.input),
            splits.get(linear.name),
        )
        for linear in linears
    ]
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        file = Path(folder) / "model.onnx"
        write_switched(model, forms, prepared.biases, file)
        runner = SwitchedRunner(file, forms, batch=reference_outputs.batch)
        with runner:
            yield Trials(runner, reference_outputs, whole or reference_outputs, layers, prepared)


def _splits(
    model: ir.Model,
    statistics: Mapping[str, Statistics],
    prepared: Prepared,
    names: Collection[str],
    bits: WeightBits,
) -> dict[str, ChannelSplit]:
    """The channel splits per layer for any gain, for layers that `prepare` left alone."""
    editor, known = Editor(model), widened(statistics)
    split_already = {each.layer for each in prepared.hidden}
    found: dict[str, ChannelSplit] = {}
    for linear in editor.linears:
        if linear.name in names and linear.name not in split_already and hidden_first(editor, linear) is not None:
            split = best_split(known[str(linear.input.name)], linear, ANY_GAIN, bits)
            if split is not None:
                found[linear.name] = split
    return found


def _output_steps(model: ir.Model, names: Collection[str], prepared: Prepared, target: str) -> dict[str, np.float32]:
    """The output steps of linears whose outputs are int8 too. If only one of a query and its key is in INT8, neither
    output is; trials ignore that difference."""
    found = QUANTIZE[target].scores_in_int8(model, names, prepared.ranges)
    return {
        linear.name: symmetric_step(prepared.ranges[output_of(linear)])
        for scores in found
        for linear in (scores.query, scores.key)
    }


def _forms(
    linear: Linear, prepared: Prepared, split: ChannelSplit | None, output: np.float32 | None, bits: WeightBits
) -> list[Form]:
    bounds = prepared.ranges[str(linear.input.name)]
    forms = [Form(bounds, prepared.weights[linear.name], linear.bias, output=output)]
    if split is not None:
        bias = prepared.biases.get(linear.name, linear.bias)
        moved = replace(linear, weight=split.weight(linear.weight).astype(np.float32), bias=bias)
        rounded, corrected = round_linear(moved, split.found, bits)
        constants = (corrected, split.factor, split.offsets)
        bias, factor, offset = (each.astype(np.float32) for each in constants)
        forms.append(Form(range_of(split.found), rounded, bias, split.source, factor, offset))
    return forms


# --- The Pareto front: the items that no other beats in one measure without being worse in the other ------------------


T = TypeVar("T")


def undominated(items: Sequence[T], distance: Callable[[T], float], faster: Callable[[T, T], bool]) -> list[T]:
    """The items that no other of at most their `distance` is proven to be `faster` than, in ascending order of it: what
    remains of a front where times prove little."""
    order = sorted(items, key=distance)
    return [
        item
        for item in order
        if not any(other is not item and distance(other) <= distance(item) and faster(other, item) for other in order)
    ]


def pareto_front(items: Sequence[T], measures: Callable[[T], tuple[float, float]]) -> list[T]:
    """The items that no other matches or beats in both measures, in ascending order of the first.

    Args:
        measures: of an item; less is better. Of items that are equal in both, the first one stays.
    """
    front: list[T] = []
    for item in sorted(items, key=measures):
        if not front or measures(item)[1] < measures(front[-1])[1]:
            front.append(item)
    return front
