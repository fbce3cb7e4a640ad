"""Between observing a float graph and placing INT8 in it: folds, ranges, rounded weights, corrected biases."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.graph.analysis.linears import find_linears
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.passes.image_norm import image_bounds
from vitdeploy.quantization.backend import QUANTIZE
from vitdeploy.quantization.channel_split import smooth_hidden
from vitdeploy.quantization.channels import scale_channels
from vitdeploy.quantization.fold import Fold, Folding, FoldRequest, Hidden
from vitdeploy.quantization.ranges import QuantizedWeight, Range, range_of
from vitdeploy.quantization.rounding import Rounded, round_linear
from vitdeploy.quantization.scores import output_of, smooth_scores
from vitdeploy.quantization.smoothing import smooth_norms, smooth_values
from vitdeploy.quantization.statistics import Statistics
from vitdeploy.spec import WeightBits

# In the order in which they help each other: those that cost nothing at inference come before those that add operators.
FOLDS: tuple[Folding, ...] = (smooth_norms, smooth_values, smooth_scores, smooth_hidden, scale_channels)
# What other images reach beyond the calibration images. Folds that give every channel the same range leave no room.
MARGIN = 0.1


@dataclass(frozen=True)
class Overrides:
    """Overrides that a search found for single layers, by name: `scaled`, where hidden channels in front are scaled or
    copied for any gain, and `clipped`, where the input's range is clipped to a share of itself."""

    scaled: tuple[str, ...] = ()
    clipped: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Prepared:
    """Data of the prepared graph for a placement: the range of each layer's input, and the rounded weights.

    `folds` and `hidden` record the changes; `biases` are the original values of the corrected ones.
    """

    ranges: dict[str, Range]
    weights: dict[str, QuantizedWeight]
    folds: tuple[Fold, ...]
    hidden: tuple[Hidden, ...]
    biases: dict[str, npt.NDArray[np.float32] | None]


def prepare(
    model: ir.Model,
    statistics: Mapping[str, Statistics],
    layers: Collection[str],
    target: str,
    overrides: Overrides | None = None,
    bits: WeightBits = 8,
    dynamic: Collection[str] = (),
    rounding: Rounded | None = None,
) -> Prepared:
    """Make a float graph easier to quantize, in place: except for corrected biases, its function stays the same.

    Args:
        statistics: statistics of the input of every layer, by tensor name.
        layers: names of the layers that will be computed in INT8.
        target: its costs decide which gain justifies an operator.
        overrides: precision overrides of single layers.
        bits: bits of the weights; with fewer than 8, attention scores stay float.
        dynamic: names of layers that get weights in INT8 alone. Nothing is folded for their inputs, and their weights
            are rounded for an input without errors: what the runtime makes of it is near enough.
        rounding: what other placements of the model have rounded.
    """
    overrides = overrides or Overrides()
    known = widened(statistics)
    known |= _of_pixels(model, known)
    if bits < 8:
        known = _without_outputs(model, known)
    request, done = FoldRequest(layers, QUANTIZE[target].gain_threshold, overrides.scaled, bits), list[Fold | Hidden]()
    for fold in FOLDS:
        known, records = fold(model, known, request)
        done += records
    ranges = {name: range_of(found) for name, found in known.items()}
    editor, weights, biases = Editor(model), {}, {}
    for linear in editor.linears:
        name, found = str(linear.input.name), known.get(str(linear.input.name))
        if found is None or (linear.name not in layers and linear.name not in dynamic):
            continue
        if linear.name in overrides.clipped:
            ranges[name] = range_of(found).times(overrides.clipped[linear.name])
        step = 0.0 if linear.name in dynamic else None
        weights[linear.name], bias = (rounding or round_linear)(linear, found, bits, step)
        if linear.bias is not None or linear.kind == "conv" or not linear.output.is_graph_output():
            biases[linear.name] = linear.bias
            editor.set_linear(linear, bias=bias)
    folds = tuple(each for each in done if isinstance(each, Fold))
    return Prepared(ranges, weights, folds, tuple(each for each in done if isinstance(each, Hidden)), biases)


def widened(statistics: Mapping[str, Statistics]) -> dict[str, Statistics]:
    """The range with a margin for other images."""
    return {name: found.widened(MARGIN) for name, found in statistics.items()}


def _without_outputs(model: ir.Model, known: Mapping[str, Statistics]) -> dict[str, Statistics]:
    """Without the outputs of linears, so that no score is in INT8: a key of another image may leave the calibrated
    range, and so the 7 bits, and where these are needed no runtime fuses INT8 scores."""
    outputs = {output_of(linear) for linear in find_linears(model)}
    return {name: found for name, found in known.items() if name not in outputs}


def _of_pixels(model: ir.Model, known: Mapping[str, Statistics]) -> dict[str, Statistics]:
    """The ranges, with the bounds of all images for tensors that are pixels."""
    bounds = {str(linear.input.name): image_bounds(linear) for linear in find_linears(model)}
    return {
        name: replace(known[name], low=each[0], high=each[1])
        for name, each in bounds.items()
        if each is not None and name in known
    }
