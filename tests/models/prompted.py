"""Seeded SAM and SAM 2 folders, as transformers saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.references import reference

DECODER = {"hidden_size": 16, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 16}
# Its window does not divide the 6x6 patches, so that some are padded.
SAM_VISION = {
    **{"image_size": 48, "patch_size": 8, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"window_size": 4, "global_attn_indexes": [1], "output_channels": 16, "num_pos_feats": 8},
}
HIERA = {
    **{"image_size": [64, 64], "hidden_size": 8, "num_attention_heads": 1, "blocks_per_stage": [1, 1, 2, 1]},
    **{"embed_dim_per_stage": [8, 16, 32, 64], "num_attention_heads_per_stage": [1, 2, 2, 4]},
    **{"window_size_per_stage": [4, 4, 2, 2], "window_positional_embedding_background_size": [4, 4]},
    "global_attention_blocks": [3],
}


def save_prompted(kind: str, folder: Path, **decoder: Any) -> Any:
    """The model, saved in `folder` with its processor.

    `kind`: "sam", "sam2", "sam2-video"; `decoder`: of the decoder's config.
    """
    transformers = reference("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(3)
    make = {"sam": _sam, "sam2": _sam2, "sam2-video": _sam2_of_videos}[kind]
    model = make(transformers, {**DECODER, **decoder})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.eval().save_pretrained(folder)
    processor_of(kind).save_pretrained(folder)
    return model


def _sam(transformers: Any, decoder: dict[str, Any]) -> Any:
    prompt = {"hidden_size": 16, "image_size": 48, "patch_size": 8}
    return transformers.SamModel(
        transformers.SamConfig(vision_config=SAM_VISION, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    )


def _sam2(transformers: Any, decoder: dict[str, Any]) -> Any:
    return transformers.Sam2Model(transformers.Sam2Config(**_sam2_parts(transformers), mask_decoder_config=decoder))


def _sam2_parts(transformers: Any) -> dict[str, Any]:
    vision = transformers.Sam2VisionConfig(
        backbone_config=transformers.Sam2HieraDetConfig(**HIERA),
        backbone_channel_list=[64, 32, 16, 8],
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
        fpn_hidden_size=16,
    )
    return {"vision_config": vision, "prompt_encoder_config": {"hidden_size": 16, "image_size": 64, "patch_size": 16}}


def _sam2_of_videos(transformers: Any, decoder: dict[str, Any]) -> Any:
    """The class of the published folders: with a memory of earlier images."""
    memory = {
        **{"memory_attention_hidden_size": 16, "memory_attention_layers": 1, "memory_encoder_hidden_size": 16},
        **{"memory_attention_feed_forward_hidden_size": 32, "memory_encoder_output_channels": 8},
        **{"mask_downsampler_embed_dim": 16, "memory_fuser_embed_dim": 16, "memory_fuser_intermediate_dim": 32},
        **{"memory_attention_rope_feat_sizes": [4, 4], "memory_fuser_num_layers": 1, "image_size": 64},
    }
    parts = _sam2_parts(transformers)
    return transformers.Sam2VideoModel(transformers.Sam2VideoConfig(**parts, mask_decoder_config=decoder, **memory))


def processor_of(kind: str) -> Any:
    """transformers' own image processor of such a model."""
    transformers = reference("transformers")
    reference("torchvision")
    if kind.startswith("sam2"):
        return transformers.Sam2ImageProcessor(size={"height": 64, "width": 64})
    side = {"height": 48, "width": 48}
    return transformers.SamImageProcessor(size={"longest_edge": 48}, pad_size=side)
