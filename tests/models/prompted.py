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
    """The model, saved in `folder` with its processor. `kind`: "sam", "sam2"; `decoder`: of the decoder's config."""
    transformers = reference("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(3)
    model = (_sam if kind == "sam" else _sam2)(transformers, {**DECODER, **decoder})
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
    vision = transformers.Sam2VisionConfig(
        backbone_config=transformers.Sam2HieraDetConfig(**HIERA),
        backbone_channel_list=[64, 32, 16, 8],
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
        fpn_hidden_size=16,
    )
    prompt = {"hidden_size": 16, "image_size": 64, "patch_size": 16}
    return transformers.Sam2Model(
        transformers.Sam2Config(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    )


def processor_of(kind: str) -> Any:
    """transformers' own image processor of such a model."""
    transformers = reference("transformers")
    reference("torchvision")
    if kind == "sam2":
        return transformers.Sam2ImageProcessor(size={"height": 64, "width": 64})
    side = {"height": 48, "width": 48}
    return transformers.SamImageProcessor(size={"longest_edge": 48}, pad_size=side)
