"""Between observing a float graph and placing INT8 in it: folds, ranges, rounded weights, corrected biases."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from vitdeploy.graph.edit import Editor
from vitdeploy.quantize.error import range_of, step_of
from vitdeploy.quantize.hidden import Hidden, smooth_hidden
from vitdeploy.quantize.placement import backend_of
from vitdeploy.quantize.ranges import QuantizedWeight, Range
from vitdeploy.quantize.rounding import round_weight
from vitdeploy.quantize.scores import smooth_scores
from vitdeploy.quantize.smoothing import Fold, smooth_norms, smooth_values
from vitdeploy.quantize.statistics import Statistics

# What other images reach beyond the calibration images. Folds that give every channel the same range leave no room.
MARGIN = 0.1


@dataclass(frozen=True)
class Prepared:
    """What a placement needs of the graph as it is now: the range of each layer's input, and the weights of linears.

    `folds` and `hidden` say what was done.
    """

    ranges: dict[str, Range]
    weights: dict[str, QuantizedWeight]
    folds: tuple[Fold, ...]
    hidden: tuple[Hidden, ...]


def prepare(model: ir.Model, statistics: Mapping[str, Statistics], layers: Collection[str], target: str) -> Prepared:
    """Make a float graph easier to quantize, in place: its function stays the same but for the corrected biases.

    Args:
        statistics: of the input of every layer, by tensor name.
        layers: the names of those that will be computed in INT8.
        target: whose costs decide what is worth an operator.
    """
    known = {name: found.widened(MARGIN) for name, found in statistics.items()}
    known, norms = smooth_norms(model, known, layers)
    known, values = smooth_values(model, known, layers)
    known, scores = smooth_scores(model, known, layers)
    known, hidden = smooth_hidden(model, known, layers, backend_of(target).WORTH)
    editor, weights = Editor(model), {}
    for linear in editor.linears:
        found = known.get(str(linear.input.name))
        if linear.kind != "matmul" or linear.name not in layers or found is None:
            continue
        rounded, scales = round_weight(linear.weight, found, step_of(range_of(found)) ** 2 / 12)
        weights[linear.name] = rounded, scales
        # E[x W + b] = E[x Q + b'], with Q the rounded weight: the mean of its error moves into the bias.
        error = linear.weight - rounded * scales
        bias = np.zeros(len(scales)) if linear.bias is None else linear.bias
        if linear.bias is not None or not linear.output.is_graph_output():
            editor.set_linear(linear, bias=bias + found.mean @ error)
    return Prepared(
        {name: range_of(found) for name, found in known.items()}, weights, (*norms, *values, *scores), tuple(hidden)
    )
