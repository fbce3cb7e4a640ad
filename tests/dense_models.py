"""Seeded small models of transformers with an answer for every pixel, and their image processors' files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from tests.references import reference

IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
SQUARE = {"size": {"height": 64, "width": 64}}
SWIN = {
    "image_size": 64,
    "embed_dim": 16,
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 2, 4],
    "window_size": 4,
    "out_features": [f"stage{i}" for i in range(1, 5)],
}
HEADS = {"hidden_size": 32, "num_attention_heads": 4}


def _segformer(library: Any) -> tuple[Any, dict[str, Any]]:
    config = library.SegformerConfig(
        depths=[1, 1, 1, 1],
        hidden_sizes=[16, 16, 32, 32],
        num_attention_heads=[1, 2, 2, 4],
        decoder_hidden_size=32,
        num_labels=7,
    )
    processor = {"image_processor_type": "SegformerImageProcessor", "do_reduce_labels": True, **SQUARE, **IMAGENET}
    return library.SegformerForSemanticSegmentation(config), processor


def _mask2former(library: Any) -> tuple[Any, dict[str, Any]]:
    config = library.Mask2FormerConfig(
        backbone_config=library.SwinConfig(**SWIN),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=32,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=4,
        dim_feedforward=32,
        num_queries=10,
        num_labels=5,
    )
    processor = {"image_processor_type": "Mask2FormerImageProcessor", "ignore_index": 254, **SQUARE, **IMAGENET}
    return library.Mask2FormerForUniversalSegmentation(config), processor


def _maskformer(library: Any) -> tuple[Any, dict[str, Any]]:
    decoder = library.DetrConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        num_queries=10,
    )
    config = library.MaskFormerConfig(
        backbone_config=library.SwinConfig(**SWIN),
        decoder_config=decoder,
        fpn_feature_size=32,
        mask_feature_size=32,
        num_labels=5,
    )
    processor = {"image_processor_type": "MaskFormerImageProcessor", "size": {"shortest_edge": 70}, **IMAGENET}
    return library.MaskFormerForInstanceSegmentation(config), processor


def _eomt(library: Any) -> tuple[Any, dict[str, Any]]:
    config = library.EomtConfig(
        **HEADS,
        num_hidden_layers=3,
        intermediate_size=64,
        image_size=64,
        patch_size=8,
        num_queries=10,
        num_blocks=1,
        num_labels=5,
    )
    size = {"shortest_edge": 64, "longest_edge": 64}
    processor = {"image_processor_type": "EomtImageProcessor", "size": size, "do_pad": True, **IMAGENET}
    return library.EomtForUniversalSegmentation(config), processor


def _depth_anything(library: Any) -> tuple[Any, dict[str, Any]]:
    backbone = library.Dinov2Config(
        **HEADS,
        num_hidden_layers=4,
        mlp_ratio=2,
        image_size=70,
        patch_size=14,
        out_features=[f"stage{i}" for i in range(1, 5)],
        reshape_hidden_states=False,
    )
    config = library.DepthAnythingConfig(
        backbone_config=backbone,
        reassemble_hidden_size=32,
        patch_size=14,
        neck_hidden_sizes=[16, 16, 32, 32],
        fusion_hidden_size=16,
        head_hidden_size=16,
        depth_estimation_type="metric",
        max_depth=20,
    )
    size = {"size": {"height": 70, "width": 70}, "resample": 3}
    aspect = {"keep_aspect_ratio": True, "ensure_multiple_of": 14}
    processor = {"image_processor_type": "DPTImageProcessor", **size, **aspect, **IMAGENET}
    return library.DepthAnythingForDepthEstimation(config), processor


def _dpt(library: Any) -> tuple[Any, dict[str, Any]]:
    config = library.DPTConfig(
        **HEADS,
        num_hidden_layers=4,
        intermediate_size=64,
        image_size=64,
        patch_size=16,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[16, 16, 32, 32],
        fusion_hidden_size=16,
    )
    processor = {"image_processor_type": "DPTFeatureExtractor", "resample": 2, **SQUARE}
    return library.DPTForDepthEstimation(config), processor


MAKERS = {
    "SegFormer": _segformer,
    "Mask2Former": _mask2former,
    "MaskFormer": _maskformer,
    "EoMT": _eomt,
    "Depth Anything": _depth_anything,
    "DPT": _dpt,
}


def save(kind: str, folder: Path) -> Path:
    """The model folder of one kind, with weights that are no neutral values."""
    torch.manual_seed(0)
    model, processor = MAKERS[kind](reference("transformers"))
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, 0, 0.08)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder
