"""ViTs with torchvision's keys: `vit_b_16` and its sizes (torchvision.models.vision_transformer).

Files and older versions name the MLP's linears `mlp.linear_1` and `mlp.linear_2`, newer modules `mlp.0` and `mlp.3`.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.checkpoints.mismatch import listed
from vitdeploy.models.family import Hints, Recognised
from vitdeploy.models.keys.rules import renamed, rules
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
_RULES = rules(
    """
    class_token                                     cls_token
    encoder.pos_embedding                           pos_embed
    conv_proj.$W                                    patch_embed.proj.$W
    encoder.ln.$W                                   norm.$W
    heads.pre_logits.$W                             pre_logits.fc.$W
    heads.head.$W                                   head.$W
    $BLOCK.ln_{1,2}.$W                              blocks.*.norm{1,2}.$W
    $BLOCK.self_attention.in_proj_$W                blocks.*.attn.<q,k,v>.$W
    $BLOCK.self_attention.out_proj.$W               blocks.*.attn.proj.$W
    $BLOCK.mlp.{0,3,linear_1,linear_2}.$W           blocks.*.mlp.{fc1,fc2,fc1,fc2}.$W
    """,
    W="{weight,bias}",
    BLOCK="encoder.layers.encoder_layer_*",
)


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
    tensors, _, unknown = renamed(_RULES, state)
    if unknown:
        raise CheckpointError(
            f"the state dict has the names of {STYLE}, and tensors that this model does not have",
            found=f"{len(unknown)} unknown: {listed(unknown)}",
        )
    notes: list[str] = []
    require(tensors, STYLE, stem=("cls_token", "norm.weight"))
    tensors = as_rows(merge_attention(tensors, notes))
    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    heads = heads_for(width, hints, None, notes)
    image_size = image_size_for(tensors["pos_embed"].shape[1] - 1, patch, hints, None, notes)
    # torchvision has these as constants of its code.
    conventions = {"layer_norm_eps": 1e-6, "activation": "gelu", "position_resampling": "align_corners"}
    config = measured(tensors, heads, image_size, **conventions, preset="imagenet")
    return recognised("torchvision", tensors, config, notes)
