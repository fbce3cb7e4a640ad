"""Map the pixels of a model's input to the original image, and decode large JPEG files at reduced size."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vitdeploy.runtime import preprocess, topdown
from vitdeploy.spec import PreprocessSpec

if TYPE_CHECKING:
    from PIL import Image


# --- Maps the model's input back to the original image, through resize and crop ---------------------------------------


@dataclass(frozen=True)
class Window:
    """The part of the original image that the model's input shows, in its pixels: left, top, right, bottom.

    Coordinates are continuous: pixel i covers i to i + 1. Edges lie outside the image if the input is padded.
    """

    left: float
    top: float
    right: float
    bottom: float


def input_window(size: tuple[int, int], spec: PreprocessSpec) -> Window:
    """Return the window of an image of `size` (width, height) from which `preprocess.resize_and_crop` makes the model's
    input."""
    if spec.fit == "topdown":
        return _of_cutout(size, spec)
    if spec.fit == "longest-pad":
        (width, height), (scaled_width, scaled_height) = size, preprocess.resized_size(*size, spec)
        return Window(0, 0, spec.crop[1] * width / scaled_width, spec.crop[0] * height / scaled_height)
    edges = []
    for original, scaled, crop in zip(size, preprocess.resized_size(*size, spec), reversed(spec.crop), strict=True):
        start = preprocess.crop_start(scaled, crop, spec.crop_rounding)
        edges.append((start * original / scaled, (start + crop) * original / scaled))
    (left, right), (top, bottom) = edges
    return Window(left, top, right, bottom)


def _of_cutout(size: tuple[int, int], spec: PreprocessSpec) -> Window:
    """The window of a top-down model that sees the whole image: half a pixel more than from first to last centre."""
    sides = spec.crop[1], spec.crop[0]
    cutout = topdown.cutout((0, 0, *size), sides)
    half = [float(side) / 2 * count / (count - 1) for side, count in zip(cutout.sides, sides, strict=True)]
    x, y = (float(value) + 0.5 for value in cutout.centre)
    return Window(x - half[0], y - half[1], x + half[0], y + half[1])


# --- Decode JPEG files much larger than the resized image at 1/2, 1/4 or 1/8 of their size ----------------------------
# libjpeg then computes the lower frequencies alone (its DCT scaling), and skips most of the work. The pixels differ
# from the reference in `preprocess`; docs/results/performance.md says by how much.


# Minimum decoded pixels per resized pixel along each side, so that resizing still averages: with 1 the mean difference
# from the reference is 2.0 grey levels, with 2 it is 0.6.
OVERSAMPLING = 2


@dataclass(frozen=True)
class ReducedImage:
    """Decoded pixels, the box of them that the image covers, and the original (width, height)."""

    image: Image.Image
    covered: topdown.Box
    size: tuple[int, int]


def decode_reduced(source: preprocess.ImageSource, spec: PreprocessSpec) -> ReducedImage | None:
    """Return a JPEG file decoded at reduced size; None if `preprocess` must decode the source: a JPEG that is too
    small, not in colour, rotated or broken, another format, or not a file.

    Raises:
        MissingFileError, ImageError: a missing file, or one that is too large, as `preprocess.decode`.
    """
    content = preprocess.file_of(source)
    if content is None or spec.channels != 3 or spec.fit == "topdown":
        return None
    try:
        return _decode(content, spec)
    except Exception:  # decoders raise many kinds of errors; `preprocess` reports what is wrong
        return None


def _decode(content: bytes | bytearray, spec: PreprocessSpec) -> ReducedImage | None:
    from PIL import Image

    preprocess.check_scans(content, "the image")
    image = Image.open(io.BytesIO(content), formats=("JPEG",))
    size = image.size
    width, height = preprocess.resized_size(*size, spec)
    if image.mode != "RGB" or max(size[0] * size[1], width * height) > preprocess.MAX_PIXELS:
        return None
    if preprocess.orientation_of(image) != 1:
        return None
    chosen = image.draft("RGB", (OVERSAMPLING * width, OVERSAMPLING * height))
    if chosen is None or image.size == size:
        return None
    image.load()
    return ReducedImage(image, chosen[1], size)


def resize_reduced(reduced: ReducedImage, spec: PreprocessSpec) -> preprocess.Pixels:
    """Return uint8 [crop height, crop width, channels], like `preprocess.resize_and_crop` of the whole image."""
    from PIL import Image

    size = preprocess.resized_size(*reduced.size, spec)
    resized = reduced.image.resize(size, Image.Resampling[spec.interpolation.upper()], box=reduced.covered)
    return preprocess.crop_resized(resized, spec)
