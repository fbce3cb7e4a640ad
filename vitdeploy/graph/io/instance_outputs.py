"""Recognises the queries with masks of an instance segmentation model among a graph's outputs."""

from __future__ import annotations

from vitdeploy.graph.io.detectors import independent_scores
from vitdeploy.graph.io.output_row import Found, GraphOutputs, Values, floats
from vitdeploy.spec import InstanceSpec

# Class logits and masks of transformers' queries, and of those of the papers' code.
QUERIES = (("class_queries_logits", "masks_queries_logits"), ("logits", "masks"))
# Boxes, class logits and masks of detectors with masks: of RF-DETR's code, and of others.
RF_DETR, DETECTOR = ("dets", "labels", "masks"), ("boxes", "logits", "masks")


def _instances(outputs: Values, asked: bool) -> Found | None:
    """Only where it is asked for: semantic models have the same outputs, and panoptic ones nearly the same. What has
    boxes and scores that compete is DETR's, whose masks are those of a panoptic map."""
    found = floats(outputs, 3) | floats(outputs, 4)
    if not asked:
        return None
    for boxes, classes, masks in (RF_DETR, DETECTOR):
        if {boxes, classes, masks} <= set(found):
            independent = boxes == RF_DETR[0] or independent_scores(found[boxes])
            kept = {"class_logits": found[classes], "masks": found[masks]}
            return (kept, InstanceSpec("sigmoid", enlarge="bilinear")) if independent else None
    names = next((pair for pair in QUERIES if set(pair) <= set(found)), None)
    return None if names is None else ({"class_logits": found[names[0]], "masks": found[names[1]]}, InstanceSpec())


ROW = GraphOutputs("instance-segmentation", _instances, "class_queries_logits and masks_queries_logits, with --task")
