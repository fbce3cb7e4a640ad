"""Which task the outputs of somebody else's graph are of, by their names and shapes: a row per task.

Exporters differ in what they call their outputs and in whether post-processing is part of the graph. What is known:

    labels + boxes + scores                                           RT-DETR, D-FINE, DEIM as their code exports them
    dets + labels [+ masks]                                           RF-DETR as its code exports it
    one float tensor [batch, queries, 4 + classes] or [..., 6]        RT-DETR as Ultralytics exports it
    logits, pred_logits + boxes, pred_boxes [+ masks, pred_masks]     DETR and its kin as optimum and others export them
    features [+ patch_features]                                       a feature extractor, as transformers names them
    one float tensor [batch, classes]                                 a classifier

What no name says is read from the nodes that compute an output: whether scores compete or are independent, and whether
boxes are relative to the image.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.io.detectors import independent_scores, joined, ranked_in_pixels
from vitdeploy.spec import Postprocess, PostprocessSpec, Task

ALIASES = {
    "pred_logits": "logits",
    "pred_boxes": "boxes",
    "pred_masks": "masks",
    "last_hidden_state": "patch_features",
    "pooler_output": "features",
    "image_embeds": "features",
}
Values = Mapping[str, ir.Value]
# The task's outputs by its names for them, and what they mean.
Found = tuple[dict[str, ir.Value], Postprocess | None]


@dataclass(frozen=True)
class GraphOutputs:
    """How a task's outputs are found among those of a graph.

    find: takes these, by the task's names where they have known aliases, and whether the user asked for this task;
        returns None if they are not of the task. Some are of several tasks: which have to be asked for.
    wanted: the outputs in words.
    """

    task: Task
    find: Callable[[Values, bool], Found | None]
    wanted: str


def task_of(model: ir.Model, path: Path, asked: Task | None = None) -> tuple[Task, Postprocess | None]:
    """Name the outputs as the first task does that finds its own, `asked` before all others, and drop the rest.

    Raises:
        GraphError: they are of no task.
    """
    outputs = {ALIASES.get(str(value.name), str(value.name)): value for value in model.graph.outputs}
    for row in sorted(ROWS, key=lambda row: row.task != asked):
        if (found := row.find(outputs, row.task == asked)) is None:
            continue
        kept, postprocess = found
        del model.graph.outputs[:]
        for name, value in kept.items():
            value.name = name
            model.graph.outputs.append(value)
        return row.task, postprocess
    raise GraphError(
        f"the outputs of {path} are of no task that vitdeploy has",
        found="; ".join(f"{v.name}: {v.dtype}{list(v.shape) if v.shape is not None else ''}" for v in outputs.values()),
        wanted="; or ".join(dict.fromkeys(row.wanted for row in reversed(ROWS))),
        fix="export it with outputs of these names",
    )


def floats(outputs: Values, rank: int | None = None) -> dict[str, ir.Value]:
    """The float32 outputs, of that many axes if given."""
    found = {name: value for name, value in outputs.items() if value.dtype == ir.DataType.FLOAT}
    if rank is None:
        return found
    return {name: value for name, value in found.items() if value.shape is not None and len(value.shape) == rank}


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
    GraphOutputs("detection", _joined, "one tensor [batch, queries, 4 + classes] that ends with sigmoids"),
    GraphOutputs("features", _features, "features [batch, width]"),
    GraphOutputs("classification", _classes, "logits [batch, classes]"),
)
