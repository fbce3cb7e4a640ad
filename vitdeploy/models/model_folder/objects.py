"""How transformers reads the objects of its detectors: by the image processor that belongs to a model, not by the width
of its head. A softmax has one class more than a sigmoid, and either reads the other's logits without a complaint.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vitdeploy.errors import CheckpointError
from vitdeploy.models.model_folder.config import backbone_size, window_step
from vitdeploy.models.model_folder.image_processor import fixed_size, processor_name, short_side
from vitdeploy.spec import PostprocessSpec

SOFTMAX, SIGMOID = PostprocessSpec(scores="softmax"), PostprocessSpec(scores="sigmoid")
BEST_100 = PostprocessSpec(scores="sigmoid", top_k=100)
# `post_process_object_detection` of the classes of transformers 5.23, with its own defaults.
RULES: Mapping[str, PostprocessSpec] = {
    "Detr": SOFTMAX,
    "Yolos": SOFTMAX,
    "ConditionalDetr": BEST_100,
    "DeformableDetr": BEST_100,
    "RTDetr": SIGMOID,
    "RfDetr": SIGMOID,
}
# `model_type` -> the processor that transformers' documentation and conversions give it.
PROCESSOR_OF: Mapping[str, str] = {
    "detr": "Detr",
    "table-transformer": "Detr",
    "yolos": "Yolos",
    "conditional_detr": "ConditionalDetr",
    "dab-detr": "ConditionalDetr",
    "deformable_detr": "DeformableDetr",
    "lw_detr": "DeformableDetr",
    "rt_detr": "RTDetr",
    "rt_detr_v2": "RTDetr",
    "d_fine": "RTDetr",
    "deimv2": "RTDetr",
    "rf_detr": "RfDetr",
}


def usual_processor(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """A file of the processor that belongs to a detector's config.json, with its defaults alone; None for others."""
    name = PROCESSOR_OF.get(str(config.get("model_type")))
    return None if name is None else {"image_processor_type": f"{name}ImageProcessor"}


def detector_size(config: Mapping[str, Any], processor: Mapping[str, Any] | None) -> tuple[int, int] | None:
    """The image size, (height, width), of a detector whose config.json tells none; None for other models.

    It is that of its processor's file, of its backbone, or of its processor's class. A processor that keeps the aspect
    has one side, which both become; not one that the windows of the backbone do not divide.
    """
    usual = usual_processor(config)
    if usual is None:
        return None
    square = [short_side(each) if each is not None else None for each in (processor, usual)]
    step = window_step(config)
    own, default = ((side, side) if side is not None and side % step == 0 else None for side in square)
    return own or backbone_size(config) or fixed_size(usual) or default


def reading_rule(config: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> PostprocessSpec | None:
    """How objects are read from the outputs of a model of transformers; None if nothing says it.

    Args:
        config: its config.json.
        processor: its image processor's file, if it has one.

    Raises:
        CheckpointError: the file is of a processor that reads objects in another way than that of the model's type.
    """
    if config.get("use_focal_loss") is False:
        return None  # transformers takes this softmax over the batch: there is no rule to follow
    own, told = PROCESSOR_OF.get(str(config.get("model_type"))), processor_name(processor or {})
    usual, given = RULES.get(own or ""), RULES.get(told)
    if usual is not None and given is not None and usual.scores != given.scores:
        raise CheckpointError(
            f"the image processor and the model of {config.get('model_type')} score objects in different ways",
            found=f"{told}ImageProcessor: {given.scores}; {own}ImageProcessor, the model's: {usual.scores}",
            wanted="the processor that was saved with the model",
            fix="correct image_processor_type in preprocessor_config.json",
        )
    return given or usual
