"""Determine the task of a graph from the names and shapes of its outputs."""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import onnx_ir as ir

from vitdeploy.errors import GraphError
from vitdeploy.graph.edit import rename
from vitdeploy.graph.io import endings, meanings
from vitdeploy.runtime.tasks.anomaly import ANOMALY_MAP, GIVEN, PREDICTED_SCORE
from vitdeploy.runtime.tasks.depth import DepthSpec
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.tasks.image_to_image import RECONSTRUCTION, ImageSpec
from vitdeploy.runtime.tasks.instance_segmentation import InstanceSpec
from vitdeploy.runtime.tasks.keypoints import HEATMAPS, KeypointSpec
from vitdeploy.runtime.tasks.segmentation import SegmentationSpec
from vitdeploy.runtime.tasks.tensors import TensorsSpec
from vitdeploy.runtime.values import last_resort
from vitdeploy.spec import (
    DEVICE_ROWS,
    Evidence,
    OutputSpec,
    Postprocess,
    Task,
    postprocess_of,
    recognising_classes,
    task_read_by,
)

# Exporters differ in the names of outputs and in whether post-processing is part of the graph. Known forms:
#
#     labels + boxes + scores                                           RT-DETR, D-FINE, DEIM as their code exports them
#     dets + labels [+ masks]                                           RF-DETR as its code exports it
#     one float tensor [batch, queries, 4 + classes] or [..., 6]        RT-DETR as Ultralytics exports it
#     logits, pred_logits + boxes, pred_boxes [+ masks, pred_masks]     DETR and related models, as optimum exports them
#     heatmaps                                                          key points, as transformers and mmpose name them
#     reconstruction                                                    an image, as transformers names it
#     features [+ patch_features]                                       a feature extractor, as transformers names them
#     one float tensor [batch, width] or [batch]                        classes, labels, embedding, measures: `meanings`
#     logits of four axes; class_queries_logits + masks_queries_logits   a semantic segmentation model, as transformers
#     the same queries, or a detector's with masks, on request           an instance segmentation model
#     predicted_depth                                                   a depth model, as transformers names it
#     anomaly_map + pred_score                                          an anomaly model, as anomalib names them
#     outputs that a task's class recognises                            `OutputSpec.among`
#     any other outputs with a batch axis                               compared as raw numbers
#
# The nodes that compute an output show what names do not: whether scores compete or are independent, and whether boxes
# are relative to the image.

ALIASES = {
    "pred_logits": "logits",
    "pred_boxes": "boxes",
    "pred_masks": "masks",
    "last_hidden_state": "patch_features",
    "pooler_output": "features",
    "image_embeds": "features",
}


def task_of(model: ir.Model, path: Path, asked: Task | None = None) -> tuple[Task, Postprocess | None, tuple[str, ...]]:
    """Determine the task: the first whose outputs the graph has, `asked` before all others. Rename its outputs and drop
    the rest, in place. Returns the task, the meaning of the outputs, and notes on assumptions, one per line.

    Probabilities become logits again. Further outputs that may be answers are dropped if the user requested the task;
    otherwise all outputs are kept as raw numbers.

    Raises:
        GraphError: the outputs fit no task, or not the requested one.
    """
    read = task_read_by(asked)
    if asked is not None and read is not None:
        return _read_as(model, asked, *task_of(model, path, read))
    outputs = {ALIASES.get(str(value.name), str(value.name)): value for value in model.graph.outputs}
    reason = ""
    rows = (*_declared(asked), *ROWS)
    for row in (*_added(asked), *sorted(rows, key=lambda row: row.task != asked)):
        if (found := row.find(outputs, row.task == asked)) is None:
            continue
        task, (kept, postprocess), told = row.task, found, ""
        if task in meanings.SCORES:
            [value] = kept.values()
            meaning = _meaning(path, value, asked)
            task, told = meaning.task, meaning.note
            if task == "tensors":
                reason = told
                continue
            kept, kind = {meaning.output: value}, postprocess_of(task)
            postprocess = None if kind is None else kind()
        answer, left = list(kept.values()), [value for value in outputs.values() if value not in kept.values()]
        if task in meanings.FLAT and asked != task:
            own = [
                value
                for value in left
                if not meanings.of_training(str(value.name)) and not endings.computed_of(value, answer[0])
            ]
            if own:
                reason = meanings.all_kept(task, _names(answer), _names(own))
                continue
        if task == "tensors" != asked:
            known = (*rows, *(each for name in DEVICE_ROWS for each in _added(name)))
            others = {each.task: match for each in known if each is not row and (match := each.find(outputs, True))}
            proposals = [spec.proposal for _, spec in others.values() if spec is not None]
            told = "; ".join([reason or last_resort(tuple(others)), *filter(None, proposals)])
        told = told or (postprocess.assumed if postprocess is not None else "")
        notes = (*filter(None, [told]), *([meanings.left_out(_names(left))] if left else []))
        return task, _put(model, kept, postprocess, task), notes
    raise GraphError(
        f"the outputs of {path} do not fit any task of vitdeploy",
        found="; ".join(f"{v.name}: {v.dtype}{list(v.shape) if v.shape is not None else ''}" for v in outputs.values()),
        expected="; or ".join(dict.fromkeys(row.expected for row in reversed(rows))),
        fix="export the model with outputs of these names",
    )


def _read_as(
    model: ir.Model, asked: Task, found: Task, postprocess: Postprocess | None, notes: tuple[str, ...]
) -> tuple[Task, Postprocess | None, tuple[str, ...]]:
    """The result for `asked`, a task that reads the outputs of the task `found`; outputs that it does not read go."""
    kind = postprocess_of(asked)
    if kind is None or kind.reads != found:
        return found, postprocess, notes
    others = [value for value in model.graph.outputs if value.name not in kind.tensors]
    for value in others:
        model.graph.outputs.remove(value)
    return asked, kind(), (*notes, *([meanings.left_out(_names(others))] if others else []))


def _meaning(path: Path, value: ir.Value, asked: Task | None) -> meanings.Meaning:
    """The meaning of an output [batch, width] or [batch]."""
    assert value.shape is not None
    width = value.shape[1] if len(value.shape) == 2 else 1
    name, shown = str(value.name), width if isinstance(width, int) else str(width)
    meaning = meanings.meaning_of(name, shown, endings.ending_of(value), asked=asked)
    if meaning.refusal:
        raise GraphError(
            f"{path} cannot be used for the task {asked}",
            found=meaning.refusal,
            expected=meaning.expected,
            fix="omit the task",
        )
    return meaning


def _names(values: Iterable[ir.Value]) -> list[str]:
    return [str(value.name) for value in values]


def _put(model: ir.Model, kept: dict[str, ir.Value], postprocess: Postprocess | None, task: Task) -> Postprocess | None:
    """Make `kept` the graph's outputs, with logits instead of probabilities; return their meaning."""
    del model.graph.outputs[:]
    objects = isinstance(postprocess, PostprocessSpec) and postprocess.scores != "given"
    for name, value in kept.items():
        if name == "logits" and (task == "classification" or objects):
            value, scores = endings.as_logits(model, value)
            if scores is not None and isinstance(postprocess, PostprocessSpec):
                postprocess = replace(postprocess, scores=scores)
        rename(model, value, name)
        model.graph.outputs.append(value)
    return postprocess


# --- A row per task ---------------------------------------------------------------------------------------------------


Values = Mapping[str, ir.Value]
# The outputs under the task's names, and their meaning.
Found = tuple[dict[str, ir.Value], Postprocess | None]
Find = Callable[[Values, bool], Found | None]
FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
OTHERS = (ir.DataType.INT64, ir.DataType.INT32, ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.BOOL)
INPUT = "image"
# Class logits and masks of queries: transformers' names, and those of the papers' code.
QUERIES = (("class_queries_logits", "masks_queries_logits"), ("logits", "masks"))
# Boxes, class logits and masks of detectors with masks: RF-DETR's names, and those of other code.
RF_DETR, DETECTOR = ("dets", "labels", "masks"), ("boxes", "logits", "masks")


class _GraphOutputs(NamedTuple):
    """How to find a task's outputs among those of a graph.

    find: takes the outputs, under the task's names if they have known aliases, and whether the user requested this
        task; returns None if they do not fit. Outputs that fit several tasks are found on request only.
    expected: a description of the outputs for messages.
    """

    task: Task
    find: Find
    expected: str


def _floats(outputs: Values, rank: int | None = None) -> dict[str, ir.Value]:
    """The float32 outputs, only those with `rank` axes if it is given."""
    found = {name: value for name, value in outputs.items() if value.dtype == ir.DataType.FLOAT}
    if rank is None:
        return found
    return {name: value for name, value in found.items() if value.shape is not None and len(value.shape) == rank}


def _floats_of(outputs: Values, axes: Iterable[int]) -> dict[str, ir.Value]:
    """The float32 outputs with any of these numbers of axes."""
    return {name: value for rank in axes for name, value in _floats(outputs, rank).items()}


def _maps(outputs: Values, fits: Callable[[object], bool]) -> dict[str, ir.Value]:
    """The float32 outputs [batch, channels, height, width] whose number of channels `fits`."""
    return {name: value for name, value in _floats(outputs, 4).items() if value.shape and fits(value.shape[1])}


def _all_of(among: Callable[[Values], Values], names: Mapping[str, str], postprocess: Postprocess) -> Find:
    """Finds all outputs with these names; `names`: output name to the task's name."""

    def find(outputs: Values, asked: bool) -> Found | None:
        there = among(outputs)
        if not set(names) <= set(there):
            return None
        return {name: there[own] for own, name in names.items()}, postprocess

    return find


def _one_of(among: Callable[[Values], Values], own: str, name: str, postprocess: Postprocess) -> Find:
    """Finds the output named `own`; if the user requested the task, a single output of any name. `name`: the task's
    name for it."""

    def find(outputs: Values, asked: bool) -> Found | None:
        there = among(outputs)
        chosen = [there[own]] if own in there else list(there.values()) if asked else []
        return ({name: chosen[0]}, postprocess) if len(chosen) == 1 else None

    return find


def _ranked(outputs: Values, asked: bool) -> Found | None:
    names = ("labels", "boxes", "scores")
    if not set(names) <= set(outputs):
        return None
    endings.ranked_in_pixels(outputs["boxes"])
    return {name: outputs[name] for name in names}, PostprocessSpec(scores="given", boxes="xyxy")


def _joined(outputs: Values, asked: bool) -> Found | None:
    """Boxes, scores and perhaps classes in one tensor."""
    found = _floats(outputs, 3)
    return endings.joined(next(iter(found.values()))) if len(found) == len(outputs) == 1 else None


def _objects(outputs: Values, asked: bool) -> Found | None:
    if not {"logits", "boxes"} <= set(outputs):
        return None
    independent = endings.independent_scores(outputs["boxes"])
    postprocess = PostprocessSpec("sigmoid" if independent else "softmax")
    return {name: outputs[name] for name in ("logits", "boxes")}, postprocess


def _class_maps(outputs: Values, asked: bool) -> Found | None:
    """Finds outputs by transformers' names; on request, a single output with four axes."""
    ranked, (classes, masks) = _floats(outputs, 3) | _floats(outputs, 4), QUERIES[0]
    if {classes, masks} <= set(ranked):
        return {"class_logits": ranked[classes], "masks": ranked[masks]}, SegmentationSpec("queries")
    of_classes = _one_of(lambda every: _maps(every, lambda size: size != 1), "logits", "logits", SegmentationSpec())
    return of_classes(outputs, asked)


def _instances(outputs: Values, asked: bool) -> Found | None:
    """Finds outputs on request only: semantic models have the same outputs, and panoptic models nearly the same. Boxes
    with competing scores are DETR's, whose masks belong to a panoptic map."""
    found = _floats(outputs, 3) | _floats(outputs, 4)
    if not asked:
        return None
    for boxes, classes, masks in (RF_DETR, DETECTOR):
        if {boxes, classes, masks} <= set(found):
            independent = boxes == RF_DETR[0] or endings.independent_scores(found[boxes])
            kept = {"class_logits": found[classes], "masks": found[masks]}
            return (kept, InstanceSpec("sigmoid", enlarge="bilinear")) if independent else None
    names = next((pair for pair in QUERIES if set(pair) <= set(found)), None)
    return None if names is None else ({"class_logits": found[names[0]], "masks": found[names[1]]}, InstanceSpec())


def _features(outputs: Values, asked: bool) -> Found | None:
    flat, tokens = _floats(outputs, 2), _floats(outputs, 3)
    if "features" in flat:
        return {"features": flat["features"]} | {n: tokens[n] for n in ("patch_features",) if n in tokens}, None
    vector = _one(flat, "vector") if asked else None
    return ({"features": vector}, None) if vector is not None else None


def _classes(outputs: Values, asked: bool) -> Found | None:
    flat = _floats(outputs, 2) or (_floats(outputs, 1) if len(outputs) == 1 else {})
    logits = flat.get("logits", _one(flat, "classes"))
    return ({"logits": logits}, None) if logits is not None else None


def _one(flat: Values, word: str) -> ir.Value | None:
    """The only output; among several, the only one whose name has this meaning."""
    found = [value for name, value in flat.items() if len(flat) == 1 or meanings.called(name) == word]
    return found[0] if len(found) == 1 else None


def _tensors(outputs: Values, asked: bool) -> Found | None:
    """All outputs under their own names, if each is numeric and has a batch axis."""
    for value in outputs.values():
        if value.dtype not in (*FLOATS, *OTHERS) or value.shape is None or not len(value.shape):
            return None
    own = {INPUT + "_" if value.name == INPUT else str(value.name): value for value in outputs.values()}
    return own, TensorsSpec(tuple(name for name, value in own.items() if value.dtype in OTHERS))


def _planes(outputs: Values) -> Values:
    return _floats(outputs, 3) | _maps(outputs, lambda size: size == 1)


# The first row that finds its outputs wins.
ROWS = (
    _GraphOutputs("detection", _ranked, "labels, boxes and scores"),
    _GraphOutputs(
        "panoptic",
        _all_of(dict, {name: name for name in ("logits", "boxes", "masks")}, PostprocessSpec()),
        "logits, boxes and masks",
    ),
    # RF-DETR: `labels` are independent logits, one more than there are labels; masks are not used here.
    _GraphOutputs(
        "detection",
        _all_of(lambda outputs: _floats(outputs, 3), {"labels": "logits", "dets": "boxes"}, PostprocessSpec("sigmoid")),
        "dets and labels",
    ),
    _GraphOutputs("detection", _objects, "logits and boxes"),
    _GraphOutputs(
        "keypoints",
        _one_of(lambda outputs: _floats(outputs, 4), HEATMAPS, HEATMAPS, KeypointSpec()),
        "heatmaps [batch, points, height, width]",
    ),
    _GraphOutputs("segmentation", _class_maps, f"logits [batch, classes, height, width]; {' and '.join(QUERIES[0])}"),
    _GraphOutputs("instance-segmentation", _instances, f"{' and '.join(QUERIES[0])}, with --task"),
    _GraphOutputs(
        "depth", _one_of(_planes, "predicted_depth", "depth", DepthSpec()), "predicted_depth [batch, height, width]"
    ),
    # pred_label and pred_mask, which are computed from these two, are dropped.
    _GraphOutputs(
        "anomaly",
        _all_of(_floats, {name: name for name in (ANOMALY_MAP, PREDICTED_SCORE)}, GIVEN),
        "anomaly_map [batch, 1, height, width] and pred_score [batch]",
    ),
    _GraphOutputs(
        "image-to-image",
        _one_of(
            lambda outputs: _maps(outputs, lambda size: size in (1, 3)), RECONSTRUCTION, RECONSTRUCTION, ImageSpec()
        ),
        "reconstruction [batch, 1 or 3, height, width]",
    ),
    _GraphOutputs("detection", _joined, "one tensor [batch, queries, 4 + classes] that ends with sigmoids"),
    _GraphOutputs("features", _features, "features [batch, width]"),
    _GraphOutputs("classification", _classes, "logits [batch, classes]"),
    _GraphOutputs("tensors", _tensors, "any numbers [batch, ...] (--task tensors)"),
)


def _added(asked: Task | None) -> Iterator[_GraphOutputs]:
    """The row of a requested task whose class names its float outputs: finds these, or a single output."""
    if asked is None or (kind := postprocess_of(asked)) is None or not kind.tensors or kind.reads:
        return

    def find(outputs: Values, asked: bool) -> Found | None:
        there = {name: _floats_of(outputs, kind.axes(name)) for name in kind.tensors}
        if len(there) == len(outputs) == 1:
            [(name, values)] = there.items()
            return ({name: next(iter(values.values()))}, kind()) if values else None
        fits = all(name in values for name, values in there.items())
        return ({name: values[name] for name, values in there.items()}, kind()) if fits else None

    yield _GraphOutputs(asked, find, kind.in_words())


def _declared(asked: Task | None) -> Iterator[_GraphOutputs]:
    """The rows of tasks whose class recognises its outputs."""
    for task, kind in recognising_classes(asked).items():
        yield _GraphOutputs(task, functools.partial(_by_class, kind), kind.in_words())


def _by_class(kind: type[OutputSpec], outputs: Values, asked: bool) -> Found | None:
    floats = {name: value for name, value in _floats(outputs).items() if value.shape is not None and len(value.shape)}
    chosen = kind.among({name: _behind_batch(value) for name, value in floats.items()}, asked)
    kept = {name: floats[own] for name, own in chosen.items()}
    if not kept:
        return None
    told = kind.by_evidence({name: _evidence(str(value.name), value) for name, value in kept.items()})
    return kept, told or kind.by_range(all(map(endings.is_bounded, kept.values())))


def _evidence(name: str, value: ir.Value) -> Evidence:
    width, *_ = (*_behind_batch(value), 1)
    return meanings.evidence_of(name, width, endings.ending_of(value))


def _behind_batch(value: ir.Value) -> tuple[int | str, ...]:
    return tuple(size if isinstance(size, int) else str(size) for size in list(value.shape or ())[1:])
