"""Vision Transformer, written to be read as its specification.

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021 (arXiv 2010.11929), equations 1-4:

    z_0  = [x_class; x_1 E; ...; x_N E] + E_pos          patch embedding, class token, position embedding  (1)
    z'_l = MSA(LN(z_{l-1})) + z_{l-1}                    multi-head self-attention, pre-norm                (2)
    z_l  = MLP(LN(z'_l)) + z'_l                          two linears with GELU between                      (3)
    y    = LN(z_L)[0]                                    the class token, then a linear head                (4)

Axis names used in the comments: b batch, c input channels, n tokens, d width, h heads, e width per head.
Parameter names are those of timm's `vit_*` checkpoints, so such a state dict loads as it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class ViTConfig:
    """Shape of a Vision Transformer. Sizes in pixels, `image_size` as (height, width)."""

    image_size: tuple[int, int] = (224, 224)
    patch_size: int = 16
    in_channels: int = 3
    width: int = 768
    depth: int = 12
    heads: int = 12
    mlp_ratio: float = 4.0
    num_classes: int = 1000
    layer_norm_eps: float = 1e-6

    def __post_init__(self) -> None:
        height, width = self.image_size
        sizes = {"image": min(height, width), "patch": self.patch_size, "width": self.width, "depth": self.depth}
        sizes |= {"heads": self.heads, "channels": self.in_channels, "classes": self.num_classes}
        if min(sizes.values()) < 1:
            raise ValueError(f"sizes of 0: {', '.join(name for name, size in sizes.items() if size < 1)}")
        if height % self.patch_size or width % self.patch_size:
            raise ValueError(f"image size {height}x{width} is not divisible by the patch size {self.patch_size}")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")

    @property
    def num_patches(self) -> int:
        return (self.image_size[0] // self.patch_size) * (self.image_size[1] // self.patch_size)


class PatchEmbedding(nn.Module):
    """Non-overlapping patches, each projected to the model's width: a convolution whose stride is its kernel."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(config.in_channels, config.width, config.patch_size, stride=config.patch_size)

    def forward(self, image: Tensor) -> Tensor:
        return self.proj(image).flatten(2).transpose(1, 2)  # [b, c, H, W] -> [b, n, d]


class SelfAttention(nn.Module):
    """Multi-head self-attention: softmax(Q K^T / sqrt(e)) V, heads side by side, then one output linear."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # -1 only for the batch, the one axis that stays dynamic: every other size is a constant of the exported graph.
        _, tokens, width = x.shape
        qkv = self.qkv(x).reshape(-1, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = qkv.unbind(0)  # each [b, h, n, e]
        mixed = F.scaled_dot_product_attention(query, key, value)
        return self.proj(mixed.transpose(1, 2).reshape(-1, tokens, width))


class MLP(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class EncoderBlock(nn.Module):
    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.attn = SelfAttention(config.width, config.heads)
        self.norm2 = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.mlp = MLP(config.width, int(config.width * config.mlp_ratio))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """Image in, class logits out.

    Input: float32 [b, in_channels, height, width], normalised pixels. Output: float32 [b, num_classes], logits.
    """

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        self.config = config
        self.patch_embed = PatchEmbedding(config)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + config.num_patches, config.width))
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.depth))
        self.norm = nn.LayerNorm(config.width, eps=config.layer_norm_eps)
        self.head = nn.Linear(config.width, config.num_classes)
        self.initialise()

    def initialise(self) -> None:
        """Truncated normal of deviation 0.02 for weights and tokens, zero for biases (the paper's released code)."""
        for parameter in (self.cls_token, self.pos_embed):
            nn.init.trunc_normal_(parameter, std=0.02)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, image: Tensor) -> Tensor:
        patches = self.patch_embed(image)
        # Written as two sums and one concatenation so that no size of the batch enters the graph.
        class_token = (self.cls_token + self.pos_embed[:, :1]).expand(patches.shape[0], -1, -1)
        x = torch.cat([class_token, patches + self.pos_embed[:, 1:]], dim=1)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])
