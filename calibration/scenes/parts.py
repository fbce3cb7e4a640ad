"""Machined parts on a conveyor, and what may be wrong with them: scratches, spots, missing pieces.

A part is a disc with a bore and six holes on brushed metal; place, turn, light and tone vary from part to part, what
belongs to it does not. A defect is known by the pixels that it changes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from calibration.scenes.canvas import Bytes, Floats, Random, enlarged, finished, paint, pixel_centres

GOOD = "good"
HOLES = 6
# Radii in shares of the part's: the bore, the holes, and the circle that these lie on.
BORE, HOLE, CIRCLE = 0.26, 0.11, 0.66
# A pixel is defective if its colour differs by this share of the range, before noise.
SEEN = 0.02


class Part:
    """Where a part lies: its centre and radius in pixels, its turn; and the sizes of the picture."""

    def __init__(self, random: Random, size: int) -> None:
        self.x, self.y = pixel_centres(size, size)
        self.centre = size / 2 + random.uniform(-0.04, 0.04, 2) * size
        self.radius = size * random.uniform(0.39, 0.43)
        self.turn = random.uniform(0, 2 * np.pi)

    def away(self, x: float, y: float) -> Floats:
        """The distance of each pixel to a point of the part, whose own coordinates go from -1 to 1."""
        cosine, sine = np.cos(self.turn), np.sin(self.turn)
        centre = self.centre + self.radius * np.array([cosine * x - sine * y, sine * x + cosine * y])
        return np.hypot(self.x - centre[0], self.y - centre[1])

    def disc(self, x: float, y: float, radius: float) -> Floats:
        """How much of each pixel a disc covers, 0..1; its radius in shares of the part's."""
        return np.clip(radius * self.radius - self.away(x, y) + 0.5, 0, 1)

    def line(self, start: Floats, end: Floats, width: float) -> Floats:
        """The same of a line from point to point, of a width in pixels."""
        count = 24
        points = start + np.linspace(0, 1, count)[:, None] * (end - start)
        nearest = np.min([self.away(*point) for point in points], axis=0)
        return np.clip(width / 2 - nearest + 0.5, 0, 1)

    def holes(self) -> list[tuple[float, float]]:
        turns = 2 * np.pi * np.arange(HOLES) / HOLES
        return [(CIRCLE * float(np.cos(turn)), CIRCLE * float(np.sin(turn))) for turn in turns]


def good_part(random: Random, part: Part, size: int) -> tuple[Floats, Floats]:
    """The picture of a part without a defect, and that of what lies below it, float64 [size, size, 3]."""
    belt = random.uniform(0.16, 0.24) + enlarged(random.uniform(-0.03, 0.03, (6, 6, 1)), size, size) + np.zeros(3)
    tone = random.uniform(0.55, 0.72) + np.array([0.0, 0.005, 0.02])
    brushed = enlarged(random.uniform(-0.05, 0.05, (size // 2, 3, 1)), size, size)
    light = enlarged(random.uniform(-0.08, 0.08, (2, 2, 1)), size, size)
    picture = belt.copy()
    paint(picture, part.disc(0, 0, 1), tone + brushed + light)
    for x, y, radius in [(0.0, 0.0, BORE), *((x, y, HOLE) for x, y in part.holes())]:
        picture -= 0.12 * (part.disc(x, y, radius + 0.035) - part.disc(x, y, radius))[..., None]
        paint(picture, part.disc(x, y, radius), belt)
    return picture, belt


def scratch(random: Random, part: Part, picture: Floats, belt: Floats) -> None:
    """A thin line, lighter or darker than the metal."""
    angle, radius = random.uniform(0, 2 * np.pi), random.uniform(0.4, 0.75)
    start = radius * np.array([np.cos(angle), np.sin(angle)])
    way = random.uniform(0, 2 * np.pi)
    end = start + random.uniform(0.35, 0.7) * np.array([np.cos(way), np.sin(way)])
    cover = part.line(start, end, random.uniform(1.2, 2.4)) * part.disc(0, 0, 1)
    shade = random.uniform(0.18, 0.4) * random.choice([-1, 1])
    picture += (cover * shade)[..., None]


def spot(random: Random, part: Part, picture: Floats, belt: Floats) -> None:
    """A stain of rust or oil."""
    angle, radius = random.uniform(0, 2 * np.pi), random.uniform(0.35, 0.85)
    cover = part.disc(radius * np.cos(angle), radius * np.sin(angle), random.uniform(0.07, 0.15)) * part.disc(0, 0, 1)
    colours = np.array([(0.45, 0.25, 0.12), (0.1, 0.1, 0.12)])
    paint(picture, random.uniform(0.35, 0.8) * cover, colours[random.randint(2)])


def missing(random: Random, part: Part, picture: Floats, belt: Floats) -> None:
    """A piece that is broken off the edge, or a hole that was never drilled."""
    if random.uniform() < 0.5:
        angle = random.uniform(0, 2 * np.pi)
        paint(picture, part.disc(np.cos(angle), np.sin(angle), random.uniform(0.16, 0.3)), belt)
        return
    x, y = part.holes()[random.randint(HOLES)]
    ring = part.disc(x, y, 2 * HOLE) - part.disc(x, y, 1.4 * HOLE)
    metal = (picture * ring[..., None]).sum(axis=(0, 1)) / ring.sum()
    paint(picture, part.disc(x, y, HOLE + 0.045), metal)


DEFECTS: dict[str, Callable[[Random, Part, Floats, Floats], None]] = {
    "missing": missing,
    "scratch": scratch,
    "spot": spot,
}


def part(random: Random, size: int, defect: str = GOOD) -> tuple[Bytes, npt.NDArray[np.bool_]]:
    """A picture uint8 [size, size, 3], and where it shows the defect, bool [size, size]."""
    lies = Part(random, size)
    before, belt = good_part(random, lies, size)
    after = before.copy()
    while defect != GOOD and not (np.abs(after - before).max(axis=-1) > SEEN).any():
        DEFECTS[defect](random, lies, after, belt)
    return finished(random, after, 0.015), np.abs(after - before).max(axis=-1) > SEEN
