"""DeiT with its distillation token.

Source: Touvron et al., "Training data-efficient image transformers & distillation through attention", ICML 2021 (arXiv
2012.12877), section 4: a second learned token, after the class token, which a second linear head reads. It was trained
on a teacher's answers as the class token was on the labels; at inference the two heads' outputs are averaged.

A DeiT without that token is a plain ViT, and DeiT-III is one with LayerScale: see vit.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vitdeploy.models.architectures.vit import Preset, VisionTransformer, ViTConfig, linear_head


@dataclass(frozen=True)
class DeiTConfig(ViTConfig):
    """A `ViTConfig` whose tokens are class token, distillation token, patches."""

    preset: Preset = "imagenet"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.registers or self.pre_logits or (self.pooling, self.final_norm) != ("class", "before_pooling"):
            raise ValueError("a distilled DeiT pools its class and distillation tokens after the final norm, no others")

    @property
    def prefix(self) -> int:
        return 2


class DistilledVisionTransformer(VisionTransformer):
    """Image in; class logits out, or features where `config.num_classes` is 0.

    As `VisionTransformer`; the pooled features are the mean of the class and the distillation token.
    """

    def __init__(self, config: DeiTConfig) -> None:
        super().__init__(config)
        self.dist_token = nn.Parameter(torch.empty(1, 1, config.width))
        self.head_dist = linear_head(config)
        nn.init.trunc_normal_(self.dist_token, std=0.02)
        if isinstance(self.head_dist, nn.Linear):
            nn.init.trunc_normal_(self.head_dist.weight, std=0.02)
            if self.head_dist.bias is not None:
                nn.init.zeros_(self.head_dist.bias)

    def prefix_tokens(self) -> list[Tensor]:
        return [*super().prefix_tokens(), self.dist_token]

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        tokens = self.encode(image)
        of_labels, of_teacher = self.head(tokens[:, 0]), self.head_dist(tokens[:, 1])
        mean = (of_labels + of_teacher) / 2
        return mean if self.config.num_classes else (mean, tokens[:, self.config.prefix :])
