"""ViTs with torchvision's keys: `vit_b_16` and its sizes (torchvision.models.vision_transformer).

Files and older versions name the MLP's linears `mlp.linear_1` and `mlp.linear_2`, newer modules `mlp.0` and `mlp.3`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.checkpoints.mismatch import listed
from vitdeploy.models.family import Hints, Recognised
from vitdeploy.models.keys.vit import (
    as_rows,
    heads_for,
    image_size_for,
    measured,
    merge_attention,
    recognised,
    require,
)

STYLE = "torchvision's ViT"
_NAMES = {
    "class_token": "cls_token",
    "encoder.pos_embedding": "pos_embed",
    **{
        f"{theirs}.{kind}": f"{ours}.{kind}"
        for theirs, ours in {
            "conv_proj": "patch_embed.proj",
            "encoder.ln": "norm",
            "heads.pre_logits": "pre_logits.fc",
            "heads.head": "head",
        }.items()
        for kind in ("weight", "bias")
    },
}
_LAYER = re.compile(r"encoder\.layers\.encoder_layer_(\d+)\.(.+?)(?:\.|_(?=weight$|bias$))(weight|bias)")
_PARTS = {
    "ln_1": "norm1",
    "self_attention.in_proj": "attn.in_proj",
    "self_attention.out_proj": "attn.proj",
    "ln_2": "norm2",
    "mlp.0": "mlp.fc1",
    "mlp.linear_1": "mlp.fc1",
    "mlp.3": "mlp.fc2",
    "mlp.linear_2": "mlp.fc2",
}


def recognise(state: Mapping[str, Tensor], hints: Hints) -> Recognised | None:
    """The model and its renamed tensors; None if the keys are not those of torchvision's ViT.

    Raises:
        CheckpointError: a convolutional stem, tensors missing or of odd shapes, heads or image size unknown.
    """
    if "class_token" not in state or "encoder.pos_embedding" not in state:
        return None
    if any(key.startswith("conv_proj.conv_") for key in state):
        raise CheckpointError(
            "the model has a convolutional stem, which vitdeploy's ViT does not",
            found="conv_proj.conv_*",
            wanted="one convolution, conv_proj.weight",
            fix="export it from your own module: --model package.module:function",
        )
    renamed, unknown = _renamed(state)
    if unknown:
        raise CheckpointError(
            f"the state dict has the names of {STYLE}, and tensors that this model does not have",
            found=f"{len(unknown)} unknown: {listed(unknown)}",
        )
    notes: list[str] = []
    require(renamed, STYLE, stem=("cls_token", "norm.weight"))
    tensors = as_rows(merge_attention(renamed, notes))
    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    heads = heads_for(width, hints, None, notes)
    image_size = image_size_for(tensors["pos_embed"].shape[1] - 1, patch, hints, None, notes)
    # torchvision has these as constants of its code.
    conventions = {"layer_norm_eps": 1e-6, "activation": "gelu", "position_resampling": "align_corners"}
    config = measured(tensors, heads, image_size, **conventions, preset="imagenet")
    return recognised("torchvision", tensors, config, notes)


def _renamed(state: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """The tensors under timm's names, query, key and value apart; and the keys that have none."""
    renamed: dict[str, Tensor] = {}
    unknown = []
    for key, tensor in state.items():
        layer = _LAYER.fullmatch(key)
        part = _PARTS.get(layer[2]) if layer else None
        if layer and part == "attn.in_proj":
            for name, rows in zip("qkv", tensor.chunk(3), strict=False):
                renamed[f"blocks.{layer[1]}.attn.{name}.{layer[3]}"] = rows
        elif layer and part:
            renamed[f"blocks.{layer[1]}.{part}.{layer[3]}"] = tensor
        elif key in _NAMES:
            renamed[_NAMES[key]] = tensor
        else:
            unknown.append(key)
    return renamed, unknown
