"""Shared drawing functions for pictures of answers, with Pillow: colours, class maps, legends."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

Array = npt.NDArray[Any]

# Opacity of a map drawn over its image.
OPACITY = 0.55
MARGIN = 2
# Okabe and Ito's green and orange, distinguishable with any colour vision.
LINE, POINT = (0, 158, 115), (230, 159, 0)
# Radius of a point and half the width of a line, as fractions of the box's shorter side; at least one pixel.
RADIUS, HALF_WIDTH = 0.02, 0.01


def colours(count: int) -> npt.NDArray[np.uint8]:
    """Return the colours of PASCAL VOC's maps, uint8 [count, 3], without its black for 0. The bits of a number go to
    red, green and blue in turn, so neighbouring numbers differ most."""
    numbers = np.arange(1, count + 1)
    found = np.zeros((count, 3), np.int64)
    for bit in range(8):
        for channel in range(3):
            found[:, channel] |= ((numbers >> (3 * bit + channel)) & 1) << (7 - bit)
    return found.astype(np.uint8)


def class_picture(found: Array) -> Image.Image:
    """Return a class map, int [height, width], in colours; black for -1, no class."""
    from PIL import Image

    table = np.concatenate([np.zeros((1, 3), np.uint8), colours(max(int(found.max(initial=0)) + 1, 1))])
    return Image.fromarray(table[found + 1])


def over(image: Image.Image, picture: Image.Image, covered: Array) -> Image.Image:
    """Return the image with `picture` drawn over it where `covered`, bool [height, width], is true."""
    from PIL import Image

    mask = Image.fromarray((covered * round(255 * OPACITY)).astype(np.uint8))
    return Image.composite(picture, image, mask)


def legend(image: Image.Image, entries: list[tuple[str, tuple[int, ...]]]) -> None:
    """Draw labels on their colours, from the upper left corner down."""
    from PIL import ImageDraw

    pen, top = ImageDraw.Draw(image), 0.0
    for label, colour in entries:
        top = draw_label(pen, (0.0, top), label, colour)


def draw_label(pen: ImageDraw.ImageDraw, corner: tuple[float, ...], text: str, colour: tuple[int, ...]) -> float:
    """Draw text on a box of its colour, black or white for contrast; return the box's lower edge."""
    left, top, right, bottom = pen.textbbox((corner[0] + MARGIN, corner[1] + MARGIN), text)
    box = (corner[0], corner[1], right + MARGIN, bottom + MARGIN)
    pen.rectangle(box, fill=colour)
    light = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 140  # ITU-R BT.601
    pen.text((left, top), text, fill="black" if light else "white", anchor=None)
    return box[3]


def draw_keypoints(image: Image.Image, people: Sequence[Any]) -> Image.Image:
    """Return a copy of the RGB image with the shown points of each object (`Keypoints`), and the skeleton lines whose
    ends are both shown."""
    from PIL import ImageDraw

    picture = image.convert("RGB")
    pen = ImageDraw.Draw(picture)
    for result in people:
        left, top, right, bottom = result.box
        side = min(right - left, bottom - top)
        radius, width = max(1.0, RADIUS * side), max(1, round(2 * HALF_WIDTH * side))
        shown = {point.index: (point.x, point.y) for point in result.shown}
        for a, b in result.skeleton:
            if a in shown and b in shown:
                pen.line([shown[a], shown[b]], fill=LINE, width=width)
        for x, y in shown.values():
            pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=POINT)
    return picture


def npy_bytes(array: Array) -> bytes:
    """Return an array as the bytes of an .npy file."""
    numbers = io.BytesIO()
    np.save(numbers, array)
    return numbers.getvalue()
