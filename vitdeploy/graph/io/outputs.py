"""Which task the outputs of somebody else's graph are of, by their names and shapes: a row per task.

Exporters differ in what they call their outputs and in whether post-processing is part of the graph. What is known:

    labels + boxes + scores                                           RT-DETR, D-FINE, DEIM as their code exports them
    dets + labels [+ masks]                                           RF-DETR as its code exports it
    one float tensor [batch, queries, 4 + classes] or [..., 6]        RT-DETR as Ultralytics exports it
    logits, pred_logits + boxes, pred_boxes [+ masks, pred_masks]     DETR and its kin as optimum and others export them
    heatmaps                                                          key points, as transformers and mmpose name them
    reconstruction                                                    a picture, as transformers names it
    features [+ patch_features]                                       a feature extractor, as transformers names them
    one float tensor [batch, classes]                                 a classifier
    logits of four axes; class_queries_logits + masks_queries_logits   a semantic segmentation model, as transformers
    the same queries, or a detector's with masks, where asked for      an instance segmentation model
    predicted_depth                                                   a depth model, as transformers names it
    anomaly_map + pred_score                                          an anomaly model, as anomalib names them
    anything else with an axis for the batch                          numbers that are compared as such

What no name says is read from the nodes that compute an output: whether scores compete or are independent, and whether
boxes are relative to the image.
"""

from __future__ import annotations

from pathlib import Path

import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.io import (
    anomaly_outputs,
    any_outputs,
    dense_outputs,
    image_outputs,
    instance_outputs,
    keypoint_outputs,
)
from vitdeploy.graph.io.detectors import independent_scores, joined, ranked_in_pixels
from vitdeploy.graph.io.output_row import Found, GraphOutputs, Values, floats
from vitdeploy.spec import Postprocess, PostprocessSpec, Task

ALIASES = {
    "pred_logits": "logits",
    "pred_boxes": "boxes",
    "pred_masks": "masks",
    "last_hidden_state": "patch_features",
    "pooler_output": "features",
    "image_embeds": "features",
}


def task_of(
    model: ir.Model, path: Path, asked: Task | None = None
) -> tuple[Task, Postprocess | None, tuple[Task, ...]]:
    """Name the outputs as the first task does that finds its own, `asked` before all others, and drop the rest.

    Returns the task, what its outputs mean, and, where the task is that of last resort, the other tasks that find
    theirs if they are asked for.

    Raises:
        GraphError: they are of no task.
    """
    outputs = {ALIASES.get(str(value.name), str(value.name)): value for value in model.graph.outputs}
    for row in sorted(ROWS, key=lambda row: row.task != asked):
        if (found := row.find(outputs, row.task == asked)) is None:
            continue
        kept, postprocess = found
        others = [each.task for each in ROWS if row is any_outputs.ROW and each is not row and each.find(outputs, True)]
        del model.graph.outputs[:]
        for name, value in kept.items():
            value.name = name
            model.graph.outputs.append(value)
        return row.task, postprocess, tuple(dict.fromkeys(others))
    raise GraphError(
        f"the outputs of {path} are of no task that vitdeploy has",
        found="; ".join(f"{v.name}: {v.dtype}{list(v.shape) if v.shape is not None else ''}" for v in outputs.values()),
        wanted="; or ".join(dict.fromkeys(row.wanted for row in reversed(ROWS))),
        fix="export it with outputs of these names",
    )


def _ranked(outputs: Values, asked: bool) -> Found | None:
    names = ("labels", "boxes", "scores")
    if not set(names) <= set(outputs):
        return None
    ranked_in_pixels(outputs["boxes"])
    return {name: outputs[name] for name in names}, PostprocessSpec(scores="given", boxes="xyxy")


def _rf_detr(outputs: Values, asked: bool) -> Found | None:
    """Its labels are logits, one more than there are labels, and all independent; masks are of no task here."""
    found = floats(outputs, 3)
    if not {"dets", "labels"} <= set(found):
        return None
    return {"logits": found["labels"], "boxes": found["dets"]}, PostprocessSpec(scores="sigmoid")


def _joined(outputs: Values, asked: bool) -> Found | None:
    """Boxes, scores and perhaps classes in one tensor."""
    found = floats(outputs, 3)
    return joined(next(iter(found.values()))) if len(found) == len(outputs) == 1 else None


def _objects(outputs: Values, asked: bool) -> Found | None:
    if not {"logits", "boxes"} <= set(outputs):
        return None
    independent = independent_scores(outputs["boxes"])
    postprocess = PostprocessSpec("sigmoid" if independent else "softmax")
    return {name: outputs[name] for name in ("logits", "boxes")}, postprocess


def _segments(outputs: Values, asked: bool) -> Found | None:
    if not {"logits", "boxes", "masks"} <= set(outputs):
        return None
    return {name: outputs[name] for name in ("logits", "boxes", "masks")}, PostprocessSpec()


def _features(outputs: Values, asked: bool) -> Found | None:
    found = floats(outputs)
    if "features" in found:
        return {name: found[name] for name in ("features", "patch_features") if name in found}, None
    flat = floats(outputs, 2)
    return ({"features": next(iter(flat.values()))}, None) if asked and len(flat) == 1 else None


def _classes(outputs: Values, asked: bool) -> Found | None:
    flat = floats(outputs, 2)
    if len(flat) != 1 and "logits" not in flat:
        return None
    return {"logits": flat["logits"] if "logits" in flat else next(iter(flat.values()))}, None


# The first that finds its outputs has them.
ROWS = (
    GraphOutputs("detection", _ranked, "labels, boxes and scores"),
    GraphOutputs("panoptic", _segments, "logits, boxes and masks"),
    GraphOutputs("detection", _rf_detr, "dets and labels"),
    GraphOutputs("detection", _objects, "logits and boxes"),
    keypoint_outputs.ROW,
    dense_outputs.SEGMENTATION,
    instance_outputs.ROW,
    dense_outputs.DEPTH,
    anomaly_outputs.ROW,
    image_outputs.ROW,
    GraphOutputs("detection", _joined, "one tensor [batch, queries, 4 + classes] that ends with sigmoids"),
    GraphOutputs("features", _features, "features [batch, width]"),
    GraphOutputs("classification", _classes, "logits [batch, classes]"),
    any_outputs.ROW,
)
