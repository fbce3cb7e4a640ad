"""What a ViT's forward pass needs from transformers' `config.json`, with transformers' own defaults."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vitdeploy.errors import CheckpointError
from vitdeploy.models.config_files import stated_size, vision_part
from vitdeploy.models.layers import Activation

# Defaults of the configuration classes of transformers 5.23, by model_type.
DEFAULTS: dict[str, tuple[float, Activation]] = {
    "vit": (1e-12, "gelu"),
    "vit_mae": (1e-12, "gelu"),
    "deit": (1e-12, "gelu"),
    "dinov2": (1e-6, "gelu"),
    "dinov2_with_registers": (1e-6, "gelu"),
    "clip": (1e-5, "quick_gelu"),
    "siglip": (1e-6, "gelu_tanh"),
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


@dataclass(frozen=True)
class Settings:
    """`heads` and `image_size` (height, width) are None where there is no config."""

    layer_norm_eps: float
    activation: Activation
    heads: int | None = None
    image_size: tuple[int, int] | None = None
    notes: tuple[str, ...] = ()


def settings_for(kind: str, config: Mapping[str, Any]) -> Settings | None:
    """The settings of a model whose tensors are those of `kind` (a key of DEFAULTS).

    None where the config is of a model_type that this module does not know: equal names are not equal models.

    Raises:
        CheckpointError: a value that the forward pass needs is not one that vitdeploy has.
    """
    eps, activation = DEFAULTS[kind]
    if "model_type" not in config:
        note = f"no transformers config.json: activation {activation} and epsilon {eps:g}, as its {kind} has by default"
        return Settings(eps, activation, notes=(note,))
    own = MODEL_TYPES.get(config["model_type"])
    if own is None:
        return None
    if own != kind and {own, kind} != {"vit", "vit_mae"}:  # an MAE without its decoder has a ViT's names
        raise CheckpointError(
            "config.json is not the one of these weights",
            found=f"model_type {config['model_type']}, tensors of {kind}",
            fix="take both from the same folder",
        )
    eps, activation = DEFAULTS[own]
    values = vision_part(config)
    name = values.get("hidden_act", activation)
    if name not in ACTIVATIONS and name != activation:
        raise CheckpointError(
            "config.json names an activation that vitdeploy does not have",
            found=f"hidden_act {name!r}",
            wanted=", ".join(ACTIVATIONS),
        )
    eps = values.get("layer_norm_eps", eps)
    heads = values.get("num_attention_heads", DEFAULT_HEADS)
    if not isinstance(eps, int | float) or eps < 0 or not isinstance(heads, int) or heads < 1:
        raise CheckpointError(
            "config.json has a value that cannot be",
            found=f"layer_norm_eps {eps!r}, num_attention_heads {heads!r}",
            wanted="a number of 0 or more, and a whole number of 1 or more",
        )
    return Settings(float(eps), ACTIVATIONS.get(name, activation), heads, stated_size(config))
