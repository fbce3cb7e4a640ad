"""ViTs with the keys of torchvision or of the original JAX code.

torchvision (`vit_b_16` and other sizes, torchvision.models.vision_transformer): files and older versions name the MLP's
linear layers `mlp.linear_1` and `mlp.linear_2`, newer modules `mlp.0` and `mlp.3`.

JAX (google-research/vision_transformer, augreg; and big_vision):

A Flax kernel is [inputs, outputs]; an attention kernel has an axis for the heads: query, key and value [width, heads,
e], out [heads, e, width]; a convolution kernel is [height, width, inputs, outputs]. Differences of the two code bases:

                         vision_transformer                      big_vision
    parts of a block     LayerNorm_0, _2, MlpBlock_3,            LayerNorm_0, _1, MlpBlock_0,
                         MultiHeadDotProductAttention_1          MultiHeadDotProductAttention_0
    blocks               Transformer/encoderblock_0 ...          also Transformer/encoderblock, stacked on a first axis
    positions            Transformer/posembed_input/...,         pos_embedding, added before the class token comes,
                         of the class token too                  so for patches only
    pooling              class token                             class token, mean, or attention (MAPHead_0: SigLIP)

Flax's LayerNorm has epsilon 1e-6 and its GELU is the tanh form.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.checkpoints.mismatch import listed
from vitdeploy.models.family import Hints, Recognised
from vitdeploy.models.keys import vit
from vitdeploy.models.keys.rules import renamed, rules

TORCHVISION, JAX = "torchvision's ViT", "JAX's ViT"
_TORCHVISION_RULES = rules(
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


def recognise_torchvision(state: Mapping[str, Tensor], hints: Hints) -> Recognised | None:
    """Return the model and its renamed tensors; None if the keys are not from torchvision's ViT.

    Raises:
        CheckpointError: a convolutional stem, missing or misshapen tensors, unknown heads or image size.
    """
    if "class_token" not in state or "encoder.pos_embedding" not in state:
        return None
    if any(key.startswith("conv_proj.conv_") for key in state):
        raise CheckpointError(
            "vitdeploy does not support a ViT with a convolutional stem",
            found="conv_proj.conv_*",
            expected="one convolution, conv_proj.weight",
            fix="export it from your own module: --model package.module:function",
        )
    tensors, _, unknown = renamed(_TORCHVISION_RULES, state)
    if unknown:
        raise CheckpointError(
            f"the state dict has the names of {TORCHVISION}, and unknown tensors",
            found=f"{len(unknown)} unknown: {listed(unknown)}",
        )
    notes: list[str] = []
    vit.require(tensors, TORCHVISION, stem=("cls_token", "norm.weight"))
    tensors = vit.as_rows(vit.merge_attention(tensors, notes))
    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    heads = vit.heads_for(width, hints, None, notes)
    image_size = vit.image_size_for(tensors["pos_embed"].shape[1] - 1, patch, hints, None, notes)
    # Constants in torchvision's code.
    conventions = {"layer_norm_eps": 1e-6, "activation": "gelu", "position_resampling": "align_corners"}
    config = vit.measured(tensors, heads, image_size, **conventions, preset="imagenet")
    return vit.recognised("torchvision", tensors, config, notes)


# --- JAX --------------------------------------------------------------------------------------------------------------


# Order matters: a text encoder is a sibling of `img/`, an optimizer state a sibling of `target/`.
PREFIXES = ("params/img/", "img/", "params/", "opt/target/", "target/", "")

_JAX_RULES = rules(
    """
    cls                                             cls_token
    (pos_embedding|Transformer/posembed_input/pos_embedding)    pos_embed
    embedding/$KERNEL                               patch_embed.proj.$W
    Transformer/encoder_norm/$SCALE                norm.$W
    pre_logits/$KERNEL                              pre_logits.fc.$W
    head/$KERNEL                                    head.$W
    MAPHead_0/probe                                 attn_pool.latent
    MAPHead_0/LayerNorm_0/$SCALE                   attn_pool.norm.$W
    MAPHead_0/MlpBlock_0/Dense_{0,1}/$KERNEL       attn_pool.mlp.fc{1,2}.$W
    MAPHead_0/MultiHeadDotProductAttention_0/$PARTS/$KERNEL    attn_pool.{q,k,v,proj}.$W
    $BLOCK/LayerNorm_{0,1,2}/$SCALE                blocks.*.norm{1,2,2}.$W
    $BLOCK/MlpBlock_(0|3)/Dense_{0,1}/$KERNEL     blocks.*.mlp.fc{1,2}.$W
    $BLOCK/MultiHeadDotProductAttention_(0|1)/$PARTS/$KERNEL  blocks.*.attn.{q,k,v,proj}.$W
    """,
    KERNEL="{kernel,bias}",
    SCALE="{scale,bias}",
    W="{weight,bias}",
    PARTS="{query,key,value,out}",
    BLOCK="Transformer/encoderblock_*",
)
_STACKED = "Transformer/encoderblock/"


def recognise_jax(state: Mapping[str, Tensor], hints: Hints) -> Recognised | None:
    """Return the model and its renamed tensors; None if the keys are not from the JAX code.

    `state` comes from `read_npz`. Heads are an axis of the kernels, so they need no hint.

    Raises:
        CheckpointError: a hybrid with a ResNet, computed instead of stored positions, tensors that are missing, unknown
            or misshapen, or an unknown image size.
    """
    prefix = next((prefix for prefix in PREFIXES if f"{prefix}embedding/kernel" in state), None)
    if prefix is None or not any(key.startswith(f"{prefix}Transformer/encoderblock") for key in state):
        return None
    own = {key.removeprefix(prefix): tensor for key, tensor in state.items() if key.startswith(prefix)}
    _check_variant(own)
    notes = [
        "using the tanh form of GELU, as in the JAX code; PyTorch ports of its weights use the exact form",
        *vit.left_out([key for key in state if not key.startswith(prefix)], "not part of the image encoder"),
    ]
    arrays = _unstacked(own)
    queries = [key for key in arrays if key.startswith("Transformer/") and key.endswith("/query/kernel")]
    heads = max((arrays[key].shape[1] for key in queries if arrays[key].ndim == 3), default=0)
    tensors, _, unknown = renamed(_JAX_RULES, {key: _in_torch_layout(array, key) for key, array in arrays.items()})
    if unknown:
        raise CheckpointError(
            f"the arrays have the names of {JAX}, and unknown ones",
            found=f"{len(unknown)} unknown: {listed(unknown)}",
        )
    vit.require(tensors, JAX, stem=("norm.weight",))
    tensors = _pooled(vit.as_rows(vit.merge_attention(tensors, notes)))
    rows = tensors["pos_embed"].shape[1]
    # Old big_vision files have the class token's position in the table, like vision_transformer.
    combined = "cls_token" in tensors and ("pos_embedding" not in own or _is_square(rows - 1))
    patch = tensors["patch_embed.proj.weight"].shape[2]
    image_size = vit.image_size_for(rows - combined, patch, hints, None, notes)
    pooling = "attention" if "attn_pool.latent" in tensors else "class" if "cls_token" in tensors else "average"
    config = vit.measured(
        tensors,
        heads,
        image_size,
        layer_norm_eps=1e-6,
        activation="gelu_tanh",
        pooling=pooling,
        preset="siglip" if pooling == "attention" else "augreg",
    )
    return vit.recognised("jax", tensors, config, notes)


def _is_square(count: int) -> bool:
    return count > 0 and math.isqrt(count) ** 2 == count


def _check_variant(own: Mapping[str, Tensor]) -> None:
    if any(key.startswith(("conv_root/", "block1/")) for key in own):
        raise CheckpointError(
            "vitdeploy does not support hybrids of ResNet and ViT",
            found="conv_root",
            expected="a ViT with patches cut from the image",
            fix="use a module of your own: --model package.module:function",
        )
    if not any(key.endswith("pos_embedding") for key in own):
        raise CheckpointError(
            "the file has no position table: its code computes positions in a form that the arrays do not show",
            found="no pos_embedding",
            expected="learned positions",
            fix="store the table as pos_embedding, [1, patches, width]",
        )


def _unstacked(own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Split blocks that a scan stacks on the first axis."""
    flat = {key: tensor for key, tensor in own.items() if not key.startswith(_STACKED)}
    for key in [key for key in own if key.startswith(_STACKED)]:
        for block, tensor in enumerate(own[key] if own[key].ndim else ()):
            flat[f"Transformer/encoderblock_{block}/{key.removeprefix(_STACKED)}"] = tensor
    return flat


def _in_torch_layout(array: Tensor, key: str) -> Tensor:
    """Return kernels with outputs first and heads merged; an array with unexpected axes is left to `require`."""
    layer, _, kind = key.rpartition("/")
    if kind != "kernel":
        return array.reshape(-1) if kind in ("scale", "bias") else array
    if array.ndim == 4:
        return array.permute(3, 2, 0, 1).contiguous()
    if array.ndim == 3:
        array = array.flatten(0, 1) if layer.endswith("/out") else array.flatten(1)
    return array.T.contiguous() if array.ndim == 2 else array


def _pooled(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge the attention pooling's key and value into one linear layer."""
    merged = dict(state)
    for kind in ("weight", "bias"):
        key, value = merged.pop(f"attn_pool.k.{kind}", None), merged.pop(f"attn_pool.v.{kind}", None)
        if key is not None and value is not None and key.shape == value.shape:
            merged[f"attn_pool.kv.{kind}"] = torch.cat([key, value])
    return merged
