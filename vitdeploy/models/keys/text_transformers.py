"""The text tower in the files of transformers' CLIPModel and SiglipModel, and how its features are compared."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.architectures.layers import Activation
from vitdeploy.models.architectures.vit import TextConfig
from vitdeploy.models.checkpoints.mismatch import listed
from vitdeploy.models.keys.rules import renamed, rules
from vitdeploy.models.keys.vit import merge_attention
from vitdeploy.models.keys.vit_transformers import ACTIVATIONS

PREFIX = "text_model."
_RULES = rules(
    """
    $P.embeddings.position_ids                      -
    $P.embeddings.token_embedding.weight            token_embed.weight
    $P.embeddings.position_embedding.weight         pos_embed
    $P.final_layer_norm.$W                          norm.$W
    ($P.head|text_projection).$W                    head.$W
    $P.encoder.layers.*.layer_norm{1,2}.$W          blocks.*.norm{1,2}.$W
    $P.encoder.layers.*.self_attn.{q,k,v,out}_proj.$W   blocks.*.attn.{q,k,v,proj}.$W
    $P.encoder.layers.*.mlp.fc{1,2}.$W              blocks.*.mlp.fc{1,2}.$W
    """,
    P="text_model",
    W="{weight,bias}",
)
_LAYERS = ("norm1", "norm2", "attn.q", "attn.k", "attn.v", "attn.proj", "mlp.fc1", "mlp.fc2")
# By model_type: what transformers 5.23's text config has by default, and what the model's class does.
_DEFAULTS: dict[str, tuple[float, Activation, int]] = {
    "clip": (1e-5, "quick_gelu", 8),
    "siglip": (1e-6, "gelu_tanh", 12),
}
CLIP_END = 49407
# CLIP's config of before its end token was corrected in transformers: the largest token number is meant.
OLD_END = 2


@dataclass(frozen=True)
class TextTower:
    """`state` loads strictly into a `TextEncoder` of `config`. `scale`, `bias`: logit = scale * cosine + bias;
    `sigmoid`: whether logits are read by a sigmoid (SigLIP) or by a softmax over the texts (CLIP)."""

    config: TextConfig
    state: dict[str, Tensor]
    scale: float
    bias: float
    sigmoid: bool


def has_text_tower(state: Mapping[str, Tensor]) -> bool:
    return any(key.startswith(PREFIX) for key in state)


def recognise_text(state: Mapping[str, Tensor], config: Mapping[str, Any]) -> TextTower:
    """The text tower of a whole CLIP or SigLIP; `config` is the folder's config.json.

    Raises:
        CheckpointError: tensors are missing, unknown or of odd shapes, or the config does not say what these are.
    """
    kind, part = str(config.get("model_type")), config.get("text_config") or {}
    eps, activation, heads = _DEFAULTS[kind]
    name = part.get("hidden_act", activation)
    if name not in ACTIVATIONS and name != activation:
        raise CheckpointError(
            "config.json names an activation of the text tower that vitdeploy does not have",
            found=f"hidden_act {name!r}",
            wanted=", ".join(ACTIVATIONS),
        )
    tensors = _renamed(state, kind)
    width, length, vocabulary = tensors["norm.weight"].shape[0], *_table(tensors)
    heads, eps, end = part.get("num_attention_heads", heads), part.get("layer_norm_eps", eps), _end(part)
    if not isinstance(heads, int) or heads < 1 or width % heads or not isinstance(eps, int | float) or eps < 0:
        raise CheckpointError(
            "config.json does not fit the text tower",
            found=f"num_attention_heads {heads!r}, layer_norm_eps {eps!r}",
            wanted=f"a number of heads that divides the width {width}, and an epsilon of 0 or more",
        )
    tower = TextConfig(
        vocabulary=vocabulary,
        length=length,
        width=width,
        depth=1 + max(int(key.split(".")[1]) for key in tensors if key.startswith("blocks.")),
        heads=heads,
        hidden=tensors["blocks.0.mlp.fc1.weight"].shape[0],
        features=tensors["head.weight"].shape[0],
        layer_norm_eps=float(eps),
        activation=ACTIVATIONS.get(name, activation),
        causal=kind == "clip",
        pooling="last" if kind == "siglip" else "highest" if end == OLD_END else "end",
        end=end,
        head_bias="head.bias" in tensors,
    )
    bias = float(state["logit_bias"]) if "logit_bias" in state else 0.0
    return TextTower(tower, tensors, math.exp(float(state["logit_scale"])), bias, kind == "siglip")


def _end(part: Mapping[str, Any]) -> int:
    end = part.get("eos_token_id", CLIP_END)
    return end if isinstance(end, int) else CLIP_END


def _table(tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """(length, vocabulary)."""
    return tensors["pos_embed"].shape[1], tensors["token_embed.weight"].shape[0]


def _renamed(state: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    text = {key: tensor for key, tensor in state.items() if key.startswith(PREFIX) or key == "text_projection.weight"}
    found, _, unknown = renamed(_RULES, text)
    wanted = ["token_embed.weight", "pos_embed", "norm.weight", "norm.bias", "head.weight"]
    wanted += [f"blocks.0.{part}.weight" for part in _LAYERS]
    missing = [name for name in wanted if name not in found]
    missing += [key for key in ("logit_scale", *(("logit_bias",) if kind == "siglip" else ())) if key not in state]
    if unknown or missing:
        raise CheckpointError(
            "the text tower is not whole, or not only one",
            found="; ".join(
                f"{what}: {listed(keys)}" for what, keys in (("missing", missing), ("unknown", unknown)) if keys
            ),
            wanted=f"the tensors of transformers' {'CLIPModel' if kind == 'clip' else 'SiglipModel'}",
            fix="save the whole model; or, for the image tower alone, --task features",
        )
    found["pos_embed"] = found["pos_embed"][None] if found["pos_embed"].ndim == 2 else found["pos_embed"]
    return merge_attention(found, [])
