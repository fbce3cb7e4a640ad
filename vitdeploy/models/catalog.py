"""Built-in architectures by name.

A name says everything but the number of classes and channels, which the checkpoint says:

    vit_<size>_patch<patch>_<image>             size: tiny, small, base, large, huge
    vit_w<width>d<depth>h<heads>_patch<patch>_<image>   any other

<image> is a side in pixels, or <height>x<width>.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from vitdeploy.errors import UnknownModelError
from vitdeploy.models.vit import ViTConfig

# width, depth, heads: table 1 of arXiv 2010.11929 (base, large, huge); DeiT (arXiv 2012.12877) for tiny and small.
SIZES = {
    "tiny": (192, 12, 3),
    "small": (384, 12, 6),
    "base": (768, 12, 12),
    "large": (1024, 24, 16),
    "huge": (1280, 32, 16),
}
COMMON_NAMES = (
    "vit_tiny_patch16_224",
    "vit_small_patch16_224",
    "vit_base_patch16_224",
    "vit_base_patch16_384",
    "vit_base_patch32_224",
    "vit_large_patch16_224",
    "vit_huge_patch14_224",
)
_NAME = re.compile(
    r"vit_(?:(?P<size>[a-z]+)|w(?P<width>\d+)d(?P<depth>\d+)h(?P<heads>\d+))"
    r"_patch(?P<patch>\d+)_(?P<height>\d+)(?:x(?P<image_width>\d+))?"
)


def config_for(name: str) -> ViTConfig:
    """The configuration that a name spells out, with 1,000 classes and 3 channels until a checkpoint says otherwise.

    Raises:
        UnknownModelError: the name is not of the form above, or its sizes contradict each other.
    """
    match = _NAME.fullmatch(name)
    if match is None or (match["size"] is not None and match["size"] not in SIZES):
        near = difflib.get_close_matches(name, COMMON_NAMES, n=3, cutoff=0.5)
        raise UnknownModelError(
            f"no built-in model is called {name!r}",
            found=name,
            wanted="vit_<tiny|small|base|large|huge>_patch<P>_<size>, or vit_w<width>d<depth>h<heads>_patch<P>_<size>",
            fix=f"did you mean {' or '.join(near)}?" if near else "for example vit_base_patch16_224",
        )
    if match["size"] is not None:
        width, depth, heads = SIZES[match["size"]]
    else:
        width, depth, heads = int(match["width"]), int(match["depth"]), int(match["heads"])
    height = int(match["height"])
    try:
        return ViTConfig(
            image_size=(height, int(match["image_width"] or height)),
            patch_size=int(match["patch"]),
            width=width,
            depth=depth,
            heads=heads,
        )
    except ValueError as error:
        raise UnknownModelError(f"{name!r} cannot be built", found=str(error)) from None


def adapt_to_checkpoint(config: ViTConfig, state: Mapping[str, Tensor]) -> ViTConfig:
    """The configuration with the number of classes and channels that the checkpoint's head and patch embedding have."""
    head, patches = state.get("head.weight"), state.get("patch_embed.proj.weight")
    classes = int(head.shape[0]) if head is not None and head.ndim == 2 else 0
    channels = int(patches.shape[1]) if patches is not None and patches.ndim == 4 else 0
    return replace(config, num_classes=classes or config.num_classes, in_channels=channels or config.in_channels)
