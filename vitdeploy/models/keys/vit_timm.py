"""ViTs with timm's keys, which are the model's own, and released files with similar keys.

DeiT, DeiT-III and MAE released their checkpoints under these names, MAE's with a decoder; DINOv2's original names are
translated. Widths, depth, tokens, norms and heads are read from names and shapes. What these cannot show (heads,
activation, epsilon) comes from timm's `config.json` ("architecture", "model_args", "global_pool"), if available.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models.architectures.layers import ACTIVATIONS, sincos_2d, sinusoidal
from vitdeploy.models.architectures.vit import DeiTConfig, FinalNorm, Pooling, Positions, ViTConfig
from vitdeploy.models.family import Hints, Recognised
from vitdeploy.models.keys import vit
from vitdeploy.models.model_folder.folder import stated_size

# A published width with two numbers of heads: DINOv2's giant has 24, and SwiGLU.
GIANTOPT_WIDTH, GIANTOPT_HEADS = vit.SIZES["giantopt"][0], vit.SIZES["giantopt"][2]
# Keys, with their number of axes, that identify a ViT of this style.
SIGNS = {"patch_embed.proj.weight": 4, "blocks.0.norm1.weight": 1, "blocks.0.attn.qkv.weight": 2}
# A block with any other tensor is unsupported (relative positions, gates, parallel branches ...).
BLOCK_TENSOR = re.compile(
    r"blocks\.\d+\.((norm[12]|attn\.(qkv|q_norm|k_norm|proj)|mlp\.(fc1|fc1_g|fc1_x|fc2))\.(weight|bias)|ls[12]\.gamma)"
)
# Arguments of timm's class for variants that `ViTConfig` does not support.
FOREIGN_ARGUMENTS = {"block_fn", "attn_layer", "norm_layer", "embed_layer", "scale_attn_norm", "scale_mlp_norm"}
# DINOv2's training stores blocks in chunks: the second number is the block's index in the model.
CHUNKED = re.compile(r"blocks\.\d+\.(\d+)\.")
TRAINING_ONLY = ("mask_token", "decoder_")
POOLINGS: Mapping[str, Pooling] = {"token": "class", "avg": "average", "map": "attention"}
# A table stored in half precision differs from its formula by at most 2^-9.
FORMULA_TOLERANCE = 2e-3


def recognise(state: Mapping[str, Tensor], hints: Hints) -> Recognised | None:
    """Recognise a ViT, or a DeiT with distillation token, by timm's or DINOv2's keys; None for other keys.

    Raises:
        CheckpointError: heads, image size or positions are unknown, or shapes contradict each other.
    """
    original = _is_dinov2(state)
    own = _from_dinov2(state) if original else dict(state)
    if any(key not in own or own[key].ndim != axes for key, axes in SIGNS.items()):
        return None
    if any(key.startswith("blocks.") and not BLOCK_TENSOR.fullmatch(key) for key in own):
        return None
    named = _named(hints.config)
    if named is None:
        return None
    unused = [key for key in own if key.startswith(TRAINING_ONLY)]
    notes = vit.left_out(unused, "used in training only")
    for key in unused:
        del own[key]
    try:
        config = _config(own, hints, named, notes)
    except ValueError as error:
        raise CheckpointError("the state dict's shapes contradict each other", found=str(error)) from None
    if config.head == "projection":
        own.pop("head.bias", None)
    if original and not config.registers:
        config = replace(config, position_resampling="offset")
    elif "decoder_pos_embed" in state:
        config = replace(config, position_resampling="plain")
    return vit.recognised("original" if original else "timm", own, config, notes)


@dataclass(frozen=True)
class _Named:
    """The built-in model that `config.json` names, and the arguments that override it."""

    model: ViTConfig | None
    arguments: Mapping[str, Any]
    pooling: str | None
    image_size: tuple[int, int] | None

    def argument(self, name: str, default: Any) -> Any:
        return self.arguments.get(name, default)


def _named(config: Mapping[str, Any]) -> _Named | None:
    """Return None if timm's config names an unknown model or unsupported arguments."""
    name, arguments = config.get("architecture"), config.get("model_args") or {}
    try:
        model = (vit.parse_vit(name) or vit.parse_deit(name)) if isinstance(name, str) else None
    except UnknownModelError:
        return None
    pooling = arguments.get("global_pool", config.get("global_pool"))
    if (isinstance(name, str) and model is None) or FOREIGN_ARGUMENTS & set(arguments):
        return None
    if pooling is not None and pooling not in (*POOLINGS, ""):
        return None
    size = stated_size(config) or (model.image_size if model else None)
    return _Named(model, arguments, pooling or None, size)


def _config(state: Mapping[str, Tensor], hints: Hints, named: _Named, notes: list[str]) -> ViTConfig:
    width, _, patch, across = _shape(state, "patch_embed.proj.weight", 4)
    if patch != across:
        raise CheckpointError("the patches are not square", found=f"{patch}x{across}", expected="square patches")
    known_heads = named.argument("num_heads", named.model and named.model.heads)
    qk_norm = "blocks.0.attn.q_norm.weight" in state
    if qk_norm:
        known_heads = _heads_of_norms(width, _shape(state, "blocks.0.attn.q_norm.weight", 1)[0], hints)
    swiglu = "blocks.0.mlp.fc1_g.weight" in state
    required = {f"blocks.0.mlp.{'fc1_g' if swiglu else 'fc1'}.weight": 2, "blocks.0.mlp.fc2.weight": 2}
    optional = {"reg_token": 3, "pre_logits.fc.weight": 2, "head.weight": 2}
    for key, axes in (required | {key: axes for key, axes in optional.items() if key in state}).items():
        _shape(state, key, axes)
    fields = vit.shown_fields(state)
    blocks = {key.split(".")[1] for key in state if key.startswith("blocks.")}
    if len(blocks) != fields["depth"]:
        raise CheckpointError(
            "blocks are missing", found=f"{len(blocks)} blocks, the last has number {fields['depth'] - 1}"
        )
    if not (known_heads or hints.heads) and fields["mlp"] == "mlp" and width == GIANTOPT_WIDTH:
        known_heads = GIANTOPT_HEADS
        notes.append(f"assuming {known_heads} heads, as in SigLIP 2's model of width {width} (override: --heads)")
    final_norm, pooling = _ending(state, named, width, notes)
    heads = vit.heads_for(width, hints, known_heads, notes)
    made = {"heads": heads, "qk_norm": qk_norm, "pooling": pooling, "final_norm": final_norm, **fields}
    plain = (DeiTConfig if "dist_token" in state else ViTConfig)(image_size=(patch, patch), **made)
    config = _with_positions(_with_conventions(plain, state, named, notes), state, hints, named, notes)
    kind = "SwiGLU" if config.mlp != "mlp" else config.activation
    notes.append(
        f"{config.depth} blocks of width {width}, {config.heads} heads, {kind}; patches of {patch}, "
        f"image {config.image_size[0]}x{config.image_size[1]}, {config.num_classes or 'no'} classes"
    )
    return config


def _heads_of_norms(width: int, norm_width: int, hints: Hints) -> int:
    """Return the heads from the query norm, which has as many weights as a head has channels."""
    heads = width // norm_width
    if width % norm_width or hints.heads not in (None, heads):
        raise CheckpointError(
            "the norms of query and key contradict the heads",
            found=f"norms of {norm_width}, width {width}" + (f", --heads {hints.heads}" if hints.heads else ""),
            expected="heads = width / norm width",
        )
    return heads


def _shape(state: Mapping[str, Tensor], key: str, axes: int) -> tuple[int, ...]:
    tensor = state.get(key)
    if tensor is None or tensor.ndim != axes or 0 in tensor.shape:
        raise CheckpointError(
            "the state dict has timm's names, but not its shapes",
            found=f"no {key}" if tensor is None else f"{key} {list(tensor.shape)}",
            expected=f"{key} with {axes} axes, none of size 0",
        )
    return tuple(tensor.shape)


def _ending(state: Mapping[str, Tensor], named: _Named, width: int, notes: list[str]) -> tuple[FinalNorm, Pooling]:
    """Return the position of the final norm, and the pooling of the tokens."""
    if "norm.weight" in state:
        final_norm: FinalNorm = "before_pooling"
    elif "fc_norm.weight" in state:
        final_norm = "after_pooling"
    elif named.argument("final_norm", True) is False:
        final_norm = "none"
    else:
        raise CheckpointError(
            "the final norm is missing, so pre-norm and post-norm blocks cannot be distinguished",
            found="neither norm.weight nor fc_norm.weight",
            expected="one of them, or a config.json whose model_args have final_norm: false",
            fix="--model package.module:function, a function that builds the model",
        )
    if "attn_pool.latent" in state:
        return final_norm, "attention"
    if "head.weight" in state and _shape(state, "head.weight", 2)[1] == 2 * width:
        return final_norm, "class_average"
    if named.pooling is not None:
        return final_norm, POOLINGS[named.pooling]
    if final_norm == "after_pooling" and "cls_token" in state:
        notes.append("assuming average pooling of the patches, as in models with fc_norm")
    return final_norm, "class" if "cls_token" in state and final_norm != "after_pooling" else "average"


def _with_conventions(config: ViTConfig, state: Mapping[str, Tensor], named: _Named, notes: list[str]) -> ViTConfig:
    """Set what names and shapes do not show: activation, epsilon, preprocessing, and whether a head is a projection."""
    if named.model is not None:
        like = named.model
    else:
        clip, siglip = config.stem_norm, config.pooling == "attention"
        own_features = config.layer_scale or not config.num_classes or isinstance(config, DeiTConfig)
        like = replace(
            config,
            layer_norm_eps=1e-5 if clip else 1e-6,
            preset="clip" if clip else "siglip" if siglip else "imagenet" if own_features else "augreg",
        )
        others = " (OpenAI's CLIP has quick_gelu)" if clip else " (SigLIP was trained with gelu_tanh)" if siglip else ""
        notes.append(
            f"keys do not show activation and LayerNorm epsilon: assuming gelu{others} and "
            f"{like.layer_norm_eps:g}; name the model to set them"
        )
    activation = named.argument("act_layer", like.activation)
    if activation not in ACTIVATIONS:
        # This also names the SiLU of a SwiGLU, which is part of it.
        activation = like.activation
    bias = state.get("head.bias")
    projection = config.num_classes > 0 and (bias is None or (config.stem_norm and not bias.any()))
    if projection:
        notes.append(f"the head has no bias: treated as a projection to {config.num_classes} dimensions, not classes")
    return replace(
        config,
        activation=activation,
        layer_norm_eps=like.layer_norm_eps,
        preset=like.preset,
        head="projection" if projection else "linear",
    )


def _with_positions(
    config: ViTConfig, state: Mapping[str, Tensor], hints: Hints, named: _Named, notes: list[str]
) -> ViTConfig:
    """Set the image size, the tokens with positions, and the table's formula, if any."""
    patch, prefix = config.patch_size, config.prefix
    if "pos_embed" not in state:
        size = hints.image_size or named.image_size
        if named.argument("pos_embed", "learn") not in ("", "none") or size is None:
            raise CheckpointError(
                "the position table is missing: the model may use rotary positions, or none",
                found="no pos_embed",
                expected="pos_embed, or a config.json whose model_args have pos_embed: none and img_size",
                fix="name the model: timm:NAME",
            )
        return replace(config, positions="none", image_size=size)
    rows = _shape(state, "pos_embed", 3)[1]
    flag = named.arguments.get("no_embed_class")
    excluded = bool(flag) if flag is not None else named.model is not None and not named.model.prefix_positions
    choices = [rows, rows - prefix] if excluded else [rows - prefix, rows]
    sizes = [size for size in (hints.image_size, named.image_size) if size is not None]
    fitting = [count for count in choices for size in sizes if (size[0] // patch) * (size[1] // patch) == count]
    square = [count for count in choices if count > 0 and math.isqrt(count) ** 2 == count]
    patches = next(iter([*fitting, *square, *choices]))
    configured = next((s for s in sizes if (s[0] // patch) * (s[1] // patch) == patches), None)
    size = vit.image_size_for(patches, patch, hints, configured, notes)
    positioned = patches != rows or prefix == 0
    if not positioned:
        notes.append("the tokens before the patches have no positions")
    remainder = bool(size[0] % patch or size[1] % patch)
    placed = replace(config, image_size=size, drop_remainder=remainder, prefix_positions=positioned)
    return replace(placed, positions=_formula(state["pos_embed"], placed))


def _formula(table: Tensor, config: ViTConfig) -> Positions:
    prefix, width = config.positioned_prefix, config.width
    if width % 4 == 0 and _close(table, sincos_2d(config.grid, width, prefix)):
        return "sincos_2d"
    if width % 2 == 0 and _close(table, sinusoidal(prefix + config.num_patches, width)):
        return "sinusoidal"
    return "learned"


def _close(table: Tensor, formula: Tensor) -> bool:
    return table.shape == formula.shape and torch.allclose(table.float(), formula, rtol=0, atol=FORMULA_TOLERANCE)


def _is_dinov2(state: Mapping[str, Tensor]) -> bool:
    """Whether the names are from DINOv2's code; timm's names for these models have no mask token."""
    if "register_tokens" in state or "blocks.0.mlp.w12.weight" in state or any(map(CHUNKED.match, state)):
        return True
    return "mask_token" in state and state["mask_token"].ndim == 2 and "blocks.0.ls1.gamma" in state


def _from_dinov2(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename DINOv2's tensors to timm's names. With registers, add the class token's position to the token."""
    renamed = {
        CHUNKED.sub(r"blocks.\1.", key).replace(".mlp.w12.", ".mlp.fc1.").replace(".mlp.w3.", ".mlp.fc2."): tensor
        for key, tensor in state.items()
    }
    if "register_tokens" in renamed and {"cls_token", "pos_embed"} <= renamed.keys():
        positions = renamed["pos_embed"]
        renamed["reg_token"] = renamed.pop("register_tokens")
        renamed["cls_token"] = renamed["cls_token"] + positions[:, :1]
        renamed["pos_embed"] = positions[:, 1:]
    return renamed
