"""Recognises the queries with masks of an instance segmentation model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vitdeploy.models.external.dense_outputs import mask_size
from vitdeploy.models.external.output_row import Output, OutputRow, field
from vitdeploy.spec import InstanceSpec, TensorSpec

# transformers' processor of EoMT shows what has this score.
EOMT_THRESHOLD = 0.8
# The class of transformers whose queries with boxes and masks are instances; those of all others are panoptic.
RF_DETR = "RfDetrForInstanceSegmentation"


def _queries(result: Any, asked: bool) -> list[Output]:
    """Only where it is asked for: semantic models have the same outputs."""
    if not asked or not isinstance(result, Mapping) or field(result, "pred_boxes") is not None:
        return []
    classes = field(result, "class_queries_logits", "pred_logits")
    return _pair(classes, field(result, "masks_queries_logits", "pred_masks"))


def _with_boxes(result: Any, asked: bool) -> list[Output]:
    """Only where it is asked for: panoptic models have the same outputs. The masks say more than the boxes."""
    if not asked or not isinstance(result, Mapping) or field(result, "pred_boxes") is None:
        return []
    return _pair(field(result, "logits", "pred_logits"), field(result, "pred_masks"))


def _pair(classes: Tensor | None, masks: Tensor | None) -> list[Output]:
    if classes is None or masks is None or (classes.ndim, masks.ndim) != (3, 4):
        return []
    return [("class_logits", classes), ("masks", masks)]


def _spec(model: nn.Module, outputs: Sequence[TensorSpec]) -> InstanceSpec:
    """As transformers' processor of the class reads them; as Mask2Former's of a class that is not theirs."""
    if type(model).__name__.startswith("Eomt"):
        return InstanceSpec("softmax", "queries", mask_size(model), "bilinear", EOMT_THRESHOLD)
    return InstanceSpec(mask_size=mask_size(model))


QUERIES = OutputRow(
    "instance-segmentation", _queries, "class_queries_logits and masks_queries_logits, with --task", _spec
)
DETECTOR = OutputRow(
    "instance-segmentation",
    _with_boxes,
    "logits, pred_boxes and pred_masks of independent scores (RF-DETR), with --task",
    lambda model, outputs: InstanceSpec("sigmoid", enlarge="bilinear"),
)
