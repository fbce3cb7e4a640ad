"""Maps the model's input back to the original image, through resize and crop."""

from __future__ import annotations

from dataclasses import dataclass

from vitdeploy.runtime.preprocess import crop_start, resized_size
from vitdeploy.runtime.topdown import cutout
from vitdeploy.spec import PreprocessSpec


@dataclass(frozen=True)
class Window:
    """The part of the original image that the model's input shows, in its pixels: left, top, right, bottom.

    Coordinates are continuous: pixel i covers i to i + 1. The edges are outside of the image where the input is padded.
    """

    left: float
    top: float
    right: float
    bottom: float


def input_window(size: tuple[int, int], spec: PreprocessSpec) -> Window:
    """The window of an image of `size` (width, height) that `preprocess.resize_and_crop` makes the model's input of."""
    if spec.fit == "topdown":
        return _of_cutout(size, spec)
    if spec.fit == "longest-pad":
        (width, height), (scaled_width, scaled_height) = size, resized_size(*size, spec)
        return Window(0, 0, spec.crop[1] * width / scaled_width, spec.crop[0] * height / scaled_height)
    edges = []
    for original, scaled, crop in zip(size, resized_size(*size, spec), reversed(spec.crop), strict=True):
        start = crop_start(scaled, crop, spec.crop_rounding)
        edges.append((start * original / scaled, (start + crop) * original / scaled))
    (left, right), (top, bottom) = edges
    return Window(left, top, right, bottom)


def _of_cutout(size: tuple[int, int], spec: PreprocessSpec) -> Window:
    """The window of a top-down model that sees the whole image: half a pixel more than from first to last centre."""
    sides = spec.crop[1], spec.crop[0]
    found = cutout((0, 0, *size), sides)
    half = [float(side) / 2 * count / (count - 1) for side, count in zip(found.sides, sides, strict=True)]
    x, y = (float(value) + 0.5 for value in found.centre)
    return Window(x - half[0], y - half[1], x + half[0], y + half[1])
