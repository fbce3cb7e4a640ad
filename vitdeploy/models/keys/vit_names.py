"""Names of Vision Transformers, as timm spells them, and the configuration that each spells out.

    vit_<size>_patch<P>_<image>[.mae|.dino]              plain; the tags are self-supervised encoders (features)
    vit_<size>_patch<P>_clip_[quickgelu_]<image>         CLIP's image tower, to its projection
    vit_<size>_patch<P>_siglip_[gap_]<image>             SigLIP's image tower (features); gap: averaged, not attended
    vit_<size>_patch<P>_[reg<R>_]dinov2                  DINOv2 at 518 (features), with R registers
    deit_<size>_patch<P>_<image>, deit3_...              DeiT without its distillation token, DeiT-III
    deit_<size>_distilled_patch<P>_<image>               DeiT with it

<size> is one of `SIZES` or w<width>d<depth>h<heads>; <image> is a side in pixels, or <height>x<width>.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from vitdeploy.errors import UnknownModelError
from vitdeploy.models.architectures.deit import DeiTConfig
from vitdeploy.models.architectures.vit import ViTConfig


class Size(NamedTuple):
    width: int
    depth: int
    heads: int
    mlp_ratio: float = 4.0


# DeiT (arXiv 2012.12877) for tiny and small; table 1 of arXiv 2010.11929 for base, large and huge; table 2 of arXiv
# 2106.04560 for giant and gigantic; arXiv 2305.13035 for so400m; SigLIP 2 (arXiv 2502.14786) for giantopt; timm for
# medium, which is DeiT-III's.
SIZES = {
    "tiny": Size(192, 12, 3),
    "small": Size(384, 12, 6),
    "medium": Size(512, 12, 8),
    "base": Size(768, 12, 12),
    "large": Size(1024, 24, 16),
    "so400m": Size(1152, 27, 16, 3.7362),
    "huge": Size(1280, 32, 16),
    "giant": Size(1408, 40, 16, 48 / 11),
    "giantopt": Size(1536, 40, 16),
    "gigantic": Size(1664, 48, 16, 64 / 13),
}
# DINOv2's giant (arXiv 2304.07193, table 17) is another; its SwiGLU has 8192 rows, both halves together.
DINOV2_GIANT = Size(1536, 40, 24, 16 / 3)
DINOV2_IMAGE = (518, 518)
# Dimensions that image and text share: table 20 of arXiv 2103.00020 (base, large), OpenCLIP's for the others.
CLIP_DIMENSIONS = {"medium": 512, "base": 512, "large": 768, "huge": 1024, "giant": 1024, "gigantic": 1280}
# timm runs these (size, patch) with exact GELU (large only below 512), though SigLIPs were trained with its tanh form.
SIGLIP_EXACT_GELU = {("base", 16), ("large", 16), ("so400m", 14)}
# SigLIP so400m/14 was trained at 384; its patches leave out the last 6 rows and columns.
SIGLIP_REMAINDER = ("so400m", 14, (384, 384))

_SIZE = r"(?P<size>[a-z]+[0-9]*m?|w(?P<width>\d+)d(?P<depth>\d+)h(?P<heads>\d+))"
_PATCH = r"_patch(?P<patch>\d+)"
_IMAGE = r"_(?P<height>\d+)(?:x(?P<image_width>\d+))?"
Maker = Callable[["re.Match[str]", dict[str, Any]], ViTConfig]


def _plain(found: re.Match[str], base: dict[str, Any]) -> ViTConfig:
    return ViTConfig(**base, num_classes=0, preset="imagenet") if found["tag"] else ViTConfig(**base)


def _clip(found: re.Match[str], base: dict[str, Any]) -> ViTConfig:
    return ViTConfig(
        **base,
        num_classes=CLIP_DIMENSIONS.get(found["size"], 512),
        layer_norm_eps=1e-5,
        stem_norm=True,
        activation="quick_gelu" if found["quick"] else "gelu",
        head="projection",
        preset="clip",
    )


def _siglip(found: re.Match[str], base: dict[str, Any]) -> ViTConfig:
    size, patch, image = found["size"], base["patch_size"], base["image_size"]
    exact = (size, patch) in SIGLIP_EXACT_GELU and (size, image) != ("large", (512, 512))
    return ViTConfig(
        **base,
        num_classes=0,
        drop_remainder=(size, patch, image) == SIGLIP_REMAINDER,
        class_token=False,
        activation="gelu" if exact else "gelu_tanh",
        pooling="average" if found["gap"] else "attention",
        preset="siglip",
    )


def _dinov2(found: re.Match[str], base: dict[str, Any]) -> ViTConfig:
    giant = found["size"] == "giant"
    size = dict(zip(Size._fields, DINOV2_GIANT, strict=True)) if giant else {}
    return ViTConfig(
        **base | size | {"image_size": DINOV2_IMAGE},
        num_classes=0,
        registers=int(found["registers"] or 0),
        prefix_positions=found["registers"] is None,
        mlp="swiglu_packed" if giant else "mlp",
        layer_scale=True,
        preset="imagenet",
    )


def _deit(found: re.Match[str], base: dict[str, Any]) -> ViTConfig:
    third = found["third"] is not None
    return ViTConfig(**base, layer_scale=third, prefix_positions=not third, preset="imagenet")


def _distilled(found: re.Match[str], base: dict[str, Any]) -> DeiTConfig:
    return DeiTConfig(**base)


VIT_PATTERNS: tuple[tuple[re.Pattern[str], Maker], ...] = (
    (re.compile(f"vit_{_SIZE}{_PATCH}{_IMAGE}" + r"(?:\.(?P<tag>mae|dino))?"), _plain),
    (re.compile(f"vit_{_SIZE}{_PATCH}_clip(?P<quick>_quickgelu)?{_IMAGE}"), _clip),
    (re.compile(f"vit_{_SIZE}{_PATCH}_siglip(?P<gap>_gap)?{_IMAGE}"), _siglip),
    (re.compile(f"vit_{_SIZE}{_PATCH}" + r"(?:_reg(?P<registers>\d+))?_dinov2"), _dinov2),
    (re.compile(f"deit(?P<third>3)?_{_SIZE}{_PATCH}{_IMAGE}"), _deit),
)
DEIT_PATTERNS: tuple[tuple[re.Pattern[str], Maker], ...] = (
    (re.compile(f"deit_{_SIZE}_distilled{_PATCH}{_IMAGE}"), _distilled),
)


def parse_vit(name: str) -> ViTConfig | None:
    """The configuration that a name of a ViT without distillation token spells out; None for any other name.

    Raises:
        UnknownModelError: the name's sizes contradict each other.
    """
    return _parse(name, VIT_PATTERNS)


def parse_deit(name: str) -> DeiTConfig | None:
    """The configuration that a name of a distilled DeiT spells out; None for any other name.

    Raises:
        UnknownModelError: the name's sizes contradict each other.
    """
    config = _parse(name, DEIT_PATTERNS)
    assert config is None or isinstance(config, DeiTConfig)
    return config


def _parse(name: str, patterns: tuple[tuple[re.Pattern[str], Maker], ...]) -> ViTConfig | None:
    for pattern, make in patterns:
        found = pattern.fullmatch(name)
        if found is None or (found["width"] is None and found["size"] not in SIZES):
            continue
        try:
            return make(found, _base(found))
        except ValueError as error:
            raise UnknownModelError(
                f"{name!r} cannot be built",
                found=str(error),
                wanted="an image size that the patch size divides, and a width that the heads divide",
                fix="change the numbers in the name; --image-size gives another size to a model with learned positions",
            ) from None
    return None


def _base(found: re.Match[str]) -> dict[str, Any]:
    """The fields of `ViTConfig` that every name spells out."""
    named = found.groupdict()
    if named["width"] is None:
        size = SIZES[named["size"]]
    else:
        size = Size(int(named["width"]), int(named["depth"]), int(named["heads"]))
    fields: dict[str, Any] = {"patch_size": int(named["patch"]), **size._asdict()}
    if "height" in named:
        height = int(named["height"])
        fields["image_size"] = (height, int(named["image_width"] or height))
    return fields
