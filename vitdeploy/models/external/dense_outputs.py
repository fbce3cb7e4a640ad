"""What modules with an answer for every pixel return: classes, or depth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from vitdeploy.models.external.output_row import Output, OutputRow, field
from vitdeploy.models.model_folder.config import sides
from vitdeploy.spec import DepthSpec, SegmentationSpec, TensorSpec

# transformers' own post-processing enlarges the masks to this size first, whatever the input's is.
MASK2FORMER_MASKS = (384, 384)
# Classes of transformers whose predicted depth is in metres; all others say it in their config, or are relative.
METRIC = ("ZoeDepthFor", "GLPNFor", "DepthProFor", "PromptDepthAnythingFor")


def _class_maps(result: Any, asked: bool) -> list[Output]:
    """Logits [b, c, h, w] by their name, a tensor alone only where it is asked for; queries with masks."""
    if isinstance(result, Mapping):
        classes, masks = field(result, "class_queries_logits"), field(result, "masks_queries_logits")
        if classes is not None and masks is not None:
            return [("class_logits", classes), ("masks", masks)]
        logits = field(result, "logits", *(["out"] if asked else []))  # torchvision's
    elif asked:
        logits = result if isinstance(result, Tensor) else None
    else:
        return []
    return [("logits", logits)] if logits is not None and logits.ndim == 4 and logits.shape[1] > 1 else []


def _segmentation(model: nn.Module, outputs: Sequence[TensorSpec]) -> SegmentationSpec:
    return SegmentationSpec() if outputs[0].name == "logits" else SegmentationSpec("queries", mask_size(model))


def mask_size(model: nn.Module) -> tuple[int, int] | None:
    """(height, width) to which transformers' processor enlarges the masks of this class first; None if it does not."""
    name = type(model).__name__
    if name.startswith("Mask2Former"):
        return MASK2FORMER_MASKS
    return sides(getattr(getattr(model, "config", None), "image_size", None)) if name.startswith("Eomt") else None


def _depth_maps(result: Any, asked: bool) -> list[Output]:
    """Depth [b, h, w] by its name; a tensor alone, also [b, 1, h, w], only where it is asked for."""
    depth = field(result, "predicted_depth")
    if depth is None and asked:
        depth = result if isinstance(result, Tensor) else field(result, "depth")
    if depth is None or not (depth.ndim == 3 or (depth.ndim == 4 and depth.shape[1] == 1)):
        return []
    return [("depth", depth)]


def _depth(model: nn.Module, outputs: Sequence[TensorSpec]) -> DepthSpec:
    config = getattr(model, "config", None)
    metric = getattr(config, "depth_estimation_type", None) == "metric" or type(model).__name__.startswith(METRIC)
    limit = getattr(config, "max_depth", None) if metric else None
    return DepthSpec("metric" if metric else "inverse", max_depth=float(limit) if limit else None)


def sizes_of_patches(model: nn.Module, image_size: tuple[int, int]) -> str | None:
    """The next smaller and larger image sizes that the model's patches divide, in words; None if they divide this one,
    or the model does not say its patches."""
    config = getattr(model, "config", None)
    parts = (config, getattr(config, "backbone_config", None))
    patch = next((side for part in parts if isinstance(side := getattr(part, "patch_size", None), int)), None)
    if not patch or not any(side % patch for side in image_size):
        return None
    down, up = (
        [max(1, side // patch + more) * patch if side % patch else side for side in image_size] for more in (0, 1)
    )
    return f"{down[0]}x{down[1]} or {up[0]}x{up[1]}, which patches of {patch} pixels divide"


SEGMENTATION = OutputRow(
    "segmentation",
    _class_maps,
    "logits [batch, classes, height, width]; class_queries_logits and masks_queries_logits",
    _segmentation,
)
DEPTH = OutputRow("depth", _depth_maps, "predicted_depth [batch, height, width]", _depth)
