"""Prepare a graph for quantization, and check the calibration images."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.errors import DataError
from vitdeploy.graph.analysis.rows import Linear, find_linears
from vitdeploy.graph.edit import Editor
from vitdeploy.graph.passes.folds import image_bounds
from vitdeploy.quantization.folds import (
    Fold,
    Folding,
    FoldRequest,
    Hidden,
    scale_channels,
    smooth_hidden,
    smooth_norms,
    smooth_scores,
    smooth_values,
)
from vitdeploy.quantization.observer import Arrays
from vitdeploy.quantization.placement import QUANTIZE, Placement
from vitdeploy.quantization.ranges import Numbers, QuantizedWeight, Range, Statistics, output_of, range_of
from vitdeploy.quantization.rounding import round_linear
from vitdeploy.runtime.host import usable_cores
from vitdeploy.spec import PreprocessSpec, WeightBits

# --- Between observing a float graph and placing INT8 in it: folds, ranges, rounded weights, corrected biases ---------


# In an order in which they help each other: folds without cost at inference before folds that add operators.
FOLDS: tuple[Folding, ...] = (smooth_norms, smooth_values, smooth_scores, smooth_hidden, scale_channels)
# Margin for images with larger values than the calibration images: folds that equalise channel ranges leave none.
MARGIN = 0.1
# Layers rounded in parallel: each needs several copies of its weight in float64.
MOST_AT_ONCE = 4


@dataclass(frozen=True)
class Prepared:
    """The data of a prepared graph for a placement: the range of each layer's input, and the rounded weights.

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
    placement: Placement,
    bits: WeightBits = 8,
) -> Prepared:
    """Make a float graph easier to quantize, in place. It computes the same function, except for corrected biases.

    Args:
        statistics: statistics of the input of every layer, by tensor name.
        placement: the precision of each layer, from `placement.choose`. The target's costs decide which gain justifies
            an operator. Inputs of "dynamic" layers get no folds, and their weights are rounded for an exact input,
            since dynamic quantization is accurate enough.
        bits: bits of the weights; with fewer than 8, attention scores stay float.
    """
    layers, dynamic = set(placement.int8), set(placement.dynamic)
    scaled = [layer.layer for layer in placement.layers if layer.scaled]
    clips = {each.layer: each.clip for each in placement.layers if each.clip is not None}
    known = widened(statistics)
    known |= _of_pixels(model, known)
    if bits < 8:
        known = _without_outputs(model, known)
    threshold = QUANTIZE[placement.target].gain_threshold
    request, done = FoldRequest(layers, threshold, scaled, bits), list[Fold | Hidden]()
    for fold in FOLDS:
        known, records = fold(model, known, request)
        done += records
    ranges = {name: range_of(found) for name, found in known.items()}
    editor, weights, biases = Editor(model), {}, {}
    linears = [each for each in editor.linears if each.name in layers | dynamic and str(each.input.name) in known]

    def rounded(linear: Linear) -> tuple[QuantizedWeight, Numbers]:
        step = 0.0 if linear.name in dynamic else None
        return round_linear(linear, known[str(linear.input.name)], bits, step)

    with ThreadPoolExecutor(min(MOST_AT_ONCE, usable_cores())) as pool:
        made = list(pool.map(rounded, linears))
    for linear, (weight, bias) in zip(linears, made, strict=True):
        name = str(linear.input.name)
        if linear.name in clips:
            ranges[name] = range_of(known[name]).times(clips[linear.name])
        weights[linear.name] = weight
        if linear.bias is not None or linear.kind == "conv" or not linear.output.is_graph_output():
            biases[linear.name] = linear.bias
            editor.set_linear(linear, bias=bias)
    folds = tuple(each for each in done if isinstance(each, Fold))
    return Prepared(ranges, weights, folds, tuple(each for each in done if isinstance(each, Hidden)), biases)


def widened(statistics: Mapping[str, Statistics]) -> dict[str, Statistics]:
    """The statistics with a margin for other images."""
    return {name: found.widened(MARGIN) for name, found in statistics.items()}


def _without_outputs(model: ir.Model, known: Mapping[str, Statistics]) -> dict[str, Statistics]:
    """The statistics without outputs of linears, so that no score is in INT8: a key of another image may exceed the
    calibrated range and so the 7 bits, and no runtime that needs 7 bits fuses INT8 scores."""
    outputs = {output_of(linear) for linear in find_linears(model)}
    return {name: found for name, found in known.items() if name not in outputs}


def _of_pixels(model: ir.Model, known: Mapping[str, Statistics]) -> dict[str, Statistics]:
    """The statistics, with the bounds of all possible images for tensors of pixels."""
    bounds = {str(linear.input.name): image_bounds(linear) for linear in find_linears(model)}
    return {
        name: replace(known[name], low=each[0], high=each[1])
        for name, each in bounds.items()
        if each is not None and name in known
    }


# --- Check the calibration images themselves, and warn if they are unsuitable -----------------------------------------


# With fewer images, ranges depend on chance.
LEAST_IMAGES = 8
# Limits for all preprocessed pixels, whose mean should be near 0 and whose deviation near 1. Photographs with any usual
# mean and std stay within 0.5 and above 0.25, pages of text within 2.2; MNIST with black and white exchanged is at 2.4,
# 12-bit images read as 16-bit are below 0.1.
FAR, FLAT = 2.25, 0.15
NAMED_IMAGES = 3


class ImageChecks:
    """Counts over the calibration images, of fixed size except for a few bytes per image. All are integers, so the
    counts of parts of the images merge to the same result in any order and grouping."""

    def __init__(self, preprocess: PreprocessSpec) -> None:
        self.preprocess = preprocess
        self.images = self.pixels = 0
        self.flat: list[int] = []
        self.digests: set[bytes] = set()
        # Sums of the values 0..255 of all pixels, and of their squares, by channel: 10^13 pixels fit.
        self.total = np.zeros(preprocess.channels, np.int64)
        self.squares = np.zeros(preprocess.channels, np.int64)

    def update(self, pixels: npt.NDArray[np.uint8]) -> None:
        """Add images, uint8 [n, height, width, channels]."""
        for image in pixels:
            if image.min() == image.max():
                self.flat.append(self.images)
            self.digests.add(hashlib.blake2b(image.tobytes(), digest_size=8).digest())
            values = image.reshape(-1, image.shape[-1]).astype(np.uint32)
            self.total += values.sum(axis=0, dtype=np.int64)
            self.squares += np.square(values).sum(axis=0, dtype=np.int64)
            self.pixels += len(values)
            self.images += 1

    def join(self, other: ImageChecks, places: npt.NDArray[np.int64]) -> None:
        """Add the counts of other images, whose numbers are `places`; keeps `flat` ascending."""
        self.images += other.images
        self.pixels += other.pixels
        self.flat = sorted([*self.flat, *places[np.array(other.flat, np.int64)].tolist()])
        self.digests |= other.digests
        self.total, self.squares = self.total + other.total, self.squares + other.squares

    @property
    def distinct(self) -> int:
        return len(self.digests)

    def warnings(self, names: Sequence[str]) -> list[str]:
        """Warnings about the images of these names, a sentence each.

        Raises:
            DataError: every image has a single colour.
        """
        if len(self.flat) == self.images:
            raise DataError(
                "every calibration image has a single colour",
                found=f"images of a single colour: {self.images} of {self.images}",
                expected="images like those that the model will see",
                fix="check the files, and that their bit depth is 8",
            )
        found = []
        if self.flat:
            found.append(
                f"{len(self.flat)} of {self.images} calibration images have a single colour and are useless: "
                f"{listed([names[i] for i in self.flat])}."
            )
        mean, std = (np.array(values) for values in self.preprocess.statistics)
        of_images = self.total / self.pixels / 255
        deviation = np.sqrt(np.maximum(self.squares / self.pixels / 255**2 - of_images**2, 0))
        unlike = (np.abs(of_images - mean) / std).mean() > FAR or (deviation / std).max() < FLAT
        if unlike and not self.preprocess.raw:
            found.append(
                "The calibration images do not match the preprocessing: their pixels in 0..1 have mean "
                f"{_shown(of_images)} and deviation {_shown(deviation)}, while preprocess has mean {_shown(mean)} and "
                f"std {_shown(std)}. Check the images, and mean and std."
            )
        return found

    def state(self) -> Arrays:
        digests = np.frombuffer(b"".join(sorted(self.digests)), np.uint8)
        counts = {"images": np.array(self.images), "pixels": np.array(self.pixels)}
        return {
            **counts,
            "flat": np.array(self.flat, np.int64),
            "digests": digests,
            "total": self.total,
            "squares": self.squares,
        }

    def restore(self, arrays: Arrays) -> None:
        """Continue from the arrays of `state`."""
        data = arrays["digests"].tobytes()
        self.images, self.pixels = int(arrays["images"]), int(arrays["pixels"])
        self.flat = arrays["flat"].tolist()
        self.digests = {data[i : i + 8] for i in range(0, len(data), 8)}
        self.total, self.squares = arrays["total"], arrays["squares"]


def listed(names: Sequence[str]) -> str:
    """The first few names, and the number of the others."""
    more = len(names) - NAMED_IMAGES
    return ", ".join(names[:NAMED_IMAGES]) + (f" and {more} more" if more > 0 else "")


def _shown(values: npt.NDArray[np.float64]) -> str:
    numbers = [f"{value:.2f}" for value in values]
    return " ".join(numbers[:1] if len(set(numbers)) == 1 else numbers)
