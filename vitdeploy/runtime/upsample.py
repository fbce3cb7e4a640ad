"""Enlarge maps of a model's input to the size of the original image, in numpy."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.geometry import input_window
from vitdeploy.spec import PreprocessSpec

Array = npt.NDArray[Any]

# Values per band: maps are enlarged in bands of rows, so that memory does not grow with the image.
BAND_ELEMENTS = 1 << 22
# PyTorch's coefficient of the cubic kernel (Keys 1981, equation 4).
CUBIC = -0.75


def bands(maps: Array, size: tuple[int, int], preprocess: PreprocessSpec) -> Iterator[tuple[slice, slice, Array]]:
    """Enlarge maps [n, height, width] bilinearly to the original image's size. Yield bands of rows: the rows and
    columns, and the values.

    If the input shows the whole image, this equals `torch.nn.functional.interpolate(maps, size, mode="bilinear",
    align_corners=False)`: without antialiasing, even if the image is smaller than the maps.
    """
    window = input_window(size, preprocess)
    rows, y_low, y_high, y_share = _samples(size[1], window.top, window.bottom, maps.shape[1])
    columns, x_low, x_high, x_share = _samples(size[0], window.left, window.right, maps.shape[2])
    y_share, x_share = y_share.astype(maps.dtype)[:, None], x_share.astype(maps.dtype)
    step = max(1, BAND_ELEMENTS // max(1, len(maps) * len(x_low)))
    for start in range(0, len(y_low), step):
        part = slice(start, start + step)
        tall = maps[:, y_low[part]] * (1 - y_share[part]) + maps[:, y_high[part]] * y_share[part]
        band = tall[:, :, x_low] * (1 - x_share) + tall[:, :, x_high] * x_share
        yield slice(rows.start + start, rows.start + start + band.shape[1]), columns, band


def enlarged(maps: Array, size: tuple[int, int]) -> Array:
    """Return maps [n, height, width] enlarged bilinearly to `size` (height, width), like
    `torch.nn.functional.interpolate` without antialiasing."""
    return np.concatenate([band for _, band in enlarged_bands(maps, size)], axis=1)


def enlarged_bands(maps: Array, size: tuple[int, int]) -> Iterator[tuple[slice, Array]]:
    """As `enlarged`, in bands of rows: yield the rows, and the values."""
    _, y_low, y_high, y_share = _samples(size[0], 0, size[0], maps.shape[1])
    _, x_low, x_high, x_share = _samples(size[1], 0, size[1], maps.shape[2])
    y_share, x_share = y_share.astype(maps.dtype)[:, None], x_share.astype(maps.dtype)
    step = max(1, BAND_ELEMENTS // max(1, len(maps) * len(x_low)))
    for start in range(0, len(y_low), step):
        part = slice(start, start + step)
        tall = maps[:, y_low[part]] * (1 - y_share[part]) + maps[:, y_high[part]] * y_share[part]
        yield slice(start, start + tall.shape[1]), tall[:, :, x_low] * (1 - x_share) + tall[:, :, x_high] * x_share


def nearest(
    size: tuple[int, int], preprocess: PreprocessSpec, cells: tuple[int, int]
) -> tuple[slice, slice, Array, Array]:
    """Return, for an image of `size` (width, height) and maps of `cells` (height, width), the rows and columns of the
    image in the model's input, and the row and column of the maps at each.

    If the input shows the whole image, this equals `torch.nn.functional.interpolate(maps, size, mode="nearest")`: the
    cell at the upper left corner of a pixel, computed in float32.
    """
    window = input_window(size, preprocess)
    rows, y = _corners(size[1], window.top, window.bottom, cells[0])
    columns, x = _corners(size[0], window.left, window.right, cells[1])
    return rows, columns, y, x


def bicubic(plane: Array, size: tuple[int, int], preprocess: PreprocessSpec) -> tuple[slice, slice, Array]:
    """Return a plane [height, width] enlarged bicubically to the original image's size: the rows and columns, and the
    values.

    If the input shows the whole image, this equals `torch.nn.functional.interpolate(plane, size, mode="bicubic",
    align_corners=False)`.
    """
    window = input_window(size, preprocess)
    rows, tall = _cubic(size[1], window.top, window.bottom, plane.shape[0])
    columns, wide = _cubic(size[0], window.left, window.right, plane.shape[1])
    return rows, columns, tall @ plane.astype(np.float64) @ wide.T


def _positions(length: int, start: float, stop: float, count: int) -> tuple[slice, Array]:
    """The pixels of an image side whose centres are in start..stop, which has `count` cells, and the position of each
    in cells; 0 is the centre of the first cell."""
    centres = np.arange(length) + 0.5
    inside = np.flatnonzero((centres >= start) & (centres <= stop))
    first = int(inside[0]) if len(inside) else 0
    return slice(first, first + len(inside)), (centres[inside] - start) * count / (stop - start) - 0.5


def _corners(length: int, start: float, stop: float, count: int) -> tuple[slice, Array]:
    """The pixels of `_positions`, and the cell at the first edge of each."""
    pixels, _ = _positions(length, start, stop, count)
    edges = (np.arange(pixels.start, pixels.stop) - start).astype(np.float32)
    cells = np.floor(edges * (np.float32(count) / np.float32(stop - start))).astype(np.int64)
    return pixels, np.clip(cells, 0, count - 1)


def _samples(length: int, start: float, stop: float, count: int) -> tuple[slice, Array, Array, Array]:
    """The pixels of `_positions`, the two nearest cell centres of each, and the second one's share."""
    pixels, found = _positions(length, start, stop, count)
    position = np.clip(found, 0, count - 1)
    low = np.floor(position).astype(np.int64)
    return pixels, low, np.minimum(low + 1, count - 1), position - low


def _cubic(length: int, start: float, stop: float, count: int) -> tuple[slice, Array]:
    """The pixels of `_positions`, and the weights of the cells for each, float64 [pixels, count]."""
    pixels, position = _positions(length, start, stop, count)
    low = np.floor(position).astype(np.int64)
    weights = np.zeros((len(position), count))
    for offset in (-1, 0, 1, 2):
        distance = np.abs(position - (low + offset))
        near = (CUBIC + 2) * distance**3 - (CUBIC + 3) * distance**2 + 1
        far = CUBIC * (distance**3 - 5 * distance**2 + 8 * distance - 4)
        cells = np.clip(low + offset, 0, count - 1)
        np.add.at(weights, (np.arange(len(position)), cells), np.where(distance <= 1, near, far))
    return pixels, weights
