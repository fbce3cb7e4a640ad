"""Recognises the heat maps of a model of key points."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from vitdeploy.models.external.output_row import Output, OutputRow, field
from vitdeploy.spec import HEATMAPS, KeypointSpec, TensorSpec


def _heatmaps(result: Any, asked: bool) -> list[Output]:
    """[b, k, h, w] by the name of transformers and mmpose, a tensor alone only where it is asked for."""
    maps = result if isinstance(result, Tensor) and asked else field(result, "heatmaps")
    return [(HEATMAPS, maps)] if maps is not None and maps.ndim == 4 else []


def _points(model: nn.Module, outputs: Sequence[TensorSpec]) -> KeypointSpec:
    """The lines of a skeleton as transformers' configs have them."""
    edges = getattr(getattr(model, "config", None), "edges", None)
    count = KeypointSpec().number_of_classes(outputs) or 0
    pairs = [tuple(each) for each in edges] if isinstance(edges, list | tuple) else []
    fits = all(len(pair) == 2 and all(type(end) is int and 0 <= end < count for end in pair) for pair in pairs)
    return KeypointSpec(skeleton=tuple((a, b) for a, b in pairs) if fits else ())


ROW = OutputRow("keypoints", _heatmaps, "heatmaps [batch, points, height, width]", _points)
