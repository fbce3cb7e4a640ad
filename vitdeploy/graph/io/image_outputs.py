"""Recognises the picture that an image-to-image model gives among a graph's outputs."""

from __future__ import annotations

from vitdeploy.graph.io.output_row import Found, GraphOutputs, Values, floats
from vitdeploy.spec import RECONSTRUCTION, ImageSpec


def _picture(outputs: Values, asked: bool) -> Found | None:
    """[b, c, h, w] of 1 or 3 channels: by its name, or the only one where it is asked for."""
    found = {name: value for name, value in floats(outputs, 4).items() if value.shape and value.shape[1] in (1, 3)}
    if RECONSTRUCTION in found:
        return {RECONSTRUCTION: found[RECONSTRUCTION]}, ImageSpec()
    return ({RECONSTRUCTION: next(iter(found.values()))}, ImageSpec()) if asked and len(found) == 1 else None


ROW = GraphOutputs("image-to-image", _picture, "reconstruction [batch, 1 or 3, height, width]")
