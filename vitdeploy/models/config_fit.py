"""Whether a model's config file and its weights are of one model.

Ours are built as the weights say, so a config of another depth or width would change nothing, and be believed: labels,
preprocessing, heads and epsilon come from it. Everything that both tell is compared, and all that differs is told.
A key that the config does not have claims nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models import catalog
from vitdeploy.models.config_files import timm_config
from vitdeploy.models.detr import DETRConfig
from vitdeploy.models.family import Recognised
from vitdeploy.models.label_names import counted
from vitdeploy.models.swin import SwinConfig
from vitdeploy.models.vit import ViTConfig
from vitdeploy.runtime.labels import number_of_classes

# Arguments of timm's classes and the fields of ours that they are.
_TIMM_VIT = {
    "embed_dim": "width",
    "depth": "depth",
    "patch_size": "patch_size",
    "in_chans": "in_channels",
    "mlp_ratio": "mlp_ratio",
    "reg_tokens": "registers",
    "class_token": "class_token",
    "qkv_bias": "qkv_bias",
    "qk_norm": "qk_norm",
    "pre_norm": "stem_norm",
}
_TIMM_SWIN = {
    "embed_dim": "width",
    "depths": "depths",
    "num_heads": "heads",
    "patch_size": "patch_size",
    "in_chans": "in_channels",
    "mlp_ratio": "mlp_ratio",
    "qkv_bias": "qkv_bias",
}

RATIO = 0.02  # a width of whole numbers is a ratio only nearly


@dataclass(frozen=True)
class Claim:
    """What a key of the config says, and what the weights have instead, as JSON has it.

    `fix`: what would make the config say that, for people; "" where only another file would do.
    """

    key: str
    said: Any
    found: Any
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.key} {_json(self.said)}, the weights have {_json(self.found)}"


def check_config(config: Mapping[str, Any], found: Recognised, where: str) -> None:
    """Compare `config` (timm's or transformers') with the weights that became `found`.

    Raises:
        CheckpointError: lists every key that says something else than the weights.
    """
    wrong = [claim for claim in _claims(config, found) if not _equal(claim.said, claim.found)]
    if not wrong:
        return
    mends = [claim.mend for claim in wrong]
    raise CheckpointError(
        f"config.json does not fit the weights in {where}",
        found="; ".join(map(str, wrong)),
        wanted="the config and the weights of one model",
        fix="take both from one save of the model"
        + (f"; or, where the weights are the right ones, in config.json: {', '.join(mends)}" if all(mends) else ""),
    )


def _keyed(key: str, said: Any, found: Any, within: str = "") -> Claim:
    pair = f'"{key}": {_json(found)}'
    return Claim(key, said, found, f'"{within}": {{{pair}}}' if within else pair)


def _equal(said: Any, found: Any) -> bool:
    if isinstance(said, list | tuple) and isinstance(found, list | tuple):
        return len(said) == len(found) and all(map(_equal, said, found))
    if isinstance(said, int | float) and isinstance(found, int | float) and float in (type(said), type(found)):
        return abs(said - found) < RATIO
    return bool(said == found)


def _json(value: Any) -> str:
    return json.dumps(round(value, 4) if isinstance(value, float) else value)


def _claims(config: Mapping[str, Any], found: Recognised) -> Iterator[Claim]:
    if "model_type" in config:
        yield from _of_transformers(config, found)
    elif "architecture" in config:
        yield from _of_timm(config, found)
    yield from _of_classes(config, found)


def _of_classes(config: Mapping[str, Any], found: Recognised) -> Iterator[Claim]:
    signature = catalog.family_named(found.family).describe(found.config)
    if signature.task == "features":
        return
    classes = number_of_classes(signature.outputs, signature.postprocess)
    names = counted(config)
    if names is not None and names[1] != classes:
        key = names[0]
        yield Claim(f"classes by {key}", names[1], classes, f"no {'id2label, no label2id' if '2' in key else key}")


def _of_transformers(config: Mapping[str, Any], found: Recognised) -> Iterator[Claim]:
    inner = config.get("vision_config")
    values = inner if isinstance(inner, Mapping) else config
    own = found.config
    pairs: list[tuple[str, Any]] = []
    if isinstance(own, ViTConfig):
        pairs = _vit_values(values, own)
        if "projection_dim" in config and own.head == "projection":
            yield _keyed("projection_dim", config["projection_dim"], own.num_classes)
    elif isinstance(own, SwinConfig):
        pairs = [
            ("embed_dim", own.width),
            ("depths", own.depths),
            ("num_heads", own.heads),
            ("patch_size", own.patch_size),
            ("num_channels", own.in_channels),
            ("mlp_ratio", own.mlp_ratio),
            ("qkv_bias", own.qkv_bias),
        ]
    elif isinstance(own, DETRConfig):
        pairs = [
            ("d_model", own.width),
            ("encoder_layers", own.encoder_layers),
            ("decoder_layers", own.decoder_layers),
            ("encoder_ffn_dim", own.hidden),
            ("num_queries", own.queries),
        ]
    within = "vision_config" if values is inner else ""
    yield from (_keyed(key, values[key], value, within) for key, value in pairs if values.get(key) is not None)
    name = str((config.get("architectures") or [""])[0])
    if "ForImageClassification" in name and getattr(own, "num_classes", None) == 0:
        yield _keyed("architectures", [name], [name.partition("ForImageClassification")[0] + "Model"])


def _vit_values(values: Mapping[str, Any], own: ViTConfig) -> list[tuple[str, Any]]:
    rows, columns = own.image_size
    size = values.get("image_size")
    pairs: list[tuple[str, Any]] = [
        ("hidden_size", own.width),
        ("num_hidden_layers", own.depth),
        ("patch_size", own.patch_size if isinstance(values.get("patch_size"), int) else [own.patch_size] * 2),
        ("num_channels", own.in_channels),
        ("image_size", rows if isinstance(size, int) and rows == columns else [rows, columns]),
        ("num_register_tokens", own.registers),
        ("qkv_bias", own.qkv_bias),
    ]
    if "use_swiglu_ffn" in values:  # DINOv2's; a SwiGLU's width is rounded
        pairs.append(("use_swiglu_ffn", own.mlp != "mlp"))
        return [*pairs, ("mlp_ratio", own.mlp_ratio)] if own.mlp == "mlp" else pairs
    return [*pairs, ("intermediate_size", own.hidden)]


def _of_timm(config: Mapping[str, Any], found: Recognised) -> Iterator[Claim]:
    own = found.config
    arguments = config.get("model_args")
    arguments = arguments if isinstance(arguments, Mapping) else {}
    table = _TIMM_VIT if isinstance(own, ViTConfig) else _TIMM_SWIN if isinstance(own, SwinConfig) else {}
    said = [(key, field) for key, field in table.items() if arguments.get(key) is not None]
    yield from (_keyed(key, arguments[key], getattr(own, field), "model_args") for key, field in said)
    name = str(config["architecture"])
    named = named_config(name)
    if type(named) is type(own):
        implied = [(key, field) for key, field in table.items() if key != "in_chans" and arguments.get(key) is None]
        yield from (Claim(f"{name} has {key}", getattr(named, field), getattr(own, field)) for key, field in implied)
    yield from _timm_size(config, arguments, own)
    classes = arguments.get("num_classes", config.get("num_classes"))
    if classes is not None:
        yield _keyed("num_classes", classes, own.num_classes, "model_args" if "num_classes" in arguments else "")


def _timm_size(config: Mapping[str, Any], arguments: Mapping[str, Any], own: Any) -> Iterator[Claim]:
    """The image size of a position table; without one it is free. The argument counts before the evaluation's size."""
    if not isinstance(own, ViTConfig) or own.positions == "none":
        return
    given = arguments.get("img_size")
    key, size = ("img_size", given) if given else ("input_size", (timm_config(config) or {}).get("input_size"))
    sides = [size, size] if isinstance(size, int) else list(size)[-2:] if isinstance(size, list | tuple) else []
    if len(sides) == 2:
        mend = f'"model_args": {{"img_size": {_json(own.image_size)}}}'
        yield Claim(key, sides, list(own.image_size), mend)


def named_config(name: str) -> Any:
    """Our config of an architecture as a file names it; None where it is nobody's of ours, or contradicts itself."""
    try:
        found = catalog.find(name)
    except UnknownModelError:
        return None
    return found[1] if found else None
