"""Drawing with numpy alone, so that pixels depend on no library's rasteriser.

Pictures are float64 [height, width, 3] in 0..1.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Bytes = npt.NDArray[np.uint8]
Random = np.random.RandomState


def pixel_centres(height: int, width: int) -> tuple[Floats, Floats]:
    """x and y of all pixel centres, float64 [height, width]: the first pixel spans 0 to 1, its centre is 0.5."""
    y, x = np.mgrid[:height, :width]
    return x + 0.5, y + 0.5


def enlarged(grid: Floats, height: int, width: int) -> Floats:
    """`grid` [h, w, ...] over [height, width, ...], bilinear, its corners on the corners."""
    y, x = (np.linspace(0, n - 1, m) for n, m in zip(grid.shape[:2], (height, width), strict=True))
    top, left = (np.minimum(v.astype(int), n - 2) for v, n in zip((y, x), grid.shape[:2], strict=True))
    extra = (1,) * (grid.ndim - 2)
    down, right = (y - top).reshape(-1, 1, *extra), (x - left).reshape(1, -1, *extra)
    rows = grid[top] * (1 - down) + grid[top + 1] * down
    return rows[:, left] * (1 - right) + rows[:, left + 1] * right


def background(random: Random, height: int, width: int) -> Floats:
    """A dull uneven ground: a grey with a tint, a slope of light and blotches."""
    tint = random.uniform(0.25, 0.7) + random.uniform(-0.08, 0.08, 3)
    coarse = random.uniform(-0.12, 0.12, (2, 2, 1)) + random.uniform(-0.03, 0.03, (2, 2, 3))
    fine = random.uniform(-0.06, 0.06, (7, 7, 1))
    return tint + enlarged(coarse, height, width) + enlarged(fine, height, width)


def paint(picture: Floats, coverage: Floats, colour: Floats) -> None:
    """Lay `colour`, [3] or [height, width, 3], over the picture where `coverage` [height, width] is above 0."""
    picture += coverage[..., None] * (colour - picture)


def finished(random: Random, picture: Floats, noise: float = 0.02) -> Bytes:
    """The picture as a camera gives it: with noise, uint8 [height, width, 3]."""
    noisy = picture + random.normal(0, noise, picture.shape)
    return np.rint(np.clip(noisy, 0, 1) * 255).astype(np.uint8)
