"""What a module that is not ours returned, as the outputs of a task: a row per task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vitdeploy.graph.io.meanings import OUTPUTS
from vitdeploy.models.external import any_outputs, dense_outputs, image_outputs, instance_outputs, keypoint_outputs
from vitdeploy.models.external.output_row import Output, OutputRow, field, tensors_of
from vitdeploy.models.model_folder.objects import reading_rule
from vitdeploy.spec import PostprocessSpec, Task, TensorSpec

# Of a mapping, the names of an embedding.
VECTORS = ("image_embeds", "pooler_output", "features", "embedding", "embeddings")
# Channels of a map that are more than classes usually are; and pixels of the image for each of its own, where fewer.
_MANY_CHANNELS, _FINE = 64, 8
_FEW_CHANNELS = 3  # of a mask, or of a picture: no vector


def recognised(result: Any, task: Task | None) -> tuple[OutputRow, list[Output]] | None:
    """The first row that finds its outputs, that of `task` before all others; None if none does. What is no float is of
    no task but that of last resort."""
    if isinstance(result, tuple | list) and len(result) == 1:
        return recognised(result[0], task)
    for row in sorted(ROWS, key=lambda row: row.task != task):
        outputs = row.find(result, row.task == task)
        if outputs and (row is any_outputs.ROW or all(tensor.is_floating_point() for _, tensor in outputs)):
            return row, outputs
    return None


def other_tasks(result: Any, task: Task) -> tuple[Task, ...]:
    """The other tasks, best first, that find their outputs if they are asked for; not that of last resort."""
    rows = [row for row in ROWS if row.task != task and row is not any_outputs.ROW and row.find(result, True)]
    return tuple(dict.fromkeys(row.task for row in rows))


def _objects(result: Any, asked: bool) -> list[Output]:
    """A detector's: [b, q, c] and [b, q, 4], by the names of transformers and of the papers' code, or in this order."""
    if isinstance(result, Mapping):
        logits, boxes = field(result, "logits", "pred_logits"), field(result, "pred_boxes")
    else:
        logits, boxes, *_ = tensors_of(result, 2, 3) or (None, None)
    if logits is None or boxes is None or (logits.ndim, boxes.ndim, boxes.shape[-1]) != (3, 3, 4):
        return []
    return [("logits", logits), ("boxes", boxes)]


def _segments(result: Any, asked: bool) -> list[Output]:
    """A detector's, and masks [b, q, h, w] of its queries."""
    masks = field(result, "pred_masks") if isinstance(result, Mapping) else next(iter(tensors_of(result, 3)[2:]), None)
    objects = _objects(result, asked)
    return [*objects, ("masks", masks)] if objects and masks is not None else []


def _classes(result: Any, asked: bool) -> list[Output]:
    logits = result if isinstance(result, Tensor) else field(result, "logits")
    return [("logits", logits)] if logits is not None and logits.ndim == 2 else []


def _features(result: Any, asked: bool) -> list[Output]:
    """[b, d], a tensor alone only where it is asked for; tokens; a pooled and a token tensor; transformers' fields."""
    if isinstance(result, Tensor):
        return [("features", result)] if result.ndim == 2 and asked else _tokens(result)
    if isinstance(result, Mapping):
        pooled, hidden = field(result, *VECTORS), field(result, "last_hidden_state")
        found: list[Output] = [] if pooled is None else [("features", pooled.flatten(1))]
        tokens = [] if hidden is None else _tokens(hidden)
        return [*found, *(tokens[1:] if found else tokens)]
    pooled, tokens_of, *_ = tensors_of(result, 2, 3) or (None, None)
    if pooled is None or tokens_of is None or (pooled.ndim, tokens_of.ndim) != (2, 3):
        return []
    return [("features", pooled), ("patch_features", tokens_of)]


def map_of(result: Any, image_size: tuple[int, int]) -> tuple[Task, str]:
    """Whether a bare tensor that might be features is, with a note, or an answer for every pixel: numbers, then.

    A backbone's map is coarse and has many channels."""
    sides, channels = result.shape[-2:], result.shape[1] if result.ndim == 4 else 1
    strides = {size // side if size % side == 0 else 0 for size, side in zip(image_size, sides, strict=True)}
    if result.ndim == 3:
        return ("tensors", "") if len(strides) == 1 and 0 not in strides and max(strides) <= _FINE else ("features", "")
    if channels < _MANY_CHANNELS or max(strides) < _FINE:
        return "tensors", ""
    return (
        "features",
        f"{OUTPUTS}{list(result.shape[1:])} of an image is taken for a feature map: features are its mean",
    )


def _tokens(result: Tensor) -> list[Output]:
    """[b, n, d]: the first token and the others; [b, d, h, w]: a feature map and its mean."""
    if result.ndim == 3:
        return [("features", result[:, 0]), ("patch_features", result[:, 1:])]
    if result.ndim == 4 and result.shape[1] > _FEW_CHANNELS:
        return [("features", result.mean(dim=(2, 3))), ("patch_features", result.flatten(2).transpose(1, 2))]
    return []


def _object_scores(model: nn.Module, outputs: Sequence[TensorSpec]) -> PostprocessSpec | None:
    """How objects are read from a detector's outputs: as transformers does; by sigmoid if it is no model of theirs."""
    config = getattr(model, "config", None)
    own = {key: getattr(config, key, None) for key in ("model_type", "use_focal_loss")}
    return reading_rule(own) if own["model_type"] else PostprocessSpec(scores="sigmoid")


OBJECTS = "logits [batch, queries, classes] and boxes [batch, queries, 4]"
# The first that finds its outputs has them; what a person reads of them is in this order, too.
ROWS = (
    OutputRow("panoptic", _segments, f"{OBJECTS}, and masks [batch, queries, height, width]", _object_scores),
    OutputRow("detection", _objects, OBJECTS, _object_scores),
    dense_outputs.SEGMENTATION,
    instance_outputs.QUERIES,
    instance_outputs.DETECTOR,
    dense_outputs.DEPTH,
    OutputRow("classification", _classes, "logits [batch, classes]"),
    keypoint_outputs.ROW,
    image_outputs.ROW,
    OutputRow("features", _features, "features [batch, width]"),
    any_outputs.ROW,
)
