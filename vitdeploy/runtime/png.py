"""A picture as the bytes of a PNG file."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image


def png_bytes(image: Image.Image) -> bytes:
    """The file, without loss; of any mode that PNG has."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
