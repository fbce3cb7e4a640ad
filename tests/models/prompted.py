"""Seeded SAM, SAM 2 and EdgeTAM folders, as transformers saves them."""

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

# What a model of videos has beside that of images.
MEMORY = {
    **{"memory_attention_hidden_size": 16, "memory_attention_layers": 1, "memory_encoder_hidden_size": 16},
    **{"memory_attention_feed_forward_hidden_size": 32, "memory_encoder_output_channels": 8},
    **{"mask_downsampler_embed_dim": 16, "memory_fuser_embed_dim": 16, "memory_fuser_intermediate_dim": 32},
    **{"memory_attention_rope_feat_sizes": [4, 4], "memory_fuser_num_layers": 1, "image_size": 64},
}


def save_prompted(kind: str, folder: Path, **decoder: Any) -> Any:
    """The model, saved in `folder` with its processor.

    `kind`: "sam", "sam2", "sam2-video", "edgetam", "edgetam-video", "sam3", "sam3-coarser",
    "sam3-video"; `decoder`: of the decoder's config.
    """
    transformers = reference("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(3)
    make = {"sam": _sam, "sam2": _sam2, "sam2-video": _sam2_of_videos, "edgetam": _edgetam}
    make |= {"edgetam-video": _edgetam_of_videos, "sam3": _sam3, "sam3-coarser": _sam3_with_a_coarser_map}
    make["sam3-video"] = _sam3_of_videos
    model = make[kind](transformers, {**DECODER, **decoder})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("running_var"):  # else the 20 % of noise above grow from layer to layer
                buffer.mul_(2).add_(torch.rand_like(buffer))
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
    parts = _sam2_parts(transformers)
    return transformers.Sam2VideoModel(transformers.Sam2VideoConfig(**parts, mask_decoder_config=decoder, **MEMORY))


def _edgetam_parts(transformers: Any) -> dict[str, Any]:
    """A RepViT of timm, as narrow and shallow as its class takes."""
    reference("timm")
    arguments = {
        "embed_dim": [8, 16, 24, 32],
        "depth": [1, 1, 2, 1],
        "features_only": True,
        "out_indices": [0, 1, 2, 3],
    }
    backbone = transformers.TimmWrapperConfig(architecture="repvit_m1", model_args={"in_chans": 3, **arguments})
    vision = transformers.EdgeTamVisionConfig(
        backbone_config=backbone,
        backbone_channel_list=[32, 24, 16, 8],
        backbone_feature_sizes=[[16, 16], [8, 8], [4, 4]],
        fpn_hidden_size=16,
    )
    return {"vision_config": vision, "prompt_encoder_config": {"hidden_size": 16, "image_size": 64, "patch_size": 16}}


def _edgetam(transformers: Any, decoder: dict[str, Any]) -> Any:
    parts = _edgetam_parts(transformers)
    return transformers.EdgeTamModel(transformers.EdgeTamConfig(**parts, mask_decoder_config=decoder))


def _edgetam_of_videos(transformers: Any, decoder: dict[str, Any]) -> Any:
    memory = {
        **{"memory_attention_hidden_size": 16, "memory_attention_num_layers": 1, "memory_encoder_hidden_size": 16},
        **{"memory_attention_mlp_hidden_size": 32, "memory_encoder_output_channels": 8, "image_size": 64},
        **{"mask_downsampler_embed_dim": 16, "memory_fuser_embed_dim": 16, "memory_fuser_intermediate_dim": 32},
        **{"memory_fuser_num_layers": 1, "perceiver_resampler_hidden_size": 8},
    }
    parts = _edgetam_parts(transformers)
    return transformers.EdgeTamVideoModel(
        transformers.EdgeTamVideoConfig(**parts, mask_decoder_config=decoder, **memory)
    )


def _sam3_parts(transformers: Any, scales: tuple[float, ...] = (4.0, 2.0, 1.0)) -> dict[str, Any]:
    backbone = transformers.Sam3ViTConfig(
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"image_size": 64, "patch_size": 16, "window_size": 2, "global_attn_indexes": [1], "pretrain_image_size": 32},
    )
    sizes = [[16, 16], [8, 8], [4, 4]]
    vision = transformers.Sam3VisionConfig(
        backbone_config=backbone, fpn_hidden_size=16, backbone_feature_sizes=sizes, scale_factors=list(scales)
    )
    return {"prompt_encoder_config": {"hidden_size": 16, "image_size": 64, "patch_size": 16}, "vision_config": vision}


def _sam3(transformers: Any, decoder: dict[str, Any], **more: Any) -> Any:
    """SAM 3's tracker."""
    parts = _sam3_parts(transformers, **more)
    return transformers.Sam3TrackerModel(transformers.Sam3TrackerConfig(**parts, mask_decoder_config=decoder))


def _sam3_with_a_coarser_map(transformers: Any, decoder: dict[str, Any]) -> Any:
    return _sam3(transformers, decoder, scales=(4.0, 2.0, 1.0, 0.5))


def _sam3_of_videos(transformers: Any, decoder: dict[str, Any]) -> Any:
    config = transformers.Sam3TrackerVideoConfig(**_sam3_parts(transformers), mask_decoder_config=decoder, **MEMORY)
    return transformers.Sam3TrackerVideoModel(config)


def processor_of(kind: str) -> Any:
    """transformers' own image processor of such a model."""
    transformers = reference("transformers")
    reference("torchvision")
    if kind != "sam":
        name = "Sam3ImageProcessor" if kind.startswith("sam3") else "Sam2ImageProcessor"
        return getattr(transformers, name)(size={"height": 64, "width": 64})
    side = {"height": 48, "width": 48}
    return transformers.SamImageProcessor(size={"longest_edge": 48}, pad_size=side)
