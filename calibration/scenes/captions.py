"""Scenes of one or two shapes and what a person would say of them: "a red circle above a blue square"."""

from __future__ import annotations

from calibration.scenes.canvas import Random
from calibration.scenes.shapes import COLOURS, NAMES, Scene, Shape, compose

# Where the first shape is relative to the second: the step from the second to the first in x and y.
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}
PREFIXES = ("", "a photo of ", "a picture of ", "there is ", "we see ")
LABELS = tuple(sorted(f"{colour} {shape}" for colour in COLOURS for shape in NAMES))


def held_out(colour: str, shape: str) -> bool:
    """Whether no training scene shows this colour on this shape: six of 48 pairs, each with a shape of its own."""
    return tuple(COLOURS).index(colour) == (3 * NAMES.index(shape) + 1) % len(COLOURS)


def pair(random: Random, split: str) -> tuple[str, str]:
    """A colour and a shape; in training none that is held out."""
    while True:
        colour, shape = tuple(COLOURS)[random.randint(len(COLOURS))], NAMES[random.randint(len(NAMES))]
        if split != "training" or not held_out(colour, shape):
            return colour, shape


def alone(random: Random, size: int, colour: str, shape: str) -> Scene:
    """One shape anywhere inside, its radius 14 to 34 % of the side."""
    radius = size * random.uniform(0.14, 0.34)
    x, y = random.uniform(1.1 * radius, size - 1.1 * radius, 2)
    return compose(random, [Shape(shape, colour, float(x), float(y), float(radius), _turn(random))], size)


def _turn(random: Random) -> float:
    """Shapes with captions stand about upright."""
    return float(random.uniform(-0.35, 0.35))


def two(random: Random, size: int, split: str) -> tuple[Scene, str]:
    """Two different shapes side by side or one above the other, and the caption without a prefix."""
    first, second = pair(random, split), pair(random, split)
    while second == first:
        second = pair(random, split)
    relation = tuple(RELATIONS)[random.randint(len(RELATIONS))]
    along = RELATIONS[relation]
    centre = [size / 2, size / 2] + random.uniform(-0.06, 0.06, 2) * size
    shapes = []
    for (colour, shape), side in ((first, 1), (second, -1)):
        radius = size * random.uniform(0.12, 0.2)
        step = [side * 0.24 * size * a + random.uniform(-0.03, 0.03) * size for a in along]
        x, y = centre[0] + step[0], centre[1] + step[1]
        shapes.append(Shape(shape, colour, float(x), float(y), float(radius), _turn(random)))
    caption = f"a {' '.join(first)} {relation} a {' '.join(second)}"
    return compose(random, shapes, size), caption


def captioned(random: Random, size: int, split: str) -> tuple[Scene, str]:
    """A scene and its caption. In training, two of five scenes show one shape; else all show two."""
    prefix = PREFIXES[random.randint(len(PREFIXES))]
    if split == "training" and random.uniform() < 0.4:
        colour, shape = pair(random, split)
        return alone(random, size, colour, shape), f"{prefix}a {colour} {shape}"
    scene, caption = two(random, size, split)
    return scene, prefix + caption
