"""The catalog's rows for Vision Transformers: "vit", all variants of `ViTConfig`, and "deit", with distillation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models.config_files import IMAGENET_MEAN, IMAGENET_STD, timm_preprocess
from vitdeploy.models.deit import DistilledVisionTransformer
from vitdeploy.models.family import Family, Hints, Recognised, Signature
from vitdeploy.models.keys import vit_jax, vit_timm, vit_torchvision, vit_transformers
from vitdeploy.models.positions import resize_positions
from vitdeploy.models.vit import Preset, VisionTransformer, ViTConfig
from vitdeploy.models.vit_names import DEIT_NAMES, VIT_NAMES, parse_deit, parse_vit
from vitdeploy.spec import PreprocessSpec, TensorSpec

HALF = (0.5, 0.5, 0.5)
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
# Mean, deviation and the share of the resized image that the crop keeps, below 384 pixels and from there on. From the
# default configurations of timm 1.0.31.
PRESETS: Mapping[Preset, tuple[tuple[float, ...], tuple[float, ...], float, float]] = {
    "augreg": (HALF, HALF, 0.9, 1.0),
    "imagenet": (IMAGENET_MEAN, IMAGENET_STD, 0.9, 1.0),
    "clip": (CLIP_MEAN, CLIP_STD, 1.0, 1.0),
    "siglip": (HALF, HALF, 0.9, 0.9),
}
LARGE = 384
READERS = (vit_timm.recognise, vit_transformers.recognise, vit_torchvision.recognise, vit_jax.recognise)
Config = TypeVar("Config", bound=ViTConfig)


def describe(config: ViTConfig) -> Signature:
    """Logits of a classifier; the embedding of a projection; of a model without head, pooled and patch features."""
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
    """Config and state for images of `image_size` (height, width): only the position table changes, as the config says.

    A table that followed a formula is then one of values, "learned".

    Raises:
        CheckpointError: the patch size does not divide the image size; says which sizes near it would do.
    """
    try:
        resized = replace(config, image_size=image_size)
    except ValueError as error:
        near = [sorted({max(1, side // config.patch_size), -(-side // config.patch_size)}) for side in image_size]
        sizes = [f"{rows * config.patch_size}x{columns * config.patch_size}" for rows in near[0] for columns in near[1]]
        raise CheckpointError(
            "the model cannot take this image size",
            found=str(error),
            wanted=f"multiples of {config.patch_size}, for example {', '.join(sizes)}",
            fix="--image-size HEIGHTxWIDTH",
        ) from None
    if resized.grid == config.grid or config.positions == "none":
        return resized, dict(state)
    old, new, prefix = config.grid, resized.grid, config.positioned_prefix
    table = resize_positions(state["pos_embed"], old, new, prefix, config.position_resampling)
    return replace(resized, positions="learned"), {**state, "pos_embed": table}


def preprocess(config: ViTConfig) -> PreprocessSpec:
    """What models of the config's `preset` are evaluated with in timm: bicubic, short side resized, centre crop.

    Raises:
        CheckpointError: the patch embedding has neither 1 nor 3 channels, so no image fits it.
    """
    if config.in_channels not in (1, 3):
        raise CheckpointError(
            "the model does not take images", found=f"{config.in_channels} input channels", wanted="1 (grey) or 3 (RGB)"
        )
    mean, std, small, large = PRESETS[config.preset]
    share = small if min(config.image_size) < LARGE else large
    return timm_preprocess({"mean": mean, "std": std, "crop_pct": share}, config.in_channels, config.image_size)


def recognise_vit(state: Mapping[str, Tensor], hints: Hints) -> Recognised | None:
    """A ViT without distillation token in any key style; errors as the readers'."""
    return _read(state, hints, "vit")


def recognise_deit(state: Mapping[str, Tensor], hints: Hints) -> Recognised | None:
    """A DeiT with distillation token in any key style; errors as the readers'."""
    return _read(state, hints, "deit")


def _read(state: Mapping[str, Tensor], hints: Hints, family: str) -> Recognised | None:
    found = next((found for reader in READERS if (found := reader(state, hints)) is not None), None)
    return found if found is not None and found.family == family else None


FAMILY = Family(
    name="vit",
    paper="arXiv 2010.11929",
    names={name: parse_vit(name) for name in VIT_NAMES},
    parse=parse_vit,
    build=VisionTransformer,
    describe=describe,
    recognise=recognise_vit,
    resize=resize,
    preprocess=preprocess,
)
DEIT_FAMILY = Family(
    name="deit",
    paper="arXiv 2012.12877",
    names={name: parse_deit(name) for name in DEIT_NAMES},
    parse=parse_deit,
    build=DistilledVisionTransformer,
    describe=describe,
    recognise=recognise_deit,
    resize=resize,
    preprocess=preprocess,
)
