"""Outputs of graphs with an answer for every pixel: classes, or depth."""

from __future__ import annotations

from vitdeploy.graph.io.output_row import Found, GraphOutputs, Values, floats
from vitdeploy.spec import DepthSpec, SegmentationSpec

CLASSES, MASKS = "class_queries_logits", "masks_queries_logits"


def _class_maps(outputs: Values, asked: bool) -> Found | None:
    """By the names of transformers; where it is asked for, the only output of four axes."""
    ranked = floats(outputs, 3) | floats(outputs, 4)
    if {CLASSES, MASKS} <= set(ranked):
        return {"class_logits": ranked[CLASSES], "masks": ranked[MASKS]}, SegmentationSpec("queries")
    maps = {name: value for name, value in floats(outputs, 4).items() if value.shape and value.shape[1] != 1}
    if "logits" in maps:
        return {"logits": maps["logits"]}, SegmentationSpec()
    return ({"logits": next(iter(maps.values()))}, SegmentationSpec()) if asked and len(maps) == 1 else None


def _depth_maps(outputs: Values, asked: bool) -> Found | None:
    """By the name of transformers; where it is asked for, the only output [b, h, w] or [b, 1, h, w]."""
    planes = floats(outputs, 3) | {
        name: value for name, value in floats(outputs, 4).items() if value.shape and value.shape[1] == 1
    }
    if "predicted_depth" in planes:
        return {"depth": planes["predicted_depth"]}, DepthSpec()
    return ({"depth": next(iter(planes.values()))}, DepthSpec()) if asked and len(planes) == 1 else None


SEGMENTATION = GraphOutputs(
    "segmentation", _class_maps, f"logits [batch, classes, height, width]; {CLASSES} and {MASKS}"
)
DEPTH = GraphOutputs("depth", _depth_maps, "predicted_depth [batch, height, width]")
