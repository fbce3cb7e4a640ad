"""Small DETRs of transformers with no weight or statistic at a neutral value: what ours are compared with."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from tests.references import reference

WIDTHS, DEPTHS = (16, 32, 48, 64), (1, 2, 1, 1)
# Per width d and h heads the mask head needs (d + h), d / 2 ... d / 16 channels in up to 8 groups.
SHAPE = {"d_model": 64, "encoder_layers": 1, "decoder_layers": 2, "num_queries": 5, "num_labels": 7}
SHAPE |= {f"{part}_attention_heads": 8 for part in ("encoder", "decoder")}
SHAPE |= {f"{part}_ffn_dim": 48 for part in ("encoder", "decoder")}


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Every parameter and statistic away from 0 and 1, so that each has to be in its place."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            elif tensor.is_floating_point() and tensor.ndim <= 1:
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=generator))
            elif tensor.is_floating_point():
                noise = torch.randn(tensor.shape, generator=generator)
                tensor.copy_(1.5 * noise / tensor[0].numel() ** 0.5)


@cache
def small(panoptic: bool) -> nn.Module:
    """A DetrForSegmentation or DetrForObjectDetection in float32 with a tiny bottleneck ResNet. Do not change it."""
    transformers = reference("transformers")
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=list(WIDTHS), depths=list(DEPTHS), layer_type="bottleneck",
        out_features=["stage1", "stage2", "stage3", "stage4"],
    )  # fmt: skip
    config = transformers.DetrConfig(use_timm_backbone=False, backbone_config=backbone, **SHAPE)
    kind = transformers.DetrForSegmentation if panoptic else transformers.DetrForObjectDetection
    model = kind(config).eval()
    randomise(model)
    return model


def outputs_of(model: nn.Module, image: Tensor) -> list[Tensor]:
    with torch.no_grad():
        found: Any = model(image)
    return [found.logits, found.pred_boxes, *([found.pred_masks] if "pred_masks" in found else [])]


def saved_state(model: Any) -> dict[str, Tensor]:
    """The state dict under the names that `save_pretrained` writes, which are those of the files on the hub."""
    from safetensors.torch import load_file

    with TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")


_TO_ORIGINAL = (
    ("model.encoder.layers", "transformer.encoder.layers"),
    ("model.decoder.layers", "transformer.decoder.layers"),
    ("model.decoder.layernorm", "transformer.decoder.norm"),
    ("model.backbone.conv_encoder.model.embedder.embedder.convolution", "backbone.0.body.conv1"),
    ("model.backbone.conv_encoder.model.embedder.embedder.normalization", "backbone.0.body.bn1"),
    ("model.query_position_embeddings", "query_embed"),
    ("model.input_projection", "input_proj"),
    ("class_labels_classifier", "class_embed"),
    ("bbox_predictor", "bbox_embed"),
    ("encoder_attn_layer_norm", "norm2"),
    ("self_attn_layer_norm", "norm1"),
    ("encoder_attn", "multihead_attn"),
    ("fc1", "linear1"),
    ("fc2", "linear2"),
)


def original_state(saved: dict[str, Tensor]) -> dict[str, Tensor]:
    """The released code's names (models/transformer.py, backbone.py, segmentation.py) of a state as `saved_state`."""
    named: dict[str, Tensor] = {}
    for key, tensor in saved.items():
        for theirs, original in _TO_ORIGINAL:
            key = key.replace(theirs, original)
        key = key.replace("final_layer_norm", "norm2" if "encoder" in key else "norm3")
        block = re.search(r"model\.backbone\.conv_encoder\.model\.encoder\.stages\.(\d)\.layers\.(\d)\.(.*)", key)
        if block is not None:
            inner = (
                block[3]
                .replace("shortcut.convolution", "downsample.0")
                .replace("shortcut.normalization", "downsample.1")
            )
            for i in range(3):
                inner = inner.replace(f"layer.{i}.convolution", f"conv{i + 1}")
                inner = inner.replace(f"layer.{i}.normalization", f"bn{i + 1}")
            key = f"{key[: block.start()]}backbone.0.body.layer{int(block[1]) + 1}.{block[2]}.{inner}"
        named[key] = tensor
    for key in [key for key in named if ".q_proj." in key]:
        kind = key.rpartition(".")[2]
        parts = [named.pop(key.replace("q_proj", f"{name}_proj")) for name in "qkv"]
        named[key.replace(f"q_proj.{kind}", f"in_proj_{kind}")] = torch.cat(parts)
    return named
