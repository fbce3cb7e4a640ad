"""DETR's panoptic head: one mask for every object query.

Source: Carion et al., arXiv 2005.12872, section 4.4 and figure 8. Every object attends to the encoder's output, and the
attention maps of its heads, concatenated to the projected features, go through a small convolutional network that
upsamples them thrice, each time adding the backbone's features of that resolution.

What does not depend on the object is computed once for an image and broadcast: the first convolution is linear, so that
of a concatenation is the sum of two (here `from_features` and `from_attention`, whose weights are the two parts of the
published ones). For 100 objects that takes away most of the head's work.
Axis names: b batch, q object queries, n image tokens, d width, h heads, e width per head, c channels.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdeploy.models.architectures.detr import DETR, DETRConfig


class AttentionMaps(nn.Module):
    """softmax(Q K^T / sqrt(e)) over all heads and all image tokens together: an object's maps sum to 1."""

    def __init__(self, config: DETRConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        for linear in (self.query, self.key):
            nn.init.xavier_uniform_(linear.weight)
            nn.init.zeros_(linear.bias)

    def forward(self, objects: Tensor, memory: Tensor) -> Tensor:
        """[b, q, h * n] of objects [b, q, d] and memory [b, n, d]."""
        (_, count, width), tokens = objects.shape, memory.shape[1]
        each = width // self.heads
        query = self.query(objects).reshape(-1, count, self.heads, each).transpose(1, 2)
        key = self.key(memory).reshape(-1, tokens, self.heads, each).permute(0, 2, 3, 1)
        scores = (query * each**-0.5) @ key  # [b, h, q, n]
        return scores.transpose(1, 2).reshape(-1, count, self.heads * tokens).softmax(-1)


class GroupNorm(nn.Module):
    """Group norm (arXiv 1803.08494) with 8 groups, or one per channel if there are fewer.

    Written as instance norm of the groups, with every size but the batch a constant of the exported graph.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.groups = min(8, channels)
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        _, channels, height, width = x.shape
        normalised = F.instance_norm(x.reshape(-1, self.groups, channels // self.groups * height * width))
        x = normalised.reshape(-1, channels, height, width)
        return x * self.weight.reshape(-1, 1, 1) + self.bias.reshape(-1, 1, 1)


class Upsample(nn.Module):
    """Nearest-neighbour upsampling to the next features, which are added; then convolution, group norm, ReLU."""

    def __init__(self, features: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.adapter = nn.Conv2d(features, inputs, 1)
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm = GroupNorm(outputs)

    def forward(self, x: Tensor, features: Tensor, count: int) -> Tensor:
        """[b * q, outputs, height, width] of x [b * q, inputs, ...] and features [b, c, height, width], q = `count`."""
        height, width = features.shape[2:]
        if x.shape[2:] != features.shape[2:]:
            # A halved size was rounded up: doubled, it has at most one row or column too many.
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")[:, :, :height, :width]
        x = x.reshape(-1, count, x.shape[1], height, width) + self.adapter(features)[:, None]
        return F.relu(self.norm(self.conv(x.reshape(-1, *x.shape[2:]))))


class MaskHead(nn.Module):
    def __init__(self, config: DETRConfig) -> None:
        super().__init__()
        first, *widths = config.mask_widths
        self.from_features = nn.Conv2d(config.width, first, 3, padding=1)
        self.from_attention = nn.Conv2d(config.heads, first, 3, padding=1, bias=False)
        self.norm1 = GroupNorm(first)
        self.conv2 = nn.Conv2d(first, widths[0], 3, padding=1)
        self.norm2 = GroupNorm(widths[0])
        channels = reversed(config.backbone.widths[:3])
        self.upsamples = nn.ModuleList(map(Upsample, channels, widths, widths[1:]))
        self.out = nn.Conv2d(widths[3], 1, 3, padding=1)
        self.initialise(first)

    def initialise(self, fan_in: int) -> None:
        """Kaiming uniform with a = 1 and zero biases, as the released code; the first convolution as the one it is."""
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_uniform_(module.weight, a=1)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        bound = (3 / (9 * fan_in)) ** 0.5
        nn.init.uniform_(self.from_features.weight, -bound, bound)
        nn.init.uniform_(self.from_attention.weight, -bound, bound)

    def forward(self, projected: Tensor, maps: Tensor, features: list[Tensor]) -> Tensor:
        """Mask logits [b, q, H / 4, W / 4] of projected [b, d, height, width], maps [b, q, h * n] and all features."""
        count, (height, width) = maps.shape[1], projected.shape[2:]
        attention = self.from_attention(maps.reshape(-1, self.from_attention.in_channels, height, width))
        shared = self.from_features(projected)
        x = attention.reshape(-1, count, attention.shape[1], height, width) + shared[:, None]
        x = F.relu(self.norm1(x.reshape(-1, *x.shape[2:])))
        x = F.relu(self.norm2(self.conv2(x)))
        for upsample, level in zip(self.upsamples, reversed(features[:3]), strict=True):
            x = upsample(x, level, count)
        return self.out(x).reshape(-1, count, *features[0].shape[2:])


class DETRPanoptic(DETR):
    """Image in, objects with masks out: as DETR, and masks [b, q, ceil(height / 4), ceil(width / 4)], logits."""

    def __init__(self, config: DETRConfig) -> None:
        super().__init__(config)
        self.mask_attention = AttentionMaps(config)
        self.mask_head = MaskHead(config)

    def forward(self, image: Tensor) -> tuple[Tensor, ...]:
        decoded = self.decode(image)
        maps = self.mask_attention(decoded.objects, decoded.memory)
        masks = self.mask_head(decoded.projected, maps, decoded.features)
        return self.class_embed(decoded.objects), self.box_embed(decoded.objects), masks
