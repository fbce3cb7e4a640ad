"""ToyMixer: depthwise convolutions mix the patches, 1x1 convolutions the channels. A family of another package."""

import re
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import nn

from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models.family import Family, Recognised, Signature
from vitdeploy.spec import PreprocessSpec, TensorSpec


@dataclass(frozen=True)
class ToyConfig:
    image_size: tuple[int, int] = (64, 64)
    patch_size: int = 8
    in_channels: int = 3
    width: int = 32
    depth: int = 2
    num_classes: int = 10

    def __post_init__(self):
        if any(side % self.patch_size for side in self.image_size):
            raise ValueError(f"{self.image_size} is not divisible by the patch size {self.patch_size}")


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(1, width), nn.GroupNorm(1, width)
        self.mix = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.mlp = nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))

    def forward(self, x):
        x = x + self.mix(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ToyMixer(nn.Module):
    """float32 [b, in_channels, height, width] -> logits [b, num_classes]."""

    def __init__(self, config):
        super().__init__()
        rows, columns = (side // config.patch_size for side in config.image_size)
        self.patches = nn.Conv2d(config.in_channels, config.width, config.patch_size, config.patch_size)
        self.positions = nn.Parameter(0.02 * torch.randn(1, config.width, rows, columns))
        self.blocks = nn.Sequential(*(Block(config.width) for _ in range(config.depth)))
        self.head = nn.Linear(config.width, config.num_classes)

    def forward(self, image):
        return self.head(self.blocks(self.patches(image) + self.positions).mean(dim=(2, 3)))


def parse(name):
    found = re.fullmatch(r"toymixer_w(\d+)d(\d+)_patch(\d+)_(\d+)", name)
    if found is None:
        return None
    width, depth, patch, side = map(int, found.groups())
    try:
        return ToyConfig((side, side), patch, width=width, depth=depth)
    except ValueError as error:
        raise UnknownModelError(f"{name!r} cannot be built", found=str(error)) from None


def describe(config):
    logits = TensorSpec("logits", "float32", ("batch", config.num_classes))
    return Signature("classification", config.image_size, config.in_channels, (logits,))


def recognise(state, hints):
    if not {"patches.weight", "positions", "blocks.0.mix.weight", "head.weight"} <= state.keys():
        return None
    width, channels, patch, _ = state["patches.weight"].shape
    rows, columns = state["positions"].shape[2:]
    depth = 1 + max(int(key.split(".")[1]) for key in state if key.startswith("blocks."))
    classes = len(state["head.weight"])
    config = ToyConfig((rows * patch, columns * patch), patch, channels, width, depth, classes)
    return Recognised("toymixer", "original", config, dict(state))


def resize(config, state, image_size):
    try:
        resized = replace(config, image_size=image_size)
    except ValueError as error:
        raise CheckpointError("ToyMixer does not take this image size", found=str(error)) from None
    grid = [side // config.patch_size for side in image_size]
    return resized, {**state, "positions": F.interpolate(state["positions"], grid, mode="bilinear")}


def preprocess(config):
    half = (0.5,) * config.in_channels
    return PreprocessSpec(config.image_size, config.image_size, "bilinear", half, half)


FAMILY = Family(
    name="toymixer",
    paper="arXiv 2105.01601",
    names={name: parse(name) for name in ("toymixer_w32d2_patch8_64", "toymixer_w64d4_patch8_64")},
    parse=parse,
    build=ToyMixer,
    describe=describe,
    recognise=recognise,
    resize=resize,
    preprocess=preprocess,
)
