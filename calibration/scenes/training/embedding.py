"""Numbers as identities: a small DINOv2 whose pooled token is near for pictures of one number, of numbers unseen too.

The loss is CosFace's (arXiv 1801.09414, equation 4) over the numbers of the training split, and that of reading the
digits, without which the first thousand steps learn nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibration.scenes import lines
from calibration.scenes.canvas import Bytes
from calibration.scenes.stream import stream
from calibration.scenes.training.intervals import mean_of_images
from calibration.scenes.training.libraries import transformers
from calibration.scenes.training.loop import Kind, Metric, Random, Recipe, Samples, pixels
from calibration.scenes.write import ALIKE, SIZES

SIDE, PATCH, WIDTH = SIZES["identities"][0], 8, 64
SCALE, MARGIN, READING = 16.0, 0.2, 3.0
MEAN, DEVIATION = [0.5] * 3, [0.5] * 3


@dataclass(frozen=True)
class Numbered:
    """`identity`: the place of the number among those of its split."""

    image: Bytes
    identity: int


def draw(split: str, index: int) -> Numbered:
    """Training pictures take turns; `ALIKE` of the others in a row show one number."""
    alike = 1 if split == "training" else ALIKE
    drawn = lines.numbered(stream("identities", split, index), SIDE, split, index, alike)
    return Numbered(drawn.image, lines.numbers(split).index(drawn.text))


def build() -> nn.Module:
    config = transformers.Dinov2Config(
        image_size=SIDE,
        patch_size=PATCH,
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        layerscale_value=0.1,  # DINOv2's 1.0 is that of trained weights; a small one lets a short training begin
    )
    return transformers.Dinov2Model(config)


class Helper(nn.Module):
    """A direction for each number of training, and what reads the digits."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.Linear(WIDTH, len(lines.numbers("training")), bias=False)
        self.digits = nn.Linear(WIDTH, 10 * lines.DIGITS)


def processors() -> tuple[Any, ...]:
    side = {"height": SIDE, "width": SIDE}
    options = {"do_center_crop": False, "resample": 3, "image_mean": MEAN, "image_std": DEVIATION}
    return (transformers.BitImageProcessor(size=side, **options),)


def loss(model: Any, samples: Samples, random: Random) -> Tensor:
    found = model(pixels([each.image for each in samples], MEAN, DEVIATION)).pooler_output
    true = torch.tensor([each.identity for each in samples])
    cosines = F.normalize(found) @ F.normalize(model.helper.numbers.weight).T
    margins = MARGIN * F.one_hot(true, cosines.shape[1])
    digits = torch.tensor([[int(digit) for digit in lines.numbers("training")[each.identity]] for each in samples])
    read = model.helper.digits(found).view(len(samples), lines.DIGITS, 10).transpose(1, 2)
    return READING * F.cross_entropy(read, digits) + F.cross_entropy(SCALE * (cosines - margins), true)


@torch.inference_mode()
def measure(model: Any, samples: Samples) -> dict[str, Metric]:
    """Recall at 1 and at 5: the share of pictures with one of the same number among the nearest by cosine."""
    images = [each.image for each in samples]
    found = [model(pixels(images[i : i + 50], MEAN, DEVIATION)).pooler_output for i in range(0, len(images), 50)]
    unit = F.normalize(torch.cat(found).double()).numpy()
    known = np.array([each.identity for each in samples])
    table = unit @ unit.T
    np.fill_diagonal(table, -np.inf)
    right = known[np.argsort(-table, axis=1)[:, :5]] == known[:, None]
    return {f"recall@{k}": mean_of_images(right[:, :k].any(axis=1)[:, None], "images", percent=True) for k in (1, 5)}


KIND = Kind(Recipe(9000, 4000, 48, 1.5e-3), build, draw, loss, measure, processors, evaluated=400, helper=Helper)
