"""Flat scenes: coloured shapes that may hide each other in part, with the visible pixels of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from calibration.scenes.canvas import Bytes, Floats, Random, background, finished, paint, pixel_centres

COLOURS = {
    "red": (0.85, 0.12, 0.12),
    "green": (0.10, 0.62, 0.18),
    "blue": (0.12, 0.22, 0.85),
    "yellow": (0.92, 0.86, 0.12),
    "purple": (0.60, 0.12, 0.70),
    "cyan": (0.12, 0.80, 0.85),
    "white": (0.97, 0.97, 0.97),
    "black": (0.03, 0.03, 0.03),
}
MOST_HIDDEN = 0.3  # of a shape's pixels


def _triangle(x: Floats, y: Floats) -> Floats:
    """Three half planes."""
    turns = np.pi / 2 + 2 * np.pi / 3 * np.arange(3)
    return np.max([x * np.cos(turn) + y * np.sin(turn) for turn in turns], axis=0) - 0.55


def _star(x: Floats, y: Floats) -> Floats:
    """Five points: the line from a point (radius 1.1) to the notch beside it (radius 0.45), mirrored ten times."""
    angle = np.abs((np.arctan2(y, x) + np.pi / 5) % (2 * np.pi / 5) - np.pi / 5)
    radius = np.hypot(x, y)
    notch = 0.45 * np.array([np.cos(np.pi / 5), np.sin(np.pi / 5)])
    edge = notch - (1.1, 0)
    normal = np.array([edge[1], -edge[0]]) / np.hypot(*edge)
    return (radius * np.cos(angle) - 1.1) * normal[0] + radius * np.sin(angle) * normal[1]


# Distance to the outline, negative inside, of a shape of about radius 1: exact at the outline, where coverage needs it.
SHAPES: dict[str, Callable[[Floats, Floats], Floats]] = {
    "circle": lambda x, y: np.hypot(x, y) - 0.95,
    "square": lambda x, y: np.maximum(np.abs(x), np.abs(y)) - 0.8,
    "triangle": _triangle,
    "star": _star,
    "cross": lambda x, y: np.minimum(
        np.maximum(np.abs(x) - 1, np.abs(y) - 0.35), np.maximum(np.abs(x) - 0.35, np.abs(y) - 1)
    ),
    "ring": lambda x, y: np.abs(np.hypot(x, y) - 0.72) - 0.26,
}
NAMES = tuple(SHAPES)


@dataclass(frozen=True)
class Shape:
    """One object: its centre and radius in pixels, its turn in radians."""

    name: str
    colour: str
    x: float
    y: float
    radius: float
    turn: float


@dataclass(frozen=True)
class Scene:
    """`image` uint8 [height, width, 3]. `owner` int64 [height, width]: 0 for the ground, k for the k-th of `shapes`."""

    image: Bytes
    owner: npt.NDArray[np.int64]
    shapes: tuple[Shape, ...]

    def box(self, k: int) -> tuple[int, int, int, int]:
        """x0 y0 x1 y1 around the visible pixels of shape k, counted from 0; x1 and y1 are just outside."""
        rows, columns = np.nonzero(self.owner == k + 1)
        return int(columns.min()), int(rows.min()), int(columns.max()) + 1, int(rows.max()) + 1


def coverage(shape: Shape, height: int, width: int) -> Floats:
    """The share of each pixel that the shape covers, float64 [height, width]."""
    x, y = pixel_centres(height, width)
    x, y = (x - shape.x) / shape.radius, (y - shape.y) / shape.radius
    cos, sin = np.cos(shape.turn), np.sin(shape.turn)
    distance = SHAPES[shape.name](x * cos + y * sin, y * cos - x * sin)
    return np.clip(0.5 - distance * shape.radius, 0, 1)


def compose(random: Random, shapes: Sequence[Shape], size: int) -> Scene:
    """Draw `shapes`, later ones in front, on a ground of `size` x `size` pixels."""
    picture = background(random, size, size)
    owner = np.zeros((size, size), np.int64)
    for k, shape in enumerate(shapes, 1):
        covered = coverage(shape, size, size)
        colour = np.array(COLOURS[shape.colour]) + random.uniform(-0.07, 0.07, 3)
        light = random.uniform(-0.08, 0.08, 2) / shape.radius  # a slope of brightness across the shape
        x, y = pixel_centres(size, size)
        slope = (x - shape.x) * light[0] + (y - shape.y) * light[1]
        paint(picture, covered, colour + slope[..., None])
        owner[covered >= 0.5] = k
    return Scene(finished(random, picture), owner, tuple(shapes))


def scattered(random: Random, size: int, most: int = 6) -> Scene:
    """One to `most` shapes anywhere inside, each with at most 30 % of its pixels hidden."""
    shapes: list[Shape] = []
    owner, whole = np.zeros((size, size), np.int64), []
    for _ in range(random.randint(1, most + 1)):
        for _ in range(10):
            shape = anywhere(random, size)
            mask = coverage(shape, size, size) >= 0.5
            after = np.where(mask, len(shapes) + 1, owner)
            left = [int((after == k).sum()) for k in range(1, len(shapes) + 1)]
            if all(now >= (1 - MOST_HIDDEN) * all_of for now, all_of in zip(left, whole, strict=True)):
                shapes.append(shape)
                owner, whole = after, [*whole, int(mask.sum())]
                break
    return compose(random, shapes, size)


def anywhere(random: Random, size: int) -> Shape:
    """A shape of any kind, colour and turn, wholly inside: its radius is 6 to 20 % of the side."""
    radius = size * random.uniform(0.06, 0.2)
    x, y = random.uniform(1.1 * radius, size - 1.1 * radius, 2)
    name, colour = NAMES[random.randint(len(NAMES))], tuple(COLOURS)[random.randint(len(COLOURS))]
    return Shape(name, colour, float(x), float(y), float(radius), float(random.uniform(0, 2 * np.pi)))
