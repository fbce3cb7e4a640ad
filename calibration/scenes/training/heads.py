"""Three heads on one backbone, of pictures of numbers: the first digit, the sum of the digits, and which number it is.

It is written as people write their own: a dictionary of outputs, no library's class for the whole, no config.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from calibration.scenes import lines
from calibration.scenes.canvas import Bytes
from calibration.scenes.stream import stream
from calibration.scenes.training import embedding
from calibration.scenes.training.embedding import DEVIATION, MARGIN, MEAN, READING, SCALE, SIDE, WIDTH
from calibration.scenes.training.intervals import mean_of_images
from calibration.scenes.training.loop import Metric, Random, Recipe, Samples, pixels
from calibration.scenes.write import ALIKE

VECTOR = 32


def draw(split: str, index: int) -> lines.Line:
    """The pictures of the model `embedding`."""
    alike = 1 if split == "training" else ALIKE
    return lines.numbered(stream("identities", split, index), SIDE, split, index, alike)


class Heads(nn.Module):
    """float32 [batch, 3, 48, 48] to "first" [batch, 10], "sum" [batch, 1] and "number" [batch, 32] of length 1."""

    def __init__(self) -> None:
        super().__init__()
        self.image_size = SIDE
        self.backbone = embedding.build()
        self.first = nn.Linear(WIDTH, 10)
        self.sum = nn.Linear(WIDTH, 1)
        self.number = nn.Linear(WIDTH, VECTOR)
        nn.init.constant_(self.sum.bias, 4.5 * lines.DIGITS)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        pooled = self.backbone(image).pooler_output
        vector = F.normalize(self.number(pooled), dim=1)
        return {"first": self.first(pooled), "sum": self.sum(pooled), "number": vector}

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        save_file(self.state_dict(), folder / "model.safetensors")


def build() -> nn.Module:
    return Heads()


class Helper(nn.Module):
    """A direction for each number of training, and what reads the digits, without which nothing is learned at first."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Linear(VECTOR, len(lines.numbers("training")), bias=False)
        self.digits = nn.Linear(WIDTH, 10 * lines.DIGITS)


def inputs(images: list[Bytes]) -> Tensor:
    return pixels(images, MEAN, DEVIATION)


def digits_of(samples: Samples) -> Tensor:
    """int64 [n, 3]."""
    return torch.tensor([[int(digit) for digit in each.text] for each in samples])


def loss(model: Any, samples: Samples, random: Random) -> Tensor:
    """CosFace's loss of the numbers, cross-entropy of the digits, of the first once more, and a squared error."""
    pooled = model.backbone(inputs([each.image for each in samples])).pooler_output
    digits, known = digits_of(samples), lines.numbers("training")
    true = torch.tensor([known.index(each.text) for each in samples])
    cosines = F.normalize(model.number(pooled)) @ F.normalize(model.helper.numbers.weight).T
    margins = MARGIN * F.one_hot(true, cosines.shape[1])
    read = model.helper.digits(pooled).view(len(samples), lines.DIGITS, 10).transpose(1, 2)
    return (
        READING * F.cross_entropy(read, digits)
        + F.cross_entropy(SCALE * (cosines - margins), true)
        + F.cross_entropy(model.first(pooled), digits[:, 0])
        + 0.1 * F.mse_loss(model.sum(pooled)[:, 0], digits.sum(1).float())
    )


@torch.inference_mode()
def measure(model: Any, samples: Samples) -> dict[str, Metric]:
    """The share of right first digits, the mean absolute error of the sums, and recall at 1 of the numbers."""
    images = [each.image for each in samples]
    found = [model(inputs(images[i : i + 50])) for i in range(0, len(images), 50)]
    first, total, vectors = (torch.cat([each[name] for each in found]).double().numpy() for name in found[0])
    true, known = digits_of(samples).numpy(), np.array([each.text for each in samples])
    table = vectors @ vectors.T
    np.fill_diagonal(table, -np.inf)
    right = first.argmax(axis=1) == true[:, 0]
    return {
        "accuracy": mean_of_images(right[:, None], "images", percent=True),
        "MAE": mean_of_images(np.abs(total - true.sum(axis=1)[:, None]), "images"),
        "recall@1": mean_of_images((known[table.argmax(axis=1)] == known)[:, None], "images", percent=True),
    }


KIND = dataclasses.replace(
    embedding.KIND,
    recipe=Recipe(9000, 4000, 48, 1.5e-3),
    build=build,
    draw=draw,
    loss=loss,
    measure=measure,
    processors=lambda: (),
    helper=Helper,
)
