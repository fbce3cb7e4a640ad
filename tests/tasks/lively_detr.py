"""Small DETRs whose queries see different things: a randomly initialised one gives all queries nearly the same answer,
and then a mix-up of boxes, classes or masks could not be seen."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.detr_reference import small

SIDE = 64
CLASSES = tuple(f"class {index}" for index in range(7))
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def lively(panoptic: bool, images: Tensor) -> Any:
    """transformers' model, made to tell these images apart (float32 [n, 3, SIDE, SIDE], normalised)."""
    model: Any = copy.deepcopy(small(panoptic))
    model.config.id2label = dict(enumerate(CLASSES))
    model.config.label2id = {name: index for index, name in enumerate(CLASSES)}
    detr = model.detr if panoptic else model
    with torch.no_grad():
        detr.model.query_position_embeddings.weight.mul_(5)
        projected: list[Tensor] = []
        hook = detr.model.input_projection.register_forward_hook(lambda module, inputs, out: projected.append(out))
        model(images)
        hook.remove()
        _spread(detr.model.input_projection, projected[0].movedim(1, -1).flatten(0, -2), 1.0)
        outputs = model(images)
        _spread(detr.class_labels_classifier, outputs.logits.flatten(0, 1), 1.5)
        _spread(detr.bbox_predictor.layers[-1], outputs.pred_boxes.logit().flatten(0, 1), 0.5)
        if panoptic:
            # Attention maps are all that differs between the masks of an image: they must not drown in the features.
            model.mask_head.conv1.conv.weight[:, model.config.d_model :].mul_(300)
            for stage in model.mask_head.fpn_stages:
                stage.fpn_adapter.weight.mul_(0.1)
                stage.fpn_adapter.bias.mul_(0.1)
            _spread(model.mask_head.output_conv, model(images).pred_masks.reshape(-1, 1), 4.0)
    return model


def _spread(layer: nn.Module, outputs: Tensor, deviation: float) -> None:
    """Shift and scale a last layer, so that these outputs [n, channels] of it have mean 0 and about this deviation."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor) and isinstance(bias, Tensor)
    scale = deviation / outputs.std(dim=0).mean()
    bias.copy_(scale * (bias - outputs.mean(dim=0)))
    weight.mul_(scale)


def save(model: Any, folder: Path) -> None:
    """The folder as a hub has it: config, weights and processor."""
    model.save_pretrained(folder)
    processor = {
        "image_processor_type": "DetrImageProcessor",
        "size": {"height": SIDE, "width": SIDE},
        "do_pad": False,
        "image_mean": MEAN,
        "image_std": STD,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor), encoding="utf-8")
