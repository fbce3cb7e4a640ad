"""Recognises the heat maps of a model of key points among a graph's outputs."""

from __future__ import annotations

from vitdeploy.graph.io.output_row import Found, GraphOutputs, Values, floats
from vitdeploy.spec import HEATMAPS, KeypointSpec


def _heatmaps(outputs: Values, asked: bool) -> Found | None:
    found = floats(outputs, 4)
    if HEATMAPS in found:
        return {HEATMAPS: found[HEATMAPS]}, KeypointSpec()
    return ({HEATMAPS: next(iter(found.values()))}, KeypointSpec()) if asked and len(found) == 1 else None


ROW = GraphOutputs("keypoints", _heatmaps, "heatmaps [batch, points, height, width]")
