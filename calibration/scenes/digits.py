"""Up to four digits in a picture, one in each quarter, in Pillow's built-in bitmap font: turned, faint or strong."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from calibration.scenes.canvas import Bytes, Random, background, finished, paint, pixel_centres
from calibration.scenes.lines import glyphs, sampled

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
# The share of quarters with a digit.
FILLED = 0.55


@dataclass(frozen=True)
class Scene:
    """`image` uint8 [side, side, 3]. `quarters` int64 [2, 2]: the digit in each quarter, -1 without."""

    image: Bytes
    quarters: npt.NDArray[np.int64]

    @property
    def labels(self) -> npt.NDArray[np.bool_]:
        """bool [10]: which digits are in the picture."""
        return np.isin(np.arange(len(NAMES)), self.quarters)


def digits(random: Random, side: int) -> Scene:
    """A scene on `side` x `side` pixels, a multiple of 2."""
    picture = background(random, side, side)
    quarters = np.where(random.uniform(size=(2, 2)) < FILLED, random.randint(0, len(NAMES), (2, 2)), -1)
    x, y = pixel_centres(side, side)
    for (row, column), digit in np.ndenumerate(quarters):
        scale = random.uniform(0.6, 0.85) * (side / 2) / 9  # glyphs are 9 rows tall
        turn, centre = random.uniform(-0.25, 0.25), (np.array([column, row]) + random.uniform(0.42, 0.58, 2)) * side / 2
        contrast = random.uniform(0.15, 0.5) * (1 if random.randint(2) else -1)
        tint = random.uniform(-0.1, 0.1, 3)
        if digit < 0:
            continue
        mask = glyphs(str(digit))
        u, v = x - centre[0], y - centre[1]
        u, v = u * np.cos(turn) + v * np.sin(turn), v * np.cos(turn) - u * np.sin(turn)
        ink = sampled(mask, u / scale + mask.shape[1] / 2, v / scale + mask.shape[0] / 2)
        paint(picture, np.clip(ink, 0, 1), np.clip(picture.mean(axis=(0, 1)) + contrast + tint, 0, 1))
    return Scene(finished(random, picture, random.uniform(0.01, 0.04)), quarters)
