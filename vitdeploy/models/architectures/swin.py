"""Swin Transformer.

Source: Liu et al., "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows", ICCV 2021
(arXiv 2103.14030). Section 3.1: patches of 4x4 pixels, stages of blocks, between stages a patch merging that halves the
resolution and doubles the width. Section 3.2, equations 3 and 4, two successive blocks, with regular and with shifted
windows:

    z'_l     = W-MSA(LN(z_{l-1})) + z_{l-1}         z_l     = MLP(LN(z'_l)) + z'_l
    z'_{l+1} = SW-MSA(LN(z_l)) + z_l                z_{l+1} = MLP(LN(z'_{l+1})) + z'_{l+1}
    Attention(Q, K, V) = softmax(Q K^T / sqrt(e) + B) V         inside each window, B: relative position bias

The paper does not cover a resolution that the window does not divide, and implementations differ there; otherwise all
compute the same function. `SwinConfig.border` selects the implementation:

                    larger window than resolution   resolution equal to the window     resolution not a multiple
    "timm"          window shrinks, each axis       this axis is not shifted           shifts, then pads
    "torchvision"   padded to the window            this axis is not shifted           pads, then shifts
    "transformers"  (fails)                         neither axis is shifted            pads, then shifts

Axis names in comments: b batch, n tokens, d width, h heads, e width per head, w windows of an image. Parameter names
are those of timm's (1.0) `swin_*` checkpoints, so that such a state dict loads unchanged.
"""

import math
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdeploy.models.architectures.layers import MLP, PatchEmbedding

Border: TypeAlias = Literal["timm", "torchvision", "transformers"]

# Added to the scores of tokens that are not neighbours in the image: the value in the paper's released code.
MASKED = -100.0


@dataclass(frozen=True)
class _StageShape:
    """Geometry of one stage: `resolution`, `window` and `shift` (of its odd blocks) in tokens, (height, width)."""

    width: int
    depth: int
    heads: int
    resolution: tuple[int, int]
    window: tuple[int, int]
    shift: tuple[int, int]

    @property
    def padded(self) -> tuple[int, int]:
        """The resolution, rounded up to whole windows."""
        (height, width), (rows, columns) = self.resolution, self.window
        return -(-height // rows) * rows, -(-width // columns) * columns


@dataclass(frozen=True)
class SwinConfig:
    """Configuration of a Swin Transformer. Sizes in pixels, `image_size` as (height, width).

    `width` is that of the first stage. `depths` (blocks), `heads` and `windows` (side in tokens, before any shrinking)
    have one entry per stage. `num_classes` 0: a feature extractor. `border`: see the module docstring.
    """

    image_size: tuple[int, int] = (224, 224)
    patch_size: int = 4
    in_channels: int = 3
    width: int = 96
    depths: tuple[int, ...] = (2, 2, 6, 2)
    heads: tuple[int, ...] = (3, 6, 12, 24)
    windows: tuple[int, ...] = (7, 7, 7, 7)
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    patch_norm: bool = True
    qkv_bias: bool = True
    border: Border = "timm"

    def __post_init__(self) -> None:
        height, width = self.image_size
        per_stage = {"depths": self.depths, "heads": self.heads, "windows": self.windows}
        if len({len(values) for values in per_stage.values()}) != 1 or not self.depths:
            counts = ", ".join(f"{len(values)} {name}" for name, values in per_stage.items())
            raise ValueError(f"the stages do not match: {counts}")
        sizes = {"image": min(height, width), "patch": self.patch_size, "width": self.width}
        sizes |= {"channels": self.in_channels} | {name: min(values) for name, values in per_stage.items()}
        if min(sizes.values()) < 1:
            raise ValueError(f"sizes of 0: {', '.join(name for name, size in sizes.items() if size < 1)}")
        if self.num_classes < 0:
            raise ValueError(f"the number of classes is {self.num_classes}")
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(
                f"image size {height}x{width} is not divisible by the patch size {self.patch_size}; "
                f"use a multiple of {self.patch_size}; multiples of {self.whole_windows} need no padding"
            )
        for stage in self.stages:
            if stage.width % stage.heads:
                raise ValueError(f"width {stage.width} is not divisible by {stage.heads} heads")
            if self.border == "transformers" and min(stage.resolution) < min(stage.window):
                raise ValueError(
                    f"image size {height}x{width} is too small: a stage has {stage.resolution[0]}x"
                    f"{stage.resolution[1]} tokens and windows of {stage.window[0]}x{stage.window[1]}, which the "
                    f"transformers library cannot compute; use a multiple of {self.whole_windows}"
                )

    @property
    def whole_windows(self) -> int:
        """The number of pixels whose multiples give whole windows in all stages."""
        return math.lcm(*(2**i * self.patch_size * side for i, side in enumerate(self.windows)))

    @property
    def stages(self) -> tuple[_StageShape, ...]:
        stages = []
        rows, columns = self.image_size[0] // self.patch_size, self.image_size[1] // self.patch_size
        for i, (depth, heads, side) in enumerate(zip(self.depths, self.heads, self.windows, strict=True)):
            window = (min(side, rows), min(side, columns)) if self.border == "timm" else (side, side)
            shift = (0 if rows <= side else side // 2, 0 if columns <= side else side // 2)
            if self.border == "transformers" and min(rows, columns) <= side:
                shift = (0, 0)
            stages.append(_StageShape(2**i * self.width, depth, heads, (rows, columns), window, shift))
            rows, columns = -(-rows // 2), -(-columns // 2)
        return tuple(stages)

    @property
    def window_sizes(self) -> tuple[tuple[int, int], ...]:
        """Windows (height, width) of the stages, after any shrinking."""
        return tuple(stage.window for stage in self.stages)

    @property
    def features(self) -> int:
        """Width of the last stage."""
        return self.stages[-1].width


def relative_position_index(window: tuple[int, int]) -> npt.NDArray[np.int64]:
    """Return [n, n]: the row of the bias table for each pair of tokens (query, key) of a window.

    Relative positions run from 1 - side to side - 1 along each axis; the table has them in row-major order.
    """
    row, column = np.indices(window).reshape(2, -1)
    down = row[:, None] - row[None, :] + window[0] - 1
    right = column[:, None] - column[None, :] + window[1] - 1
    return np.asarray(down * (2 * window[1] - 1) + right)


def shift_mask(stage: _StageShape) -> npt.NDArray[np.float32]:
    """Return [w, n, n]: 0 for token pairs of the same region, MASKED for pairs that the cyclic shift brought together.

    Section 3.2, figure 4: along each shifted axis the regions are all but the last window, and its two parts.
    """

    def regions(size: int, window: int, shift: int) -> npt.NDArray[np.int64]:
        position = np.arange(size)
        if not shift:
            return np.zeros_like(position)
        return (position >= size - window).astype(np.int64) + (position >= size - shift)

    (height, width), (rows, columns), (down, right) = stage.padded, stage.window, stage.shift
    region = 3 * regions(height, rows, down)[:, None] + regions(width, columns, right)
    region = region.reshape(height // rows, rows, width // columns, columns).swapaxes(1, 2).reshape(-1, rows * columns)
    return np.where(region[:, :, None] == region[:, None, :], 0, MASKED).astype(np.float32)


class _NormedPatches(PatchEmbedding):
    """Non-overlapping patches, each projected to the model's width and normalised (section 3.1)."""

    def __init__(self, config: SwinConfig) -> None:
        super().__init__(config.in_channels, config.width, config.patch_size)
        self.norm = nn.LayerNorm(config.width) if config.patch_norm else nn.Identity()

    def forward(self, image: Tensor) -> Tensor:
        return self.norm(super().forward(image))


class _PatchMerging(nn.Module):
    """2x2 neighbours concatenated, normalised and projected to twice the width (section 3.1)."""

    def __init__(self, width: int, resolution: tuple[int, int]) -> None:
        super().__init__()
        self.resolution = resolution
        self.norm = nn.LayerNorm(4 * width)
        self.reduction = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        height, width = self.resolution
        depth = x.shape[-1]
        if height % 2 or width % 2:
            x = F.pad(x.reshape(-1, height, width, depth), (0, 0, 0, width % 2, 0, height % 2))
        rows, columns = -(-height // 2), -(-width // 2)
        # The four neighbours in the order (0, 0), (1, 0), (0, 1), (1, 1) of (row, column).
        x = x.reshape(-1, 2, columns, 2, depth).permute(0, 2, 3, 1, 4).reshape(-1, rows * columns, 4 * depth)
        return self.reduction(self.norm(x))


class WindowAttention(nn.Module):
    """Multi-head self-attention inside windows, with relative position bias: [b * w, n, d] -> [b * w, n, d].

    Bias and mask depend only on weights, so they become one constant of the exported graph. Index and mask are numpy
    arrays, not buffers: a model is built on the meta device before its weights are loaded, where buffers that are not
    in the checkpoint would lose their values.
    """

    def __init__(self, stage: _StageShape, config: SwinConfig, shifted: bool) -> None:
        super().__init__()
        self.heads = stage.heads
        self.index = relative_position_index(stage.window)
        self.mask = shift_mask(stage) if shifted else None
        self.relative_position_bias_table = nn.Parameter(
            torch.zeros((2 * stage.window[0] - 1) * (2 * stage.window[1] - 1), stage.heads)
        )
        self.qkv = nn.Linear(stage.width, 3 * stage.width, bias=config.qkv_bias)
        self.proj = nn.Linear(stage.width, stage.width)

    def bias(self) -> Tensor:
        """Return the bias of the scores: [1, h, n, n] for all windows, or [1, w * h, n, n] if masked."""
        bias = self.relative_position_bias_table[torch.from_numpy(self.index)].permute(2, 0, 1)
        if self.mask is None:
            return bias[None]
        return (bias + torch.from_numpy(self.mask).to(bias)[:, None]).flatten(0, 1)[None]

    def forward(self, x: Tensor) -> Tensor:
        _, tokens, width = x.shape
        head = width // self.heads
        qkv = self.qkv(x).reshape(-1, tokens, 3, self.heads, head).permute(2, 0, 3, 1, 4)
        if self.mask is not None:  # windows become heads, so that each has its own bias at rank 4
            qkv = qkv.reshape(3, -1, len(self.mask) * self.heads, tokens, head)
        query, key, value = qkv.unbind(0)  # each [b * w, h, n, e], or [b, w * h, n, e]
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=self.bias())
        mixed = mixed.reshape(-1, self.heads, tokens, head)
        return self.proj(mixed.transpose(1, 2).reshape(-1, tokens, width))


class _SwinBlock(nn.Module):
    """Attention in windows, regular or shifted, then the MLP: [b, n, d] -> [b, n, d]."""

    def __init__(self, stage: _StageShape, config: SwinConfig, shifted: bool) -> None:
        super().__init__()
        self.stage = stage
        self.shift = stage.shift if shifted else (0, 0)
        self.shifts_first = config.border == "timm"
        self.norm1 = nn.LayerNorm(stage.width)
        self.attn = WindowAttention(stage, config, any(self.shift))
        self.norm2 = nn.LayerNorm(stage.width)
        # Round down, except if only a rounding error keeps the product below an integer.
        self.mlp = MLP(stage.width, int(stage.width * config.mlp_ratio + 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))

    def attend(self, x: Tensor) -> Tensor:
        height, width = self.stage.resolution
        x = x.reshape(-1, height, width, self.stage.width)
        x = self.pad(self.roll(x, -1)) if self.shifts_first else self.roll(self.pad(x), -1)
        x = from_windows(self.attn(to_windows(x, self.stage.window)), self.stage.padded, self.stage.window)
        x = self.roll(self.crop(x), 1) if self.shifts_first else self.crop(self.roll(x, 1))
        return x.reshape(-1, height * width, self.stage.width)

    def roll(self, x: Tensor, direction: int) -> Tensor:
        for axis, shift in enumerate(self.shift, start=1):
            x = x.roll(direction * shift, axis) if shift else x
        return x

    def pad(self, x: Tensor) -> Tensor:
        (height, width), (padded_height, padded_width) = self.stage.resolution, self.stage.padded
        padding = (0, 0, 0, padded_width - width, 0, padded_height - height)
        return F.pad(x, padding) if any(padding) else x

    def crop(self, x: Tensor) -> Tensor:
        height, width = self.stage.resolution
        return x[:, :height, :width] if self.stage.padded != self.stage.resolution else x


def to_windows(x: Tensor, window: tuple[int, int]) -> Tensor:
    """[b, height, width, d] -> [b * w, n, d], with at most four axes at each step."""
    _, height, width, depth = x.shape
    rows, columns = window
    if (height, width) != window:
        x = x.reshape(-1, rows, width // columns, columns * depth).transpose(1, 2)
    return x.reshape(-1, rows * columns, depth)


def from_windows(x: Tensor, size: tuple[int, int], window: tuple[int, int]) -> Tensor:
    """[b * w, n, d] -> [b, height, width, d]: the inverse of `to_windows`."""
    (height, width), (rows, columns) = size, window
    depth = x.shape[-1]
    if size != window:
        x = x.reshape(-1, width // columns, rows, columns * depth).transpose(1, 2)
    return x.reshape(-1, height, width, depth)


class _SwinStage(nn.Module):
    """Patch merging, except in the first stage, then the blocks: [b, n, d] -> [b, n / 4, 2 d] or [b, n, d]."""

    def __init__(self, stage: _StageShape, before: _StageShape | None, config: SwinConfig) -> None:
        super().__init__()
        self.downsample = _PatchMerging(before.width, before.resolution) if before else nn.Identity()
        self.blocks = nn.Sequential(*(_SwinBlock(stage, config, shifted=i % 2 == 1) for i in range(stage.depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class SwinTransformer(nn.Module):
    """Swin Transformer: image in, class logits or features out.

    Input: float32 [b, in_channels, height, width], normalised pixels. Output: float32 [b, num_classes], logits; with
    `num_classes` 0 the average [b, d] of the normalised tokens of the last stage, and these tokens [b, n, d].
    """

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.config = config
        stages = config.stages
        self.patch_embed = _NormedPatches(config)
        self.layers = nn.Sequential(
            *(_SwinStage(stage, before, config) for stage, before in zip(stages, (None, *stages), strict=False))
        )
        self.norm = nn.LayerNorm(config.features)
        self.head: nn.Module | None = None
        if config.num_classes:
            self.head = nn.Sequential(OrderedDict[str, nn.Module](fc=nn.Linear(config.features, config.num_classes)))
        self.initialise()

    def initialise(self) -> None:
        """Linear layers and bias tables: truncated normal with std 0.02; biases zero (the paper's released code)."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, WindowAttention):
                nn.init.trunc_normal_(module.relative_position_bias_table, std=0.02)

    def encode(self, image: Tensor) -> Tensor:
        """Return the normalised tokens of the last stage: [b, n, d]."""
        return self.norm(self.layers(self.patch_embed(image)))

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        tokens = self.encode(image)
        pooled = tokens.mean(dim=1)
        return (pooled, tokens) if self.head is None else self.head(pooled)
