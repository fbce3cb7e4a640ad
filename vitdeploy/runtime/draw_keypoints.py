"""Key points drawn on an image."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitdeploy.runtime.keypoints import Keypoints

if TYPE_CHECKING:
    from PIL import Image

# The colour of lines and of points: green and orange of Okabe and Ito, which people with any colour vision tell apart.
LINE, POINT = (0, 158, 115), (230, 159, 0)
# Radius of a point and half the width of a line, in shares of the shorter side of the box; never below a pixel.
RADIUS, HALF_WIDTH = 0.02, 0.01


def draw(image: Image.Image, result: Keypoints) -> Image.Image:
    """A copy of the RGB image with the shown points, and the lines of the skeleton whose ends are both shown."""
    from PIL import ImageDraw

    picture = image.convert("RGB")
    canvas = ImageDraw.Draw(picture)
    left, top, right, bottom = result.box
    side = min(right - left, bottom - top)
    radius, width = max(1.0, RADIUS * side), max(1, round(2 * HALF_WIDTH * side))
    shown = {point.index: (point.x, point.y) for point in result.shown}
    for a, b in result.skeleton:
        if a in shown and b in shown:
            canvas.line([shown[a], shown[b]], fill=LINE, width=width)
    for x, y in shown.values():
        canvas.ellipse([x - radius, y - radius, x + radius, y + radius], fill=POINT)
    return picture
