"""Figures that face the viewer, one or two in a picture, with COCO's 17 key points, and the matte that cuts them out.

A figure's left is at the viewer's right.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from calibration.scenes import shapes
from calibration.scenes.canvas import Bytes, Floats, Random, background, finished, paint, pixel_centres

NAMES = (
    *("nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder", "left_elbow"),
    *("right_elbow", "left_wrist", "right_wrist", "left_hip", "right_hip", "left_knee", "right_knee"),
    *("left_ankle", "right_ankle"),
)
# COCO's edges, joints counted from 1.
SKELETON = (
    *((16, 14), (14, 12), (17, 15), (15, 13), (12, 13), (6, 12), (7, 13), (6, 7), (6, 8), (7, 9), (8, 10)),
    *((9, 11), (2, 3), (1, 2), (1, 3), (2, 4), (3, 5), (4, 6), (5, 7)),
)
# COCO's sigmas: how far people mark each point apart, in square roots of the object's area (COCOeval's kpt_oks_sigmas).
SIGMAS = np.array([26, 25, 25, 35, 35, 79, 79, 72, 72, 62, 62, 107, 107, 87, 87, 89, 89]) / 1000
MIRRORED = (0, 2, 1, 4, 3, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13, 16, 15)
Box = tuple[float, float, float, float]
SKIN = ((0.95, 0.78, 0.65), (0.80, 0.60, 0.45), (0.55, 0.38, 0.27))


@dataclass(frozen=True)
class Figure:
    """`points` float64 [17, 2], x and y in pixels; `box` x0 y0 x1 y1 around its drawn pixels."""

    points: Floats
    box: Box


@dataclass(frozen=True)
class Picture:
    """`image` uint8 [height, width, 3]; `matte` float64 [height, width], the share of each pixel that figures cover."""

    image: Bytes
    figures: tuple[Figure, ...]
    matte: Floats


def turned(vector: tuple[float, float], angle: float) -> npt.NDArray[np.float64]:
    """`vector` turned by `angle` radians, clockwise as seen (y points down)."""
    cos, sin = np.cos(angle), np.sin(angle)
    return np.array([vector[0] * cos - vector[1] * sin, vector[0] * sin + vector[1] * cos])


def pose(random: Random) -> Floats:
    """The 17 points of a random pose, hips at the origin, in units of which the body is about 2.2 tall."""
    lean, nod = random.uniform(-0.2, 0.2), random.uniform(-0.25, 0.25)
    points = np.zeros((17, 2))
    neck = turned((0, -0.78), lean)
    for side, first in ((1, 0), (-1, 1)):  # the figure's left, at the viewer's right; then its right
        shoulder = neck + turned((side * 0.27, 0), lean)
        # 0 hangs down, positive angles lift the arm sideways; the forearm bends on from there.
        lift, bend = random.uniform(-0.3, 2.6), random.uniform(-0.6, 2.0)
        elbow = shoulder + turned((0, 0.4), -side * lift + lean)
        wrist = elbow + turned((0, 0.38), -side * (lift + bend) + lean)
        hip = turned((side * 0.17, 0), lean)
        spread = random.uniform(-0.15, 0.6)
        knee = hip + turned((0, 0.52), -side * spread)
        ankle = knee + turned((0, 0.5), -side * (spread - random.uniform(0, 0.7)))
        points[5 + first :: 2][:6] = shoulder, elbow, wrist, hip, knee, ankle
    head = neck + turned((0, -0.3), lean + nod)
    for index, place in enumerate(((0, 0.03), (0.08, -0.05), (-0.08, -0.05), (0.19, -0.01), (-0.19, -0.01))):
        points[index] = head + turned(place, lean + nod)
    return points


def capsule(x: Floats, y: Floats, a: Floats, b: Floats, radius: float) -> Floats:
    """Coverage of the pixels within `radius` of the line from a to b."""
    along = b - a
    t = np.clip(((x - a[0]) * along[0] + (y - a[1]) * along[1]) / max(float(along @ along), 1e-9), 0, 1)
    return np.clip(0.5 + radius - np.hypot(x - a[0] - t * along[0], y - a[1] - t * along[1]), 0, 1)


def draw(random: Random, picture: Floats, matte: Floats, points: Floats, scale: float) -> Box:
    """Draw a figure whose unit is `scale` pixels, and add what it covers to the matte; returns its box. Its left limbs
    are darker than its right ones."""
    x, y = pixel_centres(*picture.shape[:2])
    drawn = np.zeros(picture.shape[:2])
    shirt, trousers = random.uniform(0.15, 0.95, (2, 3))
    skin = np.array(SKIN[random.randint(len(SKIN))])

    def stroke(a: int | list[int], b: int | list[int], width: float, colour: Floats) -> None:
        ends = (points[[p] if isinstance(p, int) else p].mean(axis=0) for p in (a, b))
        covered = capsule(x, y, *ends, width * scale)
        np.maximum(drawn, covered, out=drawn)
        paint(picture, covered, colour)
        np.subtract(1, (1 - matte) * (1 - covered), out=matte)

    for a, b in ((11, 13), (13, 15), (12, 14), (14, 16)):
        stroke(a, b, 0.085, trousers * (0.7 if a % 2 else 1))
    for a, b in ((5, 11), (6, 12), (5, 12), (6, 11), (5, 6), (11, 12), ([5, 6], [11, 12])):
        stroke(a, b, 0.1, shirt * 0.85)
    for a, b in ((5, 7), (6, 8)):
        stroke(a, b, 0.075, shirt * (0.7 if a % 2 else 1))
    for a, b in ((7, 9), (8, 10)):
        stroke(a, b, 0.06, skin * (0.8 if a % 2 else 1))
    for a, radius, colour in (
        *((3, 0.06, skin * 0.85), (4, 0.06, skin * 0.85), ([0, 1, 2], 0.19, skin)),
        *((0, 0.035, skin * 0.6), (1, 0.035, skin * 0), (2, 0.035, skin * 0)),
    ):
        stroke(a, a, radius, colour)
    rows, columns = np.nonzero(drawn >= 0.5)
    return float(columns.min()), float(rows.min()), float(columns.max()) + 1, float(rows.max()) + 1


def figures(random: Random, size: int) -> Picture:
    """One or two figures, whole and beside each other, on `size` x `size` pixels."""
    return standing(random, background(random, size, size))


def before_shapes(random: Random, size: int) -> Picture:
    """The same before up to four coloured shapes, which are part of the ground."""
    picture = background(random, size, size)
    for _ in range(random.randint(5)):
        shape = shapes.anywhere(random, size)
        colour = np.array(shapes.COLOURS[shape.colour]) + random.uniform(-0.07, 0.07, 3)
        paint(picture, shapes.coverage(shape, size, size), colour)
    return standing(random, picture)


def standing(random: Random, picture: Floats) -> Picture:
    """One or two figures on a square ground, which they are drawn on."""
    size = len(picture)
    count = random.randint(1, 3)
    found, matte = [], np.zeros((size, size))
    for k in range(count):
        points = pose(random)
        low, high = points.min(axis=0) - 0.25, points.max(axis=0) + 0.25
        room = np.array([size / count, size])
        scale = float(min((room / (high - low)).min(), 0.42 * size) * random.uniform(0.8, 1))
        corner = np.array([k * room[0], 0]) + random.uniform(0, room - scale * (high - low))
        placed = corner + (points - low) * scale
        found.append(Figure(placed, draw(random, picture, matte, placed, scale)))
    return Picture(finished(random, picture), tuple(found), matte)
