"""The picture of an image-to-image model, as other tasks' answers are drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vitdeploy.runtime.image_to_image import Picture

if TYPE_CHECKING:
    from PIL import Image


def draw(image: Image.Image, result: Picture) -> Image.Image:
    """The picture itself, in RGB; the image is no part of it."""
    return result.image.convert("RGB")
