"""Trials of one model in INT8: the distance of its answers with chosen layers in chosen forms."""

import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.analysis.rows import Linear, find_linears
from vitdeploy.graph.edit import Editor
from vitdeploy.progress import Progress, silent
from vitdeploy.quantization.folds import ANY_GAIN, ChannelSplit, best_split, hidden_first
from vitdeploy.quantization.placement import QUANTIZE, check_calibrated, choose, shape
from vitdeploy.quantization.prepare import Prepared, prepare, widened
from vitdeploy.quantization.ranges import Range, Statistics, output_of, range_of, symmetric_step
from vitdeploy.quantization.rounding import round_linear
from vitdeploy.runtime.runner import Array
from vitdeploy.search import frame, gradients, graphs
from vitdeploy.search.layers import Shape, shapes_of
from vitdeploy.spec import WeightBits

PLAIN, SCALED = 0, 1
FLOAT = graphs.LayerChoice(None)


@dataclass(frozen=True)
class TrialLayer:
    """One layer that a target computes in INT8.

    `tensor`, `found`: its input in the float graph, and the statistics of it. `bounds`, `readers`: the range of its
    input after all folds, and the layers that read the same input, including itself. `scaled`: the split of its hidden
    channels if any gain justifies the operators; None if that adds nothing.
    """

    name: str
    tensor: str
    found: Statistics
    shape: Shape
    bounds: Range
    readers: tuple[str, ...]
    scaled: ChannelSplit | None


@dataclass(frozen=True)
class Trials:
    """Runs a prepared model on the images of the reference outputs. Use `opened`.

    `whole`: reference outputs of more images, for the few trials of all layers at once. `model`: the prepared float
    graph; `forms`: the plain INT8 forms of its layers.
    """

    runner: graphs.SwitchedRunner
    model: ir.Model
    forms: Mapping[str, graphs.LayerForm]
    reference_outputs: frame.ReferenceOutputs
    whole: frame.ReferenceOutputs
    layers: tuple[TrialLayer, ...]
    prepared: Prepared

    @property
    def images(self) -> int:
        return len(self.reference_outputs.pixels)

    def answers(self, choices: Mapping[str, graphs.LayerChoice]) -> dict[str, Array]:
        """The outputs for all images of `whole`, with these layers in these forms, and all others in plain INT8."""
        self.runner.choose(choices)
        return self.whole.ask(self.runner)

    def distance(self, choices: Mapping[str, graphs.LayerChoice]) -> frame.Distances:
        """The distance per image, [images], with these layers in these forms, and all others in plain INT8."""
        self.runner.choose(choices)
        return self.reference_outputs.distance(self.reference_outputs.ask(self.runner))

    def estimated(self, progress: Progress = silent) -> tuple[dict[str, frame.Distances], tuple[str, ...]]:
        """Estimate `only` for each layer in plain INT8 by gradients, see `gradients.estimate_costs`."""
        self.runner.close()  # frees its weights, since gradients need as much memory again
        try:
            biases = self.prepared.biases
            return gradients.estimate_costs(self.model, self.forms, biases, self.reference_outputs, progress)
        finally:
            self.runner.load()

    def only(self, choices: Mapping[str, graphs.LayerChoice]) -> frame.Distances:
        """The distance per image, [images], with these layers in these forms, and all others in float."""
        return self.distance({**{layer.name: FLOAT for layer in self.layers}, **choices})


@contextmanager
def opened(
    model: ir.Model,
    statistics: Mapping[str, Statistics],
    target: str,
    reference_outputs: frame.ReferenceOutputs,
    ignore: Sequence[str] = (),
    whole: frame.ReferenceOutputs | None = None,
    bits: WeightBits = 8,
    *,
    scaled: bool = True,
) -> Iterator[Trials]:
    """Trials of a float graph, which is changed in place, on the layers that `target` computes in INT8.

    Args:
        statistics: statistics of the input of every layer, by tensor name.
        ignore: as in `placement.choose`.
        whole: as in `Trials`; by default the reference outputs themselves.
        bits: the bits of the weights.
        scaled: whether layers also have a form with their hidden channels scaled for any gain.

    Raises:
        TargetError, GraphError: as `placement.choose`; or a layer was not calibrated.
    """
    shape(model, target, ignore)
    chosen = choose(model, target, ignore)
    names = chosen.int8
    before = [linear for linear in find_linears(model) if linear.name in names]
    check_calibrated(before, statistics)
    tensors = {linear.name: str(linear.input.name) for linear in before}
    prepared = prepare(model, statistics, chosen, bits)
    shapes = shapes_of(model, names)
    linears = [linear for linear in find_linears(model) if linear.name in names]
    splits = _splits(model, statistics, prepared, names, bits) if scaled else {}
    steps = _output_steps(model, names, prepared, target)
    forms = {each.name: _forms(each, prepared, splits.get(each.name), steps.get(each.name), bits) for each in linears}
    layers = tuple(
        TrialLayer(
            linear.name,
            tensors[linear.name],
            statistics[tensors[linear.name]].without_covariance(),
            shapes[linear.name],
            forms[linear.name][PLAIN].bounds,
            tuple(each.name for each in linears if each.input is linear.input),
            splits.get(linear.name),
        )
        for linear in linears
    )
    del statistics  # possibly the last reference to covariances that are larger than the model
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        file, plain = Path(folder) / "model.onnx", model.clone()
        graphs.write_switched(model, forms, prepared.biases, file)
        runner = graphs.SwitchedRunner(file, forms, batch=reference_outputs.batch)
        with runner:
            of_layers = {name: each[PLAIN] for name, each in forms.items()}
            yield Trials(runner, plain, of_layers, reference_outputs, whole or reference_outputs, layers, prepared)


def _splits(
    model: ir.Model,
    statistics: Mapping[str, Statistics],
    prepared: Prepared,
    names: Collection[str],
    bits: WeightBits,
) -> dict[str, ChannelSplit]:
    """The channel splits for any gain, by layer, for layers that `prepare` did not split."""
    editor, known = Editor(model), widened(statistics)
    split_already = {each.layer for each in prepared.hidden}
    splits: dict[str, ChannelSplit] = {}
    for linear in editor.linears:
        if linear.name in names and linear.name not in split_already and hidden_first(editor, linear) is not None:
            split = best_split(known[str(linear.input.name)], linear, ANY_GAIN, bits)
            if split is not None:
                splits[linear.name] = split
    return splits


def _output_steps(model: ir.Model, names: Collection[str], prepared: Prepared, target: str) -> dict[str, np.float32]:
    """The output steps of linears whose outputs are int8 too. If only one of a query and its key is in INT8, neither
    output is; trials ignore that difference."""
    all_scores = QUANTIZE[target].scores_in_int8(model, names, prepared.ranges)
    return {
        linear.name: symmetric_step(prepared.ranges[output_of(linear)])
        for scores in all_scores
        for linear in (scores.query, scores.key)
    }


def _forms(
    linear: Linear, prepared: Prepared, split: ChannelSplit | None, output: np.float32 | None, bits: WeightBits
) -> list[graphs.LayerForm]:
    bounds = prepared.ranges[str(linear.input.name)]
    forms = [graphs.LayerForm(bounds, prepared.weights[linear.name], linear.bias, output=output)]
    if split is not None:
        bias = prepared.biases.get(linear.name, linear.bias)
        moved = replace(linear, weight=split.weight(linear.weight).astype(np.float32), bias=bias)
        rounded, corrected = round_linear(moved, split.found, bits)
        constants = (corrected, split.factor, split.offsets)
        bias, factor, offset = (constant.astype(np.float32) for constant in constants)
        forms.append(graphs.LayerForm(range_of(split.found), rounded, bias, split.source, factor, offset))
    return forms
