"""Both towers in OpenCLIP's names, which are OpenAI's: `visual.transformer.resblocks.0.attn.in_proj_weight`.

The text tower's names stand alone, or below `text.` where OpenCLIP built it apart (`custom_text`). An image tower of
timm has timm's names below `visual.trunk.`, and is not read here. What tensors cannot show is in
`open_clip_config.json`; what both say must be the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.architectures.layers import Activation
from vitdeploy.models.architectures.vit import TextConfig, TextPooling
from vitdeploy.models.checkpoints.mismatch import listed
from vitdeploy.models.family import Hints, Recognised
from vitdeploy.models.keys.rules import Rule, renamed, rules
from vitdeploy.models.keys.text_transformers import TextTower
from vitdeploy.models.keys.vit import as_rows, depth_of, heads_for, image_size_for, measured, recognised
from vitdeploy.models.model_folder.folder import OPEN_CLIP
from vitdeploy.models.model_folder.tokenizer import ALONE, OpenClip

IMAGE, TEXT, TRUNK = "visual.", "text.", "visual.trunk."
# What tells such a state dict with an image tower of OpenCLIP's own.
SIGN = f"{IMAGE}transformer.resblocks.0.attn.in_proj_weight"
# The first are buffers of OpenAI's archives and of old versions, and not of one tower.
_BLOCK = """
    $P(logit_scale|logit_bias|attn_mask|input_resolution|context_length|vocab_size)     -
    $BLOCK.ln_{1,2}.$W              blocks.*.norm{1,2}.$W
    $BLOCK.attn.in_proj_$W          blocks.*.attn.qkv.$W
    $BLOCK.attn.out_proj.$W         blocks.*.attn.proj.$W
    $BLOCK.mlp.{c_fc,c_proj}.$W     blocks.*.mlp.{fc1,fc2}.$W
"""
_IMAGE = rules(
    _BLOCK
    + """
    $BLOCK.ls_{1,2}.gamma           blocks.*.ls{1,2}.gamma
    $Pconv1.weight                  patch_embed.proj.weight
    $Pclass_embedding               cls_token
    $Ppositional_embedding          pos_embed
    $Pln_pre.$W                     norm_pre.$W
    $Pln_post.$W                    norm.$W
    $Pproj                          head.weight
    """,
    BLOCK="$Ptransformer.resblocks.*",
    W="{weight,bias}",
    P=IMAGE,
)
_TEXT = rules(
    _BLOCK
    + """
    $Ptoken_embedding.weight        token_embed.weight
    $Ppositional_embedding          pos_embed
    $Pln_final.$W                   norm.$W
    $Ptext_projection               head.weight
    $Ptext_projection.$W            head.$W
    """,
    BLOCK="$Ptransformer.resblocks.*",
    W="{weight,bias}",
    P=f"({TEXT})?",
)
# What every block has, and what stands around them.
_LAYERS = ("norm1", "attn.qkv", "attn.proj", "norm2", "mlp.fc1", "mlp.fc2")
_PARTS = [f"{layer}.{kind}" for layer in _LAYERS for kind in ("weight", "bias")]
_IMAGE_STEM = ("patch_embed.proj.weight", "cls_token", "pos_embed", "norm.weight", "norm.bias", "head.weight")
_TEXT_STEM = ("token_embed.weight", "pos_embed", "norm.weight", "norm.bias", "head.weight")
# Axes of tensors whose sizes are read.
_AXES = {"patch_embed.proj.weight": 4, "token_embed.weight": 2, "head.weight": 2, "blocks.0.mlp.fc1.weight": 2}
POOLINGS: Mapping[str, TextPooling] = {"argmax": "highest", "last": "last", "eos": "end"}


def image_tower(state: Mapping[str, Tensor], config: OpenClip, heads: int | None) -> Recognised:
    """OpenCLIP's own Vision Transformer, to the features that images and texts share.

    Args:
        heads: instead of the config's.

    Raises:
        CheckpointError: tensors are missing or unknown, or the config says what they are not, or names something that
            our Vision Transformer does not do.
    """
    config.refuse_vision()
    cfg = config.vision
    image = {key: tensor for key, tensor in state.items() if key.startswith(IMAGE)}
    tensors = _renamed(image, _IMAGE, "image tower")
    _require(tensors, _IMAGE_STEM, "image tower")
    tensors = as_rows(tensors)
    tensors["head.weight"] = tensors["head.weight"].T.contiguous()
    width, _, patch, _ = tensors["patch_embed.proj.weight"].shape
    if "norm_pre.weight" not in tensors:  # our patches have no bias only where a norm follows them
        tensors["patch_embed.proj.bias"] = torch.zeros(width)
    size = config.image_size
    compare(
        config,
        cfg,
        {"width": width, "layers": depth_of(tensors), "patch_size": patch, "embed_dim": len(tensors["head.weight"])},
    )
    notes: list[str] = []
    fitting = image_size_for(tensors["pos_embed"].shape[1] - 1, patch, Hints(image_size=size), None, notes)
    compare(config, cfg, {"image_size": fitting if fitting != size else cfg.get("image_size", 224)})
    pooling, after = cfg.get("pool_type", "tok"), cfg.get("final_ln_after_pool") is True
    if pooling not in ("tok", "avg") or bool(cfg.get("no_ln_pre")) == ("norm_pre.weight" in tensors):
        raise config.refused(
            f"pool_type {pooling!r}, no_ln_pre {cfg.get('no_ln_pre', False)}",
            "tok or avg, and a ln_pre in the weights that is as the config says",
        )
    if after:
        tensors |= {f"fc_{key}": tensors.pop(key) for key in ("norm.weight", "norm.bias")}
    activation, eps = conventions(config, cfg)
    found = measured(
        tensors,
        heads_for(width, Hints(heads), max(1, width // cfg.get("head_width", 64)), notes),
        size,
        layer_norm_eps=eps,
        activation=activation,
        pooling="class" if pooling == "tok" else "average",
        final_norm="after_pooling" if after else "before_pooling",
        preset="clip",
    )
    return recognised("OpenCLIP", tensors, found, notes)


def refuse_without_config(state: Mapping[str, Tensor], file: str) -> None:
    """Raise CheckpointError for such a state dict, of which nothing says what the tensors cannot show."""
    if SIGN in state:
        raise CheckpointError(
            f"{file} is of OpenCLIP's layout, and its tensors do not show heads, activation and how texts are pooled",
            found=f"{SIGN}, no {OPEN_CLIP} beside it",
            wanted=f"{OPEN_CLIP}, and tokenizer.json for the text tower",
            fix="put the model's own config beside it: that of its repository, or OpenCLIP's model_configs/NAME.json "
            f"as {OPEN_CLIP} (OpenAI's and MetaCLIP's models are those called ...-quickgelu)",
        )


def has_text_tower(state: Mapping[str, Tensor]) -> bool:
    return any(key.removeprefix(TEXT) == "token_embedding.weight" for key in state)


def text_tower(state: Mapping[str, Tensor], config: OpenClip) -> TextTower:
    """OpenCLIP's own text Transformer, and how its features are compared.

    Raises:
        CheckpointError: as `image_tower`.
    """
    config.refuse_text()
    cfg = config.text
    own = {key: tensor for key, tensor in state.items() if not key.startswith(IMAGE)}
    tensors = _renamed(own, _TEXT, "text tower")
    _require(tensors, _TEXT_STEM, "text tower")
    if f"{TEXT}text_projection.weight" not in state and "text_projection.weight" not in state:
        tensors["head.weight"] = tensors["head.weight"].T.contiguous()
    tensors = as_rows(tensors)
    vocabulary, width = tensors["token_embed.weight"].shape
    length, heads = tensors["pos_embed"].shape[1], cfg.get("heads", 8)
    tells = {"width": width, "layers": depth_of(tensors), "vocab_size": vocabulary, "context_length": length}
    compare(config, cfg, {**tells, "embed_dim": len(tensors["head.weight"])})
    pooling, end = cfg.get("pool_type", "argmax"), cfg.get("eos_id")
    if pooling not in POOLINGS or (pooling == "eos" and type(end) is not int) or width % heads:
        raise config.refused(
            f"text_cfg: pool_type {pooling!r}, eos_id {end!r}, heads {heads}",
            f"one of {', '.join(POOLINGS)}, a token's number for eos, and heads that divide {width}",
            ALONE,
        )
    if "logit_scale" not in state:
        raise CheckpointError(
            "the weights do not say how images and texts are compared", wanted="logit_scale", fix=ALONE
        )
    activation, eps = conventions(config, cfg)
    tower = TextConfig(
        vocabulary=vocabulary,
        length=length,
        width=width,
        depth=depth_of(tensors),
        heads=heads,
        hidden=len(tensors["blocks.0.mlp.fc1.weight"]),
        features=len(tensors["head.weight"]),
        layer_norm_eps=eps,
        activation=activation,
        causal=not cfg.get("no_causal_mask", False),
        pooling=POOLINGS[pooling],
        end=end if type(end) is int else vocabulary - 1,
        head_bias="head.bias" in tensors,
    )
    bias = float(state["logit_bias"]) if "logit_bias" in state else 0.0
    return TextTower(tower, tensors, math.exp(float(state["logit_scale"])), bias, "logit_bias" in state)


def conventions(config: OpenClip, part: Mapping[str, Any]) -> tuple[Activation, float]:
    """The activation, and the epsilon of LayerNorm, of a part of the config.

    Raises:
        CheckpointError: others than those of CLIP and SigLIP.
    """
    act, norm = part.get("act_kwargs") or {}, part.get("norm_kwargs") or {}
    eps, tanh = norm.get("eps", 1e-5), act == {"approximate": "tanh"}
    if (act and (not tanh or config.quick_gelu)) or set(norm) - {"eps"} or not isinstance(eps, float) or eps < 0:
        raise config.refused(
            f"act_kwargs {dict(act)}, norm_kwargs {dict(norm)}, quick_gelu {config.quick_gelu}",
            'quick_gelu alone, or act_kwargs {"approximate": "tanh"}, or neither; norm_kwargs {"eps": 1e-06}',
        )
    return "quick_gelu" if config.quick_gelu else "gelu_tanh" if tanh else "gelu", eps


def _renamed(state: Mapping[str, Tensor], table: tuple[Rule, ...], what: str) -> dict[str, Tensor]:
    tensors, _, unknown = renamed(table, state)
    if unknown:
        raise CheckpointError(
            f"the {what} has tensors that CLIP's does not have",
            found=listed(unknown),
            wanted="the tensors of OpenCLIP's own Transformer",
            fix=ALONE if what == "text tower" else "",
        )
    return tensors


def _require(tensors: Mapping[str, Tensor], stem: Iterable[str], what: str) -> None:
    wanted = [*stem, *(f"blocks.{block}.{part}" for block in range(max(1, depth_of(tensors))) for part in _PARTS)]
    missing = [name for name in wanted if name not in tensors]
    if missing:
        raise CheckpointError(
            f"the {what} is not whole",
            found=f"{len(missing)} missing, by our names: {listed(missing)}",
            wanted="every tensor of OpenCLIP's own Transformer",
            fix="save the whole model",
        )
    wrong = [name for name, axes in _AXES.items() if name in tensors and tensors[name].ndim != axes]
    if wrong:
        raise CheckpointError(
            f"the {what} has tensors of other shapes than CLIP's",
            found=", ".join(f"{name} of {list(tensors[name].shape)}" for name in wrong),
            wanted=", ".join(f"{name} with {_AXES[name]} axes" for name in wrong),
        )


def compare(config: OpenClip, part: Mapping[str, object], tells: Mapping[str, object]) -> None:
    """Raise CheckpointError if the config says other sizes than the weights have; what it leaves out claims nothing."""
    said = {"embed_dim": config.features, **part}
    wrong = [
        f"{key} {said[key]}, the weights have {value}" for key, value in tells.items() if said.get(key, value) != value
    ]
    if wrong:
        raise CheckpointError(
            f"{config.file.name} does not fit the weights",
            found="; ".join(wrong),
            wanted="the config and the weights of one model",
            fix="take both from one repository; for OpenCLIP's own names of models, from its model_configs",
        )
