"""Rooms seen by a camera: spheres and boxes on a floor between walls, with the depth of every pixel, by ray casting.

The camera is 1.6 m above the floor and looks a little down; x is right, y up, z ahead, in metres. Its height and its
lens are the same in all scenes, so that one picture tells absolute depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from calibration.scenes.canvas import Bytes, Floats, Random, finished, pixel_centres

CAMERA_HEIGHT = 1.6  # metres
FOCAL = 0.9  # focal length in units of the picture's side: a field of view of 58 degrees
FARTHEST = 12.0  # metres; no wall is as far
LIGHT = np.array([0.4, 0.8, -0.45]) / np.linalg.norm([0.4, 0.8, -0.45])


@dataclass(frozen=True)
class View:
    """`image` uint8 [size, size, 3]; `depth` float32 [size, size], metres along the optical axis."""

    image: Bytes
    depth: npt.NDArray[np.float32]


class Rays:
    """What each pixel's ray has hit so far: nearest distance (in optical depth), unit normal, colour."""

    def __init__(self, size: int, pitch: float) -> None:
        x, y = pixel_centres(size, size)
        ahead, up = np.array([0, -np.sin(pitch), np.cos(pitch)]), np.array([0, np.cos(pitch), np.sin(pitch)])
        across, down = (x / size - 0.5) / FOCAL, (y / size - 0.5) / FOCAL
        # Directions have length 1 along the optical axis, so that the parameter of a hit is its depth.
        self.direction = ahead + across[..., None] * np.array([1.0, 0, 0]) - down[..., None] * up
        self.depth = np.full((size, size), np.inf)
        self.normal = np.zeros((size, size, 3))
        self.colour = np.zeros((size, size, 3))
        self.origin = np.array([0, CAMERA_HEIGHT, 0])

    def point(self, depth: Floats) -> Floats:
        """Where the rays are at `depth`, float64 [size, size, 3]; infinite depth stays at the camera."""
        return self.origin + np.where(np.isfinite(depth), depth, 0)[..., None] * self.direction

    def hit(self, depth: Floats, normal: Floats, colour: Floats) -> None:
        """Keep a hit where it is nearer than earlier ones. Values below 0.05 m or NaN do not count."""
        nearer = (depth > 0.05) & (depth < self.depth)
        self.depth = np.where(nearer, depth, self.depth)
        self.normal = np.where(nearer[..., None], normal, self.normal)
        self.colour = np.where(nearer[..., None], colour, self.colour)


def add_plane(rays: Rays, axis: int, at: float, normal: float, colours: Floats, tile: float) -> None:
    """The plane where coordinate `axis` is `at`, tiled in two colours [2, 3]."""
    with np.errstate(divide="ignore", invalid="ignore"):
        depth = (at - rays.origin[axis]) / rays.direction[..., axis]
    first, second = (k for k in range(3) if k != axis)
    point = rays.point(depth)
    odd = (np.floor(point[..., first] / tile) + np.floor(point[..., second] / tile)).astype(int) % 2
    unit = np.zeros(3)
    unit[axis] = normal
    rays.hit(depth, unit, colours[odd])


def add_sphere(rays: Rays, centre: Floats, radius: float, colour: Floats) -> None:
    """A sphere: the smaller root of |origin + t direction - centre| = radius."""
    offset = rays.origin - centre
    a = (rays.direction**2).sum(-1)
    b = (rays.direction * offset).sum(-1)
    square = b * b - a * ((offset**2).sum() - radius**2)
    depth = np.where(square > 0, (-b - np.sqrt(np.maximum(square, 0))) / a, np.nan)
    rays.hit(depth, (rays.point(np.nan_to_num(depth)) - centre) / radius, colour)


def add_box(rays: Rays, centre: Floats, half: Floats, turn: float, colour: Floats) -> None:
    """A box of half sides `half` [3], turned about the vertical: the slab method in the box's own axes."""
    axes = np.array([[np.cos(turn), 0, np.sin(turn)], [0, 1, 0], [-np.sin(turn), 0, np.cos(turn)]])
    origin, direction = axes @ (rays.origin - centre), rays.direction @ axes.T
    with np.errstate(divide="ignore", invalid="ignore"):
        one, other = (-half - origin) / direction, (half - origin) / direction
    enter, leave = np.minimum(one, other), np.maximum(one, other)
    face = enter.argmax(-1)
    depth = enter.max(-1)
    sign = -np.sign(np.take_along_axis(direction, face[..., None], -1))
    rays.hit(np.where(depth < leave.min(-1), depth, np.nan), sign * axes[face], colour)


def room(random: Random, size: int) -> View:
    """A room 5 to 10 m long with two to five things on its floor."""
    rays = Rays(size, np.deg2rad(random.uniform(5, 18)))
    length, left, right, height = (random.uniform(*limits) for limits in ((5, 10), (-4, -2), (2, 4), (2.6, 3.6)))
    walls = [(1, 0.0, 1.0), (1, height, -1.0), (2, length, -1.0), (0, left, 1.0), (0, right, -1.0)]
    for axis, at, normal in walls:
        colours = random.uniform(0.3, 0.9, 3) + random.uniform(-0.12, 0.12, (2, 1))
        add_plane(rays, axis, at, normal, colours, random.uniform(0.4, 1.2))
    for _ in range(random.randint(2, 6)):
        z = random.uniform(2.4, length - 0.8)
        x = random.uniform(-0.45, 0.45) * z
        colour = random.uniform(0.05, 0.95, 3)
        if random.uniform() < 0.5:
            radius = random.uniform(0.25, 0.8)
            add_sphere(rays, np.array([x, radius, z]), radius, colour)
        else:
            half = random.uniform((0.2, 0.2, 0.2), (0.6, 0.9, 0.6))
            add_box(rays, np.array([x, half[1], z]), half, random.uniform(0, np.pi / 2), colour)
    light = 0.45 + 0.55 * np.maximum((rays.normal * LIGHT).sum(-1), 0)
    return View(finished(random, rays.colour * light[..., None], 0.015), rays.depth.astype(np.float32))
