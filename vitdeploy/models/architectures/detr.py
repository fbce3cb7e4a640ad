"""DETR, written to be read as its specification.

Source: Carion et al., "End-to-End Object Detection with Transformers", ECCV 2020 (arXiv 2005.12872), section 3.2 and
appendices A.2-A.4. A ResNet's last features, projected to the model's width, are the tokens of a transformer encoder. A
decoder turns a fixed set of learned object queries into as many objects, each with class logits and a box.

Both transformers are post-norm. Positions are added to the queries and keys of every attention, never to its values:
2-D sines for image tokens, the learned object queries for objects.

An image fills the model's input: there is no padding and so no attention mask.
Axis names used in the comments: b batch, n image tokens, q object queries, d width, h heads, e width per head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdeploy.models.architectures.resnet import ResNet, ResNetConfig

MIN_SIDE = 32  # pixels of the image for one token, without dilation; no larger size needs to be a multiple of anything


@dataclass(frozen=True)
class DETRConfig:
    """Shape of a DETR. `image_size` is (height, width) in pixels, any from 32 on.

    `num_classes` leaves out "no object", for which the class logits have one more column, the last. `panoptic`: with
    the mask head of `detr_masks`.
    """

    image_size: tuple[int, int] = (800, 800)
    backbone: ResNetConfig = field(default_factory=ResNetConfig)
    width: int = 256
    heads: int = 8
    encoder_layers: int = 6
    decoder_layers: int = 6
    hidden: int = 2048
    queries: int = 100
    num_classes: int = 91
    panoptic: bool = False

    def __post_init__(self) -> None:
        sizes = {"width": self.width, "heads": self.heads, "hidden": self.hidden}
        sizes |= {"encoder layers": self.encoder_layers, "decoder layers": self.decoder_layers}
        sizes |= {"queries": self.queries, "classes": self.num_classes}
        if min(sizes.values()) < 1:
            raise ValueError(f"sizes of 0: {', '.join(name for name, size in sizes.items() if size < 1)}")
        if min(self.image_size) < MIN_SIDE:
            raise ValueError(f"image size {self.image_size[0]}x{self.image_size[1]} has a side below {MIN_SIDE} pixels")
        if self.width % self.heads:
            raise ValueError(f"width {self.width} is not divisible by {self.heads} heads")
        if self.width % 4:
            raise ValueError(f"width {self.width} is not divisible by 4 (sine and cosine of two axes)")
        if self.panoptic and any(size < 1 or size % min(8, size) for size in self.mask_widths):
            raise ValueError(f"the mask head's widths {self.mask_widths} cannot be divided into 8 groups")

    @property
    def feature_size(self) -> tuple[int, int]:
        """Height and width of the backbone's last features: the image tokens."""
        return self.size_at(3)

    @property
    def mask_size(self) -> tuple[int, int]:
        """Height and width of a mask: a quarter of the image's."""
        return self.size_at(0)

    def size_at(self, stage: int) -> tuple[int, int]:
        """Height and width of the features of a stage, 0 to 3."""
        stride = self.backbone.strides[stage]
        return -(-self.image_size[0] // stride), -(-self.image_size[1] // stride)

    @property
    def mask_widths(self) -> tuple[int, ...]:
        """Channels after each of the mask head's five normalised convolutions."""
        return (self.width + self.heads, *(self.width // 2**i for i in range(1, 5)))


def sine_positions(height: int, width: int, channels: int) -> Tensor:
    """float64 [1, height * width, channels]: sines and cosines of y in the first half of the channels, then of x.

    Coordinates are 1 to size, scaled to end at 2 pi; frequencies as in arXiv 1706.03762, section 3.5. The small number
    in the scaling is the released code's.
    """
    half = channels // 2
    frequency = 10000.0 ** -(torch.arange(0, half, 2, dtype=torch.float64, device="cpu") / half)
    axes = []
    for size in (height, width):
        position = torch.arange(1, size + 1, dtype=torch.float64, device="cpu") / (size + 1e-6) * (2 * math.pi)
        angle = position[:, None] * frequency
        axes.append(torch.stack([angle.sin(), angle.cos()], dim=2).flatten(1))  # [size, half]: sine, cosine, sine ...
    y = axes[0][:, None].expand(-1, width, -1)
    x = axes[1][None].expand(height, -1, -1)
    return torch.cat([y, x], dim=2).reshape(1, height * width, channels)


class Attention(nn.Module):
    """Multi-head attention: softmax(Q K^T / sqrt(e)) V, heads side by side, then one output linear."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        _, tokens, width = query.shape
        mixed = F.scaled_dot_product_attention(
            self._split(self.query(query)), self._split(self.key(key)), self._split(self.value(value))
        )
        # -1 only for the batch, the one axis that stays dynamic: every other size is a constant of the exported graph.
        return self.out(mixed.transpose(1, 2).reshape(-1, tokens, width))

    def _split(self, x: Tensor) -> Tensor:
        _, tokens, width = x.shape
        return x.reshape(-1, tokens, self.heads, width // self.heads).transpose(1, 2)  # [b, h, tokens, e]


class FeedForward(nn.Module):
    def __init__(self, config: DETRConfig) -> None:
        super().__init__()
        self.fc1 = nn.Linear(config.width, config.hidden)
        self.fc2 = nn.Linear(config.hidden, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.relu(self.fc1(x)))


class EncoderLayer(nn.Module):
    def __init__(self, config: DETRConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config.width, config.heads)
        self.norm1 = nn.LayerNorm(config.width)
        self.mlp = FeedForward(config)
        self.norm2 = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        placed = x + positions
        x = self.norm1(x + self.self_attn(placed, placed, x))
        return self.norm2(x + self.mlp(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: DETRConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config.width, config.heads)
        self.norm1 = nn.LayerNorm(config.width)
        self.cross_attn = Attention(config.width, config.heads)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = FeedForward(config)
        self.norm3 = nn.LayerNorm(config.width)

    def forward(self, x: Tensor, queries: Tensor, memory: Tensor, placed_memory: Tensor) -> Tensor:
        placed = x + queries
        x = self.norm1(x + self.self_attn(placed, placed, x))
        x = self.norm2(x + self.cross_attn(x + queries, placed_memory, memory))
        return self.norm3(x + self.mlp(x))


class BoxHead(nn.Module):
    """Three linears with ReLU between, and a sigmoid: centre x, centre y, width, height, relative to the image."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, outputs) for outputs in (width, width, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.layers[0](x))
        x = F.relu(self.layers[1](x))
        return self.layers[2](x).sigmoid()


@dataclass
class Decoded:
    """Inputs of the heads: the backbone's `features` by stage, the last of them `projected` to [b, d, height, width],
    the encoder's `memory` [b, n, d] and the decoder's `objects` [b, q, d]."""

    features: list[Tensor]
    projected: Tensor
    memory: Tensor
    objects: Tensor


class DETR(nn.Module):
    """Image in, objects out.

    Input: float32 [b, 3, height, width], normalised pixels. Output: logits [b, q, num_classes + 1], whose last column
    is "no object", and boxes [b, q, 4], centre x, centre y, width, height in 0..1.
    """

    def __init__(self, config: DETRConfig) -> None:
        super().__init__()
        self.config = config
        self.backbone = ResNet(config.backbone)
        self.input_proj = nn.Conv2d(config.backbone.widths[3], config.width, 1)
        self.encoder = nn.ModuleList(EncoderLayer(config) for _ in range(config.encoder_layers))
        self.query_embed = nn.Parameter(torch.empty(config.queries, config.width))
        self.decoder = nn.ModuleList(DecoderLayer(config) for _ in range(config.decoder_layers))
        self.decoder_norm = nn.LayerNorm(config.width)
        self.class_embed = nn.Linear(config.width, config.num_classes + 1)
        self.box_embed = BoxHead(config.width)
        # A function of the image size alone. Not a buffer: a model built without memory and filled from a checkpoint
        # would lose it.
        self.positions = sine_positions(*config.feature_size, config.width)
        self.initialise()

    def initialise(self) -> None:
        """Initialise as the released code does: Glorot uniform for the transformer (query, key and value as one
        matrix), zero for the attentions' biases, standard normal for the queries, PyTorch's defaults elsewhere."""
        nn.init.normal_(self.query_embed)
        for module in (*self.encoder.modules(), *self.decoder.modules()):
            if isinstance(module, FeedForward):
                nn.init.xavier_uniform_(module.fc1.weight)
                nn.init.xavier_uniform_(module.fc2.weight)
            elif isinstance(module, Attention):
                for linear in (module.query, module.key, module.value):
                    nn.init.xavier_uniform_(linear.weight, gain=2**-0.5)
                nn.init.xavier_uniform_(module.out.weight)
                for linear in (module.query, module.key, module.value, module.out):
                    nn.init.zeros_(linear.bias)

    def decode(self, image: Tensor) -> Decoded:
        features = self.backbone(image)
        projected = self.input_proj(features[-1])
        memory = projected.flatten(2).transpose(1, 2)
        positions = self.positions.to(memory)
        for layer in self.encoder:
            memory = layer(memory, positions)
        placed_memory = memory + positions
        # The decoder starts from zeros, the same for every image: its first self-attention sees parameters only, is
        # computed for a batch of one (a constant of the exported graph), and the first cross-attention broadcasts it.
        queries = self.query_embed[None]
        objects = torch.zeros_like(queries)
        for layer in self.decoder:
            objects = layer(objects, queries, memory, placed_memory)
        return Decoded(features, projected, memory, self.decoder_norm(objects))

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        objects = self.decode(image).objects
        return self.class_embed(objects), self.box_embed(objects)
