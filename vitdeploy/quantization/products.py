"""Linears and convolutions as the matrix products that INT8 kernels compute.

A convolution is, in each of its groups, the product of a row that holds all values under its kernel (im2col) with a
matrix. So quantization treats both alike (the weight of an input channel, the effect of weight errors on the outputs).
The expected INT8 error of the outputs decides which folds are chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from vitdeploy.graph.analysis.rows import Linear
from vitdeploy.quantization.ranges import largest_weight, range_of, step_of
from vitdeploy.quantization.statistics import Statistics
from vitdeploy.spec import WeightBits

Numbers = npt.NDArray[np.float64]
Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True)
class Products:
    """The weights of one layer, and what stands in front of them.

    weights: [groups, rows, outputs of a group]; a linear is one group, of its input channels.
    channels: int64 [groups, rows], the input channel that each row of weights multiplies.
    inside: float64 [rows], the share of all output positions where that channel is read and not the padding.
    """

    weights: Numbers
    channels: npt.NDArray[np.int64]
    inside: Numbers

    @staticmethod
    def of_rows(weight: npt.NDArray[np.floating]) -> Products:
        """The product of a linear, from its weight [in, out]."""
        return Products(weight[None].astype(np.float64), np.arange(len(weight))[None], np.ones(len(weight)))

    @property
    def taps(self) -> int:
        """Rows in succession that multiply the same channel: the positions under the kernel."""
        return int((self.channels[0] == self.channels[0, 0]).sum())

    def strongest(self, width: int) -> Numbers:
        """The largest weight that each of `width` input channels meets, [width]."""
        largest = np.zeros(width)
        np.maximum.at(largest, self.channels, np.abs(self.weights).max(axis=-1))
        return largest

    def scaled(self, scale: Numbers) -> Products:
        """The products for an input whose channels were divided by `scale` [channels]."""
        return replace(self, weights=self.weights * scale[self.channels][..., None])

    def of_constant(self, values: Numbers, weights: Numbers | None = None) -> Numbers:
        """The mean over all output positions, [outputs], for an input with these `values` [channels] everywhere.

        Args:
            weights: others than the layer's, in the shape of its own.
        """
        weights = self.weights if weights is None else weights
        result: Numbers = np.einsum("gr,gro->go", values[self.channels] * self.inside, weights).ravel()
        return result


def products_of(linear: Linear) -> Products:
    """The weights of a linear or convolution as products."""
    if linear.kind == "matmul":
        return Products.of_rows(linear.weight)
    groups, (outputs, inputs) = linear.groups, linear.weight.shape[:2]
    weights = linear.weight.reshape(groups, outputs // groups, -1).transpose(0, 2, 1).astype(np.float64)
    taps = weights.shape[1] // inputs
    channels = np.arange(groups)[:, None] * inputs + np.repeat(np.arange(inputs), taps)
    return Products(weights, channels, np.tile(_inside(linear), inputs))


def weight_of(linear: Linear, weights: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """Weights in the shape of `Products.weights`, in the shape that the layer has them in."""
    weights = weights[0] if linear.kind == "matmul" else weights.transpose(0, 2, 1)
    return weights.reshape(linear.weight.shape)


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
    """The expected squared error of one output of any layer, summed over its channels, in the mean of all
    positions."""
    power = (found.variance[layer.channels] * layer.inside).sum(axis=-1)
    columns = np.abs(layer.weights).max(axis=1) / largest_weight(bits)
    seen = (layer.weights**2).sum(axis=(0, 2)) @ layer.inside
    return float(step**2 * seen + (power[:, None] * columns**2).sum()) / 12


def _inside(linear: Linear) -> Numbers:
    """[taps]: 1 without padding, and where sizes or the padding are only known when the graph runs."""
    kernel = linear.weight.shape[2:]
    sizes = list(linear.input.shape)[2:] if linear.input.shape is not None else []
    attributes, axes = linear.node.attributes, len(kernel)
    pads = attributes.get_ints("pads", ()) or ()
    shares = np.ones(1)
    for axis, taps in enumerate(kernel):
        share, size = np.ones(taps), sizes[axis] if axis < len(sizes) else None
        if len(pads) == 2 * axes and isinstance(size, int) and linear.padded:
            stride, dilation = (
                (attributes.get_ints(name, ()) or (1,) * axes)[axis] for name in ("strides", "dilations")
            )
            before, after = pads[axis], pads[axes + axis]
            count = (size + before + after - dilation * (taps - 1) - 1) // stride + 1
            position = np.arange(count) * stride - before + np.arange(taps)[:, None] * dilation
            share = ((position >= 0) & (position < size)).mean(axis=1)
        shares = np.outer(shares, share).ravel()
    return shares
