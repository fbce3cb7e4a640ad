"""The part of an image that a top-down model sees for one object's box.

The box is enlarged to the input's aspect ratio, then by a quarter, and sampled bilinearly at the input's pixels, whose
first and last centres are on the edges of the enlarged box. Pixels outside the image are black. This is mmpose's
TopDownAffine without rotation in its unbiased form (arXiv 1911.07524, equation 8), which transformers'
VitPoseImageProcessor computes with SciPy; pixels are equal, except for ties in rounding to whole grey levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import InputError

if TYPE_CHECKING:
    from PIL import Image

# (left, top, right, bottom) in pixels of the image, in continuous coordinates.
Box = tuple[float, float, float, float]
PADDING = 1.25
# The library's unit of box sizes in float32; this code reproduces its arithmetic bit for bit.
UNIT = 200.0


@dataclass(frozen=True)
class Cutout:
    """A cut-out of an image: its centre and its sides in pixels, each float32 [2], x and y."""

    centre: npt.NDArray[np.float32]
    sides: npt.NDArray[np.float32]


def cutout(box: Sequence[float], size: tuple[int, int]) -> Cutout:
    """Return the enlarged box, for an input of `size` (width, height).

    Raises:
        InputError: not four finite numbers, or an empty box.
    """
    try:
        values = [float(value) for value in box]
    except (TypeError, ValueError):  # a single number, or text
        values = []
    if len(values) != 4 or not all(map(math.isfinite, values)) or values[2] <= values[0] or values[3] <= values[1]:
        raise InputError(
            "invalid box",
            found=repr(box)[:80],
            expected="left, top, right, bottom in pixels, with left < right and top < bottom",
        )
    left, top, right, bottom = values
    width, height = right - left, bottom - top
    centre = np.array([left + width * 0.5, top + height * 0.5], np.float32)
    aspect = size[0] / size[1]
    if width > aspect * height:
        height = width / aspect
    else:
        width = height * aspect
    scale = np.array([width / UNIT, height / UNIT], np.float32) * np.float32(PADDING)
    return Cutout(centre, scale * np.float32(UNIT))


def cut_out(image: Image.Image, box: Sequence[float] | None, size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Return the content of a box, or of the whole decoded image, as uint8 [height, width, channels]; `size` is (width,
    height).

    Raises:
        InputError: as `cutout`, or the box does not overlap the image.
    """
    width, height = image.size
    found = cutout(box if box is not None else (0, 0, width, height), size)
    if box is not None and (box[0] >= width or box[1] >= height or box[2] <= 0 or box[3] <= 0):
        raise InputError(
            "the box is outside the image",
            found=f"{tuple(map(float, box))} in an image of {width}x{height}",
            expected="left, top, right, bottom in pixels of this image",
            fix="check that the box belongs to this image, at this size",
        )
    pixels = np.asarray(image, np.uint8)
    pixels = pixels[:, :, None] if pixels.ndim == 2 else pixels
    (columns, x_share), (rows, y_share) = (
        _sampled(size[axis], found.centre[axis], found.sides[axis], image.size[axis]) for axis in (0, 1)
    )
    start = int(columns.min())
    seen = pixels[:, start : int(columns.max()) + 1]
    y_share, x_share = y_share[:, :, None, None], x_share[:, :, None]
    tall = seen[rows[0]] * y_share[0] + seen[rows[1]] * y_share[1]
    sampled = tall[:, columns[0] - start] * x_share[0] + tall[:, columns[1] - start] * x_share[1]
    return np.asarray(np.floor(sampled + 0.5), np.uint8)


def _sampled(
    count: int, centre: np.float32, side: np.float32, length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """For `count` input pixels along an axis: the two nearest image pixels of each, int64 [2, count], and their
    weights, float64 [2, count], 0 outside the image."""
    scale = np.float64(count - 1) / side
    offset = scale * (np.float32(0.5) * side - centre)
    at = (np.arange(count) - float(np.float32(offset))) / float(np.float32(scale))
    inside = (at >= 0) & (at <= length - 1)
    low = np.where(inside, np.floor(at), 0).astype(np.int64)
    share = np.where(inside, at - low, 0)
    return np.stack([low, np.minimum(low + 1, length - 1)]), np.stack([(1 - share) * inside, share * inside])


def to_image(points: npt.NDArray[Any], grid: tuple[int, int], found: Cutout) -> npt.NDArray[np.float64]:
    """Convert points [n, 2] from pixels of the model's `grid` (width, height), whose first and last centres are on the
    edges of the cut-out, to image pixels, float64 [n, 2]; 0 is the centre of the first pixel."""
    step = found.sides.astype(np.float64) / (np.array(grid) - 1.0)
    return np.asarray(points * step + found.centre - found.sides.astype(np.float64) * 0.5)
