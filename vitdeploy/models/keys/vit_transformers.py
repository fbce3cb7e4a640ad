"""ViTs with the keys of Hugging Face transformers: ViT, ViT-MAE, DeiT, DINOv2 (with registers), CLIP, SigLIP.

Two generations of names exist for ViT, MAE, DeiT and DINOv2: those of files (hubs, `save_pretrained`) and those of the
modules of transformers 5 (`model.state_dict()`). Both are read, for example

    file    encoder.layer.0.attention.attention.query.weight    encoder.layer.0.mlp.weights_in.weight
    module  layers.0.attention.q_proj.weight                    encoder.layer.0.mlp.gate_proj.weight, up_proj.weight

`config.json` supplies what tensors do not show (heads, epsilon, activation), by `model_type`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.architectures.layers import Activation
from vitdeploy.models.architectures.vit import FinalNorm, Pooling, Preset
from vitdeploy.models.checkpoints.mismatch import listed
from vitdeploy.models.family import Hints, Recognised
from vitdeploy.models.keys import vit
from vitdeploy.models.keys.rules import renamed, rules
from vitdeploy.models.model_folder.folder import stated_size, vision_part

PREFIXES = ("", "vit.", "deit.", "dinov2.", "dinov2_with_registers.", "vision_model.")

_RULES = rules(
    """
    decoder.                                        -
    text_model.                                     -
    pooler.                                         -
    embeddings.(mask_token|position_ids)            -
    (text_projection.weight|logit_scale|logit_bias) -
    embeddings.(cls_token|class_embedding)          cls_token
    embeddings.distillation_token                   dist_token
    embeddings.register_tokens                      reg_token
    embeddings.(position_embeddings|position_embedding.weight)  pos_embed
    embeddings.(patch_embeddings.projection|patch_embedding).$W     patch_embed.proj.$W
    pre_layrnorm.$W                                 norm_pre.$W
    (layernorm|post_layernorm).$W                   norm.$W
    head.probe                                      attn_pool.latent
    head.attention.in_proj_$W                       attn_pool.<q,kv,kv>.$W
    head.attention.out_proj.$W                      attn_pool.proj.$W
    head.layernorm.$W                               attn_pool.norm.$W
    head.mlp.fc{1,2}.$W                             attn_pool.mlp.fc{1,2}.$W
    $BLOCK.(layernorm_before|layer_norm1|norm1).$W  blocks.*.norm1.$W
    $BLOCK.(layernorm_after|layer_norm2|norm2).$W   blocks.*.norm2.$W
    $BLOCK.attention.attention.{query,key,value}.$W     blocks.*.attn.{q,k,v}.$W
    $BLOCK.(attention|self_attn).{q,k,v}_proj.$W    blocks.*.attn.{q,k,v}.$W
    $BLOCK.(attention.output.dense|attention.o_proj|self_attn.out_proj).$W  blocks.*.attn.proj.$W
    $BLOCK.(intermediate.dense|mlp.fc1|mlp.weights_in).$W       blocks.*.mlp.fc1.$W
    $BLOCK.(output.dense|mlp.fc2|mlp.weights_out|mlp.down_proj).$W  blocks.*.mlp.fc2.$W
    $BLOCK.mlp.{gate,up}_proj.$W                    blocks.*.mlp.{gate,up}.$W
    $BLOCK.layer_scale{1,2}.lambda1                 blocks.*.ls{1,2}.gamma
    (classifier|cls_classifier|visual_projection).$W     head.$W
    distillation_classifier.$W                      head_dist.$W
    """,
    W="{weight,bias}",
    BLOCK="(encoder.layer|encoder.layers|layers).*",
)
# By model_type: default epsilon and activation of the configuration classes of transformers 5.23, and the preprocessing
# preset.
DEFAULTS: dict[str, tuple[float, Activation, Preset]] = {
    "vit": (1e-12, "gelu", "augreg"),
    "vit_mae": (1e-12, "gelu", "imagenet"),
    "deit": (1e-12, "gelu", "imagenet"),
    "dinov2": (1e-6, "gelu", "imagenet"),
    "dinov2_with_registers": (1e-6, "gelu", "imagenet"),
    "clip": (1e-5, "quick_gelu", "clip"),
    "siglip": (1e-6, "gelu_tanh", "siglip"),
}
DEFAULT_HEADS = 12
MODEL_TYPES = {**{name: name for name in DEFAULTS}, "clip_vision_model": "clip", "siglip_vision_model": "siglip"}
# transformers' names; its `gelu_new` and `gelu_fast` are the tanh form, `gelu_python` the exact one.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "relu": "relu",
}


def recognise(state: Mapping[str, Tensor], hints: Hints) -> Recognised | None:
    """Return the model and its renamed tensors; None if the keys or the config's model_type belong to other models.

    Raises:
        CheckpointError: tensors are missing, unknown or misshapen, or heads or image size are unknown.
    """
    tower = _tower(state)
    if tower is None:
        return None
    prefix, kind = tower
    settings = settings_for(kind, hints.config)
    if settings is None:
        return None
    style = f"transformers' {kind}"
    tensors, *others = renamed(_RULES, {key.removeprefix(prefix): tensor for key, tensor in state.items()})
    unused, unknown = ([key if key in state else prefix + key for key in keys] for keys in others)
    if not any(key.endswith(".attn.q.weight") for key in tensors):
        return None  # other embeddings, such as Swin's, have the same names
    if unknown:
        raise CheckpointError(
            f"the state dict has the names of {style}, and unknown tensors",
            found=f"{len(unknown)} unknown: {listed(unknown)}",
            fix="it may be another transformers class: use the model's folder or repository, as hf:...",
        )
    if "classifier.weight" in state and f"{prefix}pooler.dense.weight" in state and "model_type" not in hints.config:
        raise CheckpointError(
            f"the classifier of this {style} may or may not read its pooling layer",
            found=f"classifier.weight, {prefix}pooler.dense.weight",
            expected="a config.json that names the class, or a state dict without the pooling layer",
            fix="put config.json next to the checkpoint, or use the module itself: --model package.module:function",
        )
    notes = [*settings.notes, *vit.left_out(unused, "not part of the image encoder")]
    tensors = _gated(tensors)
    vit.require(tensors, style, stem=_required(kind))
    tensors = vit.as_rows(vit.merge_attention(tensors, notes))
    pooling, final_norm = _pooling(tensors, kind, "classifier.weight" in state, notes)
    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    heads = vit.heads_for(width, hints, settings.heads, notes)
    patches = tensors["pos_embed"].shape[1] - ("cls_token" in tensors) - ("dist_token" in tensors)
    image_size = vit.image_size_for(patches, patch, hints, settings.image_size, notes)
    tensors = _with_registers(tensors)
    config = vit.measured(
        tensors,
        heads,
        image_size,
        layer_norm_eps=settings.layer_norm_eps,
        activation=settings.activation,
        pooling=pooling,
        final_norm=final_norm,
        preset=DEFAULTS[kind][2],
        position_resampling="antialias" if kind == "dinov2_with_registers" else "plain",
    )
    return vit.recognised("transformers", tensors, config, notes)


def _tower(state: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """Return the prefix of the image encoder's keys, and the kind of model (a `model_type`)."""
    for prefix in PREFIXES:
        embeddings = prefix + "embeddings."
        if embeddings + "patch_embeddings.projection.weight" in state:
            if embeddings + "register_tokens" in state:
                return prefix, "dinov2_with_registers"
            if any(key.startswith(prefix) and key.endswith(".layer_scale1.lambda1") for key in state):
                return prefix, "dinov2"
            if embeddings + "distillation_token" in state:
                return prefix, "deit"
            return prefix, "vit_mae" if "decoder.decoder_pos_embed" in state else "vit"
        if embeddings + "patch_embedding.weight" in state:
            return prefix, "clip" if embeddings + "class_embedding" in state else "siglip"
    return None


def _required(kind: str) -> tuple[str, ...]:
    if kind == "siglip":
        return ("norm.weight",)
    return ("norm.weight", "cls_token", *(("norm_pre.weight",) if kind == "clip" else ()))


def _gated(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Merge a SwiGLU's gate and up into one linear layer, gate first, if both are present."""
    merged = dict(state)
    for gate in [key for key in state if ".mlp.gate." in key]:
        up = gate.replace(".mlp.gate.", ".mlp.up.")
        if up in state and state[up].shape == state[gate].shape:
            merged[gate.replace(".mlp.gate.", ".mlp.fc1.")] = torch.cat([merged.pop(gate), merged.pop(up)])
    return merged


def _with_registers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the class token's position to the token, as registers have no position: the model computes the same sum.

    DeiT's distillation token without its own head becomes a register with a position: DeiTForImageClassification reads
    only the class token.
    """
    if "reg_token" in state:
        positions = state["pos_embed"]
        return state | {"cls_token": state["cls_token"] + positions[:, :1], "pos_embed": positions[:, 1:]}
    if "dist_token" in state and "head_dist.weight" not in state:
        return {"reg_token" if key == "dist_token" else key: tensor for key, tensor in state.items()}
    return state


def _pooling(state: dict[str, Tensor], kind: str, classifier: bool, notes: list[str]) -> tuple[Pooling, FinalNorm]:
    """Return the pooling and the final norm of the model's class, and drop the tensors that it does not use there."""
    if kind == "clip" and classifier:  # CLIPForImageClassification
        _drop(state, "norm.", "the classifier reads tokens that are not normalised", notes)
        return "average", "none"
    if kind == "siglip" and (classifier or "attn_pool.latent" not in state):  # SiglipForImageClassification
        _drop(state, "attn_pool.", "the classifier reads the mean of the patch tokens", notes)
        if not classifier:
            notes.append("no attention pooling in the file: features are the mean of the patch tokens")
        return "average", "before_pooling"
    if kind == "siglip":
        return "attention", "before_pooling"
    # DINOv2 classifiers read the class token and the mean of the patch tokens.
    return ("class_average" if kind.startswith("dinov2") and classifier else "class"), "before_pooling"


def _drop(state: dict[str, Tensor], prefix: str, why: str, notes: list[str]) -> None:
    dropped = [key for key in state if key.startswith(prefix)]
    notes += vit.left_out(dropped, why)
    for key in dropped:
        del state[key]


@dataclass(frozen=True)
class _Settings:
    """`heads` and `image_size` (height, width) are None without a config."""

    layer_norm_eps: float
    activation: Activation
    heads: int | None = None
    image_size: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()


def settings_for(kind: str, config: Mapping[str, Any]) -> _Settings | None:
    """Return the settings of a model with the tensors of `kind` (a key of DEFAULTS).

    None if this module does not know the config's model_type: the same tensor names may belong to another model.

    Raises:
        CheckpointError: an unsupported value in the forward pass.
    """
    eps, activation, _ = DEFAULTS[kind]
    if "model_type" not in config:
        note = f"no transformers config.json: assuming activation {activation} and epsilon {eps:g}, {kind}'s defaults"
        return _Settings(eps, activation, notes=(note,))
    own = MODEL_TYPES.get(config["model_type"])
    if own is None:
        return None
    if own != kind and {own, kind} != {"vit", "vit_mae"}:  # an MAE without its decoder has a ViT's names
        raise CheckpointError(
            "config.json does not belong to these weights",
            found=f"model_type {config['model_type']}, tensors of {kind}",
            fix="take both from the same folder",
        )
    eps, activation, _ = DEFAULTS[own]
    values = vision_part(config)
    name = values.get("hidden_act", activation)
    if name not in ACTIVATIONS and name != activation:
        raise CheckpointError(
            "config.json names an unsupported activation",
            found=f"hidden_act {name!r}",
            expected=", ".join(ACTIVATIONS),
        )
    eps = values.get("layer_norm_eps", eps)
    heads = values.get("num_attention_heads", DEFAULT_HEADS)
    if not isinstance(eps, int | float) or eps < 0 or not isinstance(heads, int) or heads < 1:
        raise CheckpointError(
            "config.json has an invalid value",
            found=f"layer_norm_eps {eps!r}, num_attention_heads {heads!r}",
            expected="layer_norm_eps >= 0, and an integer num_attention_heads >= 1",
        )
    return _Settings(float(eps), ACTIVATIONS.get(name, activation), heads, stated_size(config))
