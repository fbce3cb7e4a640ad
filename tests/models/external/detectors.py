"""Small models of every detector class of transformers that is not ours, with seeded weights.

The library's own first weights are so small that an image hardly changes the answer, and that the scores which choose
queries are equal up to rounding: these are drawn so wide that each layer keeps the spread of its input.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests.references import reference

CLASSES = 7
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
PYRAMID = RESNET | {"model_type": "rt_detr_resnet", "layer_type": "basic", "out_indices": [3, 4]}
HGNET = {
    "model_type": "hgnet_v2",
    "stem_channels": [3, 8, 8],
    "stage_in_channels": [8, 8, 16, 24],
    "stage_mid_channels": [8, 8, 8, 8],
    "stage_out_channels": [8, 16, 24, 32],
    "stage_num_blocks": [1, 1, 1, 1],
    "stage_numb_of_layers": [1, 1, 1, 1],
    "hidden_sizes": [8, 16, 24, 32],
    "out_features": ["stage3", "stage4"],
    "use_learnable_affine_block": True,
}
VIT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "out_indices": [1, 2]}

HEADS = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 40, "decoder_ffn_dim": 40}
DETR = HEADS | {"d_model": 32, "num_queries": 12, "encoder_layers": 1, "decoder_layers": 1, "num_labels": CLASSES}
LAST = DETR | {"backbone_config": RESNET | {"model_type": "resnet", "out_features": ["stage4"]}}
HYBRID = DETR | {
    "decoder_layers": 2,
    "backbone_config": PYRAMID,
    "encoder_hidden_dim": 32,
    "encoder_in_channels": [24, 32],
    "encode_proj_layers": [1],
    "feat_strides": [16, 32],
    "decoder_in_channels": [32, 32],
    "num_feature_levels": 2,
    "hidden_expansion": 0.5,
}
FINE = HYBRID | {"backbone_config": HGNET, "depth_mult": 0.34, "lqe_hidden_dim": 8}
LIGHT = {
    "d_model": 32,
    "num_queries": 12,
    "decoder_layers": 1,
    "decoder_ffn_dim": 40,
    "decoder_self_attention_heads": 4,
    "decoder_cross_attention_heads": 4,
    "group_detr": 3,
    "c2f_num_blocks": 1,
    "num_labels": CLASSES,
}


class Small(NamedTuple):
    """A small model: transformers' class without `ForObjectDetection`, its config, its (height, width), and how many
    layers with deformable attention to how many levels it has."""

    name: str
    config: dict[str, Any]
    image_size: tuple[int, int] = (64, 96)
    samplings: tuple[int, int] = (0, 0)


DETECTORS = {
    "RT-DETR": Small("RTDetr", HYBRID, samplings=(2, 2)),
    "RT-DETRv2": Small("RTDetrV2", HYBRID | {"decoder_n_levels": 2}, samplings=(2, 2)),
    "D-FINE": Small("DFine", FINE, samplings=(2, 2)),
    "DEIMv2": Small("Deimv2", FINE, samplings=(2, 2)),
    "RF-DETR": Small(
        "RfDetr",
        LIGHT
        | {
            "backbone_config": VIT
            | {"model_type": "rf_detr_dinov2", "image_size": 64, "patch_size": 8, "num_windows": 2}
        },
        (64, 64),
        (1, 1),
    ),
    "LW-DETR": Small(
        "LwDetr",
        LIGHT
        | {
            "backbone_config": VIT
            | {"model_type": "lw_detr_vit", "image_size": 128, "patch_size": 16, "window_block_indices": [0]},
            "projector_scale_factors": [1.0],
        },
        (128, 128),
        (1, 1),
    ),
    "Deformable DETR": Small(
        "DeformableDetr",
        DETR
        | {
            "backbone_config": RESNET | {"model_type": "resnet", "out_features": ["stage3", "stage4"]},
            "num_feature_levels": 3,
            "two_stage": True,
            "with_box_refine": True,
            "two_stage_num_proposals": 12,
        },
        samplings=(2, 3),
    ),
    "Conditional DETR": Small("ConditionalDetr", LAST),
    "DAB-DETR": Small("DabDetr", {key: LAST[key] for key in LAST if key != "d_model"} | {"hidden_size": 32}),
    "Table Transformer": Small("TableTransformer", LAST),
    "YOLOS": Small(
        "Yolos",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "intermediate_size": 40,
            "image_size": [64, 96],
            "num_detection_tokens": 12,
            "num_labels": CLASSES,
        },
    ),
}


def detector(family: str, seed: int = 0, **changed: Any) -> Any:
    """transformers' own module of a family, in evaluation mode."""
    transformers = reference("transformers")
    name, config, *_ = DETECTORS[family]
    model = getattr(transformers, f"{name}ForObjectDetection")(
        getattr(transformers, f"{name}Config")(**(config | changed))
    )
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if not tensor.is_floating_point() or key.endswith(("anchors", "valid_mask", "n_points_scale")):
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if key.endswith("running_var"):
                tensor.copy_(1 + 0.3 * noise.abs())
            elif key.endswith("weight") and tensor.ndim == 1:
                tensor.copy_(1 + 0.1 * noise)
            elif tensor.ndim > 1:
                tensor.copy_(noise * (2 / tensor[0].numel()) ** 0.5)
            else:
                tensor.add_(0.1 * noise)
    return model.eval()


def saved(family: str, folder: Path, processor: str | None = None, seed: int = 0, **changed: Any) -> Path:
    """A folder as `save_pretrained` writes it, with the defaults of a processor's class at the model's size."""
    detector(family, seed, **changed).save_pretrained(folder)
    if processor is not None:
        height, width = DETECTORS[family].image_size
        settings = {"do_resize": True, "size": {"height": height, "width": width}, "image_processor_type": processor}
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder
