"""The error that INT8 is expected to make at the outputs of linears and convolutions: what folds are chosen by."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vitdeploy.quantize.products import Products
from vitdeploy.quantize.ranges import Range, largest_weight
from vitdeploy.quantize.statistics import Statistics
from vitdeploy.spec import WeightBits


def range_of(found: Statistics) -> Range:
    """From the smallest to the largest value of all channels."""
    return Range(float(found.low.min()), float(found.high.max()))


def step_of(bounds: Range) -> float:
    """The distance of two neighbours of uint8 on a range, widened to hold zero."""
    return (max(bounds.high, 0.0) - min(bounds.low, 0.0)) / 255


def expected_error(
    found: Statistics, weights: Sequence[npt.NDArray[np.floating]], step: float | None = None, bits: WeightBits = 8
) -> float:
    """The expected squared error of a row of x W, over all W [in, out], with uint8 x and int8 columns of W.

    Rounding errors are taken as independent and uniform, step^2 / 12 each. The mean of what the rounding of the weights
    does is left out: a corrected bias takes it away.

    Args:
        step: that of x, where it is not the one of its whole range.
        bits: of the weights.
    """
    step = step_of(range_of(found)) if step is None else step
    power, total = float(found.variance.sum()), 0.0
    for weight in weights:
        columns = np.abs(weight).max(axis=0) / largest_weight(bits)
        total += step**2 * float((weight**2).sum()) + power * float((columns**2).sum())
    return total / 12


def products_error(found: Statistics, layer: Products, step: float, bits: WeightBits = 8) -> float:
    """The same for one output of any layer, summed over its channels, as the mean over all positions."""
    power = (found.variance[layer.channels] * layer.inside).sum(axis=-1)
    columns = np.abs(layer.weights).max(axis=1) / largest_weight(bits)
    seen = (layer.weights**2).sum(axis=(0, 2)) @ layer.inside
    return float(step**2 * seen + (power[:, None] * columns**2).sum()) / 12
