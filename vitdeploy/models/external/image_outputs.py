"""Recognises the picture that an image-to-image model gives."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from vitdeploy.models.external.output_row import Output, OutputRow, field
from vitdeploy.spec import RECONSTRUCTION, ImageSpec


def _picture(result: Any, asked: bool) -> list[Output]:
    """[b, c, h, w] of 1 or 3 channels: by transformers' name, a tensor alone only where it is asked for."""
    found = result if isinstance(result, Tensor) and asked else field(result, RECONSTRUCTION)
    return [(RECONSTRUCTION, found)] if found is not None and found.ndim == 4 and found.shape[1] in (1, 3) else []


ROW = OutputRow(
    "image-to-image", _picture, "reconstruction [batch, 1 or 3, height, width]", lambda model, outputs: ImageSpec()
)
