"""The catalog's rows for Vision Transformers: "vit", all variants of `ViTConfig`, and "deit", with distillation."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.architectures.layers import resize_positions
from vitdeploy.models.architectures.vit import DistilledVisionTransformer, Preset, VisionTransformer, ViTConfig
from vitdeploy.models.family import Family, Hints, Recognised, Signature, refuse_channels
from vitdeploy.models.keys import vit, vit_others, vit_timm, vit_transformers
from vitdeploy.models.keys.vit_transformers import MODEL_TYPES
from vitdeploy.models.model_folder import image_processor
from vitdeploy.models.names import NAMES
from vitdeploy.spec import PreprocessSpec, TensorSpec

# Mean, std, and the crop's share of the resized image below 384 pixels and from 384 on. From the default configurations
# of timm 1.0.31.
PRESETS: Mapping[Preset, tuple[tuple[float, ...], tuple[float, ...], float, float]] = {
    "augreg": (image_processor.HALF, image_processor.HALF, 0.9, 1.0),
    "imagenet": (image_processor.IMAGENET_MEAN, image_processor.IMAGENET_STD, 0.9, 1.0),
    "clip": (image_processor.CLIP_MEAN, image_processor.CLIP_STD, 1.0, 1.0),
    "siglip": (image_processor.HALF, image_processor.HALF, 0.9, 0.9),
}
LARGE = 384
CONVENTIONS = ("activation", "layer_norm_eps")
READERS = (
    *(vit_timm.recognise, vit_transformers.recognise, vit_others.recognise_torchvision, vit_others.recognise_jax),
)
Config = TypeVar("Config", bound=ViTConfig)
# Attributes that define the architecture, by display name.
ARCHITECTURE = {
    "patch size": "patch_size",
    "width": "width",
    "depth": "depth",
    "heads": "heads",
    "MLP width": "hidden",
    "class token": "class_token",
    "registers": "registers",
    "norm before the blocks": "stem_norm",
    "norms of query and key": "qk_norm",
    "LayerScale": "layer_scale",
    "MLP": "mlp",
}


def describe(config: ViTConfig) -> Signature:
    """Return the signature: a classifier's logits, a projection's embedding, or pooled and patch features without a
    head."""
    outputs: list[tuple[str, tuple[int, ...]]]
    if config.num_classes and config.head == "linear":
        outputs = [("logits", (config.num_classes,))]
    elif config.num_classes:
        outputs = [("features", (config.num_classes,))]
    else:
        outputs = [("features", (config.feature_width,)), ("patch_features", (config.num_patches, config.width))]
    return Signature(
        task="classification" if outputs[0][0] == "logits" else "features",
        image_size=config.image_size,
        channels=config.in_channels,
        outputs=tuple(TensorSpec(name, "float32", ("batch", *shape)) for name, shape in outputs),
    )


def resize(
    config: Config, state: Mapping[str, Tensor], image_size: tuple[int, int]
) -> tuple[Config, dict[str, Tensor]]:
    """Return config and state for images of `image_size` (height, width): only the position table is resized.

    A table that followed a formula becomes a "learned" one.

    Raises:
        CheckpointError: the patch size does not divide the image size; the error names valid sizes close to it.
    """
    try:
        resized = replace(config, image_size=image_size)
    except ValueError as error:
        near = [sorted({max(1, side // config.patch_size), -(-side // config.patch_size)}) for side in image_size]
        sizes = [f"{rows * config.patch_size}x{columns * config.patch_size}" for rows in near[0] for columns in near[1]]
        raise CheckpointError(
            "the model cannot take this image size",
            found=str(error),
            expected=f"multiples of {config.patch_size}, for example {', '.join(sizes)}",
            fix="--image-size HEIGHTxWIDTH",
        ) from None
    if resized.grid == config.grid or config.positions == "none":
        return resized, dict(state)
    old, new, prefix = config.grid, resized.grid, config.positioned_prefix
    table = resize_positions(state["pos_embed"], old, new, prefix, config.position_resampling)
    return replace(resized, positions="learned"), {**state, "pos_embed": table}


def preprocess(config: ViTConfig) -> PreprocessSpec:
    """Return timm's evaluation preprocessing for the config's `preset`: bicubic, short side, centre crop.

    Raises:
        CheckpointError: the patch embedding has neither 1 nor 3 channels.
    """
    refuse_channels(config.in_channels)
    mean, std, small, large = PRESETS[config.preset]
    share = small if min(config.image_size) < LARGE else large
    return image_processor.timm_preprocess(
        {"mean": mean, "std": std, "crop_pct": share}, config.in_channels, config.image_size
    )


def hints(name: str, config: ViTConfig) -> Hints:
    """Return hints in the form of timm's config file for that name."""
    return Hints(heads=config.heads, config={"architecture": name})


def settle(own: Config, named: ViTConfig) -> tuple[Config, list[str]]:
    """Use the name's conventions where a reader had to assume them, as another library's config file is missing."""
    changed = [f"{f} {getattr(named, f)}" for f in CONVENTIONS if getattr(named, f) != getattr(own, f)]
    conventions = {field: getattr(named, field) for field in (*CONVENTIONS, "preset")}
    return replace(own, **conventions), changed


def transformers_keys(values: Mapping[str, Any], config: ViTConfig) -> dict[str, Any]:
    rows, columns = config.image_size
    size, patch = values.get("image_size"), config.patch_size
    keys: dict[str, Any] = {"projection_dim": config.num_classes} if config.head == "projection" else {}
    keys |= {
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "patch_size": patch if isinstance(values.get("patch_size"), int) else [patch] * 2,
        "num_channels": config.in_channels,
        "image_size": rows if isinstance(size, int) and rows == columns else [rows, columns],
        "num_register_tokens": config.registers,
        "qkv_bias": config.qkv_bias,
    }
    if "use_swiglu_ffn" not in values:
        return keys | {"intermediate_size": config.hidden}
    # For DINOv2, whose SwiGLU rounds the hidden width.
    ratio = {"mlp_ratio": config.mlp_ratio} if config.mlp == "mlp" else {}
    return keys | {"use_swiglu_ffn": config.mlp != "mlp"} | ratio


def _recognise(state: Mapping[str, Tensor], hints: Hints, *, family: str) -> Recognised | None:
    """Recognise a model of the family in any key style; errors as the readers'."""
    found = next((found for reader in READERS if (found := reader(state, hints)) is not None), None)
    return found if found is not None and found.family == family else None


# Without and with a distillation token.
recognise_vit, recognise_deit = partial(_recognise, family="vit"), partial(_recognise, family="deit")
TIMM_ARGUMENTS = {
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
FAMILY = Family(
    name="vit",
    paper="arXiv 2010.11929",
    names={name: vit.parse_vit(name) for name in NAMES["vit"]},
    parse=vit.parse_vit,
    build=VisionTransformer,
    describe=describe,
    recognise=recognise_vit,
    resize=resize,
    preprocess=preprocess,
    hints=hints,
    architecture=ARCHITECTURE,
    settle=settle,
    model_types=frozenset(MODEL_TYPES),
    transformers_keys=transformers_keys,
    timm_arguments=TIMM_ARGUMENTS,
    tells_size=lambda config: config.positions != "none",
    repeated="depth",
)
DEIT_FAMILY = replace(
    FAMILY,
    name="deit",
    paper="arXiv 2012.12877",
    names={name: vit.parse_deit(name) for name in NAMES["deit"]},
    parse=vit.parse_deit,
    build=DistilledVisionTransformer,
    recognise=recognise_deit,
)
