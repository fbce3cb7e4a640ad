"""Figure and ground as a matte: a U-Net (arXiv 1505.04597) with a Transformer between its two halves, in plain PyTorch.

It is written as people write their own: logits [batch, 1, height, width], no library's class, no config.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from calibration.scenes import figures
from calibration.scenes.canvas import Bytes
from calibration.scenes.stream import stream
from calibration.scenes.training.intervals import mean_of_images
from calibration.scenes.training.loop import Kind, Metric, Random, Recipe, Samples, pixels
from calibration.scenes.write import SIZES

SIDE = SIZES["foreground"][0]
MEAN = DEVIATION = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class Sample:
    """`image` uint8 [SIDE, SIDE, 3]; `matte` float32 [SIDE, SIDE], the share that figures cover."""

    image: Bytes
    matte: np.ndarray


def draw(split: str, index: int) -> Sample:
    picture = figures.before_shapes(stream("foreground", split, index), SIDE)
    return Sample(picture.image, picture.matte.astype(np.float32))


class Convolutions(nn.Sequential):
    """Two of 3x3; the first may halve the sides."""

    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
        )


class Matting(nn.Module):
    """float32 [batch, 3, height, width], sides that 8 divides, to logits [batch, 1, height, width]."""

    def __init__(self, width: int = 64, layers: int = 2, side: int = SIDE) -> None:
        super().__init__()
        self.image_size = side
        self.down = nn.ModuleList([Convolutions(3, 12, 2), Convolutions(12, 24, 2), Convolutions(24, width, 2)])
        self.places = nn.Parameter(0.02 * torch.randn(1, (side // 8) ** 2, width))
        self.blocks = nn.ModuleList(
            [nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, F.gelu, 1e-5, True, True) for _ in range(layers)]
        )
        self.up = nn.ModuleList([Convolutions(width + 24, 24), Convolutions(24 + 12, 12)])
        self.head = nn.Conv2d(12 + 3, 1, 3, 1, 1)

    def forward(self, image: Tensor) -> Tensor:
        skips = []
        x = image
        for block in self.down:
            skips.append(x)
            x = block(x)
        tokens = x.flatten(2).transpose(1, 2) + self.places
        for layer in self.blocks:
            tokens = layer(tokens)
        x = tokens.transpose(1, 2).reshape(x.shape)
        for block in self.up:
            x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
            x = block(torch.cat([x, skips.pop()], 1))
        x = F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=False)
        return self.head(torch.cat([x, skips.pop()], 1))

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        save_file(self.state_dict(), folder / "model.safetensors")


def build() -> nn.Module:
    return Matting()


def processors() -> tuple[Any, ...]:
    return ()


def inputs(images: list[Bytes]) -> Tensor:
    return pixels(images, MEAN, DEVIATION)


def loss(model: Any, samples: Samples, random: Random) -> Tensor:
    """Cross-entropy with the covered share, and dice; half of the pictures are mirrored."""
    steps = [-1 if random.randint(2) else 1 for _ in samples]
    images = [each.image[:, ::step] for each, step in zip(samples, steps, strict=True)]
    true = torch.from_numpy(np.stack([each.matte[:, ::step] for each, step in zip(samples, steps, strict=True)]))
    logits = model(inputs(images))[:, 0]
    found = logits.sigmoid()
    dice = 1 - (2 * (found * true).sum((1, 2)) + 1) / ((found + true).sum((1, 2)) + 1)
    return F.binary_cross_entropy_with_logits(logits, true) + 0.5 * dice.mean()


@torch.inference_mode()
def mattes(model: Any, images: list[Bytes]) -> np.ndarray:
    """float64 [n, SIDE, SIDE], 0..1."""
    found = [model(inputs(images[i : i + 50]))[:, 0].sigmoid() for i in range(0, len(images), 50)]
    return torch.cat(found).numpy().astype(np.float64)


def measure(model: nn.Module, samples: Samples) -> dict[str, Metric]:
    """The mean over the pictures of the IoU of the pixels above a half, in percent, and of the mean absolute error."""
    found, true = mattes(model, [each.image for each in samples]), np.stack([each.matte for each in samples])
    ours, theirs = found > 0.5, true > 0.5
    iou = (ours & theirs).sum((1, 2)) / (ours | theirs).sum((1, 2))
    return {
        "IoU": mean_of_images(iou[:, None], "images", percent=True),
        "MAE": mean_of_images(np.abs(found - true).mean((1, 2))[:, None], "images"),
    }


KIND = Kind(Recipe(3000, 1200, 12, 3e-3, weight_decay=0.01), build, draw, loss, measure, processors, evaluated=300)
