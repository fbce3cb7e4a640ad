"""Lines of text in Pillow's built-in bitmap font, bent and in any colours: two to eight digits and capitals."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from calibration.scenes.canvas import Bytes, Floats, Random, background, enlarged, finished, paint, pixel_centres
from calibration.scenes.stream import SPLITS

CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ"
SHORTEST, LONGEST = 2, 8
# Digits of a number that is an identity.
DIGITS = 3
# Of 16 parts of all strings, those of calibration and of evaluation; training has the rest.
PARTS = {"calibration": (0,), "evaluation": (1, 2, 3), "training": range(4, 16)}


@dataclass(frozen=True)
class Line:
    """`image` uint8 [height, width, 3]. `owner` int64 [height, width]: k in the k-th character's cell, 0 elsewhere."""

    image: Bytes
    text: str
    owner: npt.NDArray[np.int64]


def part(text: str) -> str:
    """The only split that may show `text`."""
    remainder = zlib.crc32(text.encode()) % 16
    return next(split for split in SPLITS if remainder in PARTS[split])


def string(random: Random, split: str) -> str:
    """A string of the split: none is in two splits."""
    while True:
        count = random.randint(SHORTEST, LONGEST + 1)
        text = "".join(CHARACTERS[i] for i in random.randint(0, len(CHARACTERS), count))
        if part(text) == split:
            return text


@functools.cache
def numbers(split: str) -> tuple[str, ...]:
    """The identities of a split: numbers of `DIGITS` digits, in a seeded order. None is in two splits."""
    every = [f"{number:0{DIGITS}d}" for number in np.random.RandomState(0).permutation(10**DIGITS)]
    return tuple(number for number in every if part(number) == split)


def numbered(random: Random, side: int, split: str, index: int, alike: int) -> Line:
    """The number whose turn it is, in a square picture: `alike` pictures in a row show the same number."""
    choice = numbers(split)
    return written(random, side, side, choice[index // alike % len(choice)])


def glyphs(text: str) -> Floats:
    """The text in the bitmap font, float64 [rows, columns] of 0 and 1, without empty rows around its capitals."""
    font = ImageFont.load_default_imagefont()
    width = int(font.getlength(text))
    mask = Image.new("1", (width, 11))
    ImageDraw.Draw(mask).text((0, 0), text, fill=1, font=font)
    return np.asarray(mask)[1:10].astype(np.float64)


def sampled(mask: Floats, x: Floats, y: Floats) -> Floats:
    """`mask` at x and y in its pixels, bilinear, 0 outside."""
    padded = np.pad(mask, 2)
    x, y = (np.clip(v + 1.5, 0, n - 1.001) for v, n in ((x, padded.shape[1]), (y, padded.shape[0])))
    left, top = x.astype(int), y.astype(int)
    right, down = x - left, y - top
    upper = padded[top, left] * (1 - right) + padded[top, left + 1] * right
    lower = padded[top + 1, left] * (1 - right) + padded[top + 1, left + 1] * right
    return upper * (1 - down) + lower * down


def line(random: Random, height: int, width: int, split: str) -> Line:
    """A line of text of the split somewhere in the picture, as large as it fits or a third smaller."""
    return written(random, height, width, string(random, split))


def written(random: Random, height: int, width: int, text: str) -> Line:
    """The same of this text."""
    mask = glyphs(text)
    rows, columns = mask.shape
    scale_y = random.uniform(0.6, 0.9) * height / rows
    scale_x = min(random.uniform(0.8, 1.15) * scale_y, 0.94 * width / columns)
    turn, slant = random.uniform(-0.05, 0.05), random.uniform(-0.25, 0.25)
    x, y = pixel_centres(height, width)
    free = width - columns * scale_x
    x = x - width / 2 - random.uniform(-0.4, 0.4) * max(free - 4, 0)
    y = y - height / 2 - random.uniform(-0.05, 0.05) * height
    x, y = x * np.cos(turn) + y * np.sin(turn), y * np.cos(turn) - x * np.sin(turn)
    x, y = (x + slant * y) / scale_x + columns / 2, y / scale_y + rows / 2
    ink = sampled(mask, x, y)
    inside = (x >= 0) & (x < columns) & (y >= 0) & (y < rows)
    owner = np.where(inside, np.floor(x / columns * len(text)).astype(np.int64) + 1, 0)
    picture = background(random, height, width)
    dark = picture.mean() > 0.5
    colour = random.uniform(0, 0.25, 3) if dark else random.uniform(0.75, 1, 3)
    uneven = enlarged(random.uniform(-0.1, 0.1, (3, 5, 1)), height, width)
    paint(picture, np.clip(ink * random.uniform(0.8, 1.0), 0, 1), colour + uneven)
    return Line(finished(random, picture, random.uniform(0.01, 0.05)), text, owner)
