"""Which digits are in a picture: a small ViT (arXiv 2010.11929) with a sigmoid for each digit."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibration.scenes import digits
from calibration.scenes.canvas import Bytes
from calibration.scenes.stream import stream
from calibration.scenes.training.intervals import precision
from calibration.scenes.training.libraries import transformers
from calibration.scenes.training.loop import Kind, Metric, Random, Recipe, Samples, pixels
from calibration.scenes.write import SIZES
from vitdeploy.tasks.multi_label import mean_precision

SIDE, PATCH, WIDTH = SIZES["digits"][0], 6, 64
GRID = SIDE // PATCH
HALF = (0.5, 0.5, 0.5)


def draw(split: str, index: int) -> digits.Scene:
    return digits.digits(stream("digits", split, index), SIDE)


def vit(labels: tuple[str, ...], **more: Any) -> nn.Module:
    """A ViT with an output for each label."""
    config = transformers.ViTConfig(
        image_size=SIDE,
        patch_size=PATCH,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_labels=len(labels),
        id2label=dict(enumerate(labels)),
        label2id={label: index for index, label in enumerate(labels)},
        **more,
    )
    return transformers.ViTForImageClassification(config)


def processors() -> tuple[Any, ...]:
    side = {"height": SIDE, "width": SIDE}
    return (transformers.ViTImageProcessor(size=side, image_mean=list(HALF), image_std=list(HALF)),)


def inputs(images: list[Bytes]) -> Tensor:
    return pixels(images, HALF, HALF)


def quarters_of(model: Any, tokens: Tensor) -> Tensor:
    """What the helper says of each quarter: [n, 4, 11] logits of its digit, the last of none; by its patches' mean."""
    grid = tokens[:, 1:].reshape(len(tokens), 2, GRID // 2, 2, GRID // 2, -1)
    return torch.as_tensor(model.helper(grid.mean((2, 4)).flatten(1, 2)))


def loss(model: Any, samples: Samples, random: Random) -> Tensor:
    """Binary cross entropy of the labels; and, of the helper, cross entropy of each quarter's digit."""
    tokens = model.vit(inputs([each.image for each in samples])).last_hidden_state
    true = torch.from_numpy(np.stack([each.labels for each in samples])).float()
    if model.config.num_labels == 1:
        true = true[:, [digits.NAMES.index(model.config.id2label[0])]]
    quarters = torch.from_numpy(np.stack([each.quarters for each in samples])).flatten(1) % (len(digits.NAMES) + 1)
    helped = F.cross_entropy(quarters_of(model, tokens).transpose(1, 2), quarters)
    return F.binary_cross_entropy_with_logits(model.classifier(tokens[:, 0]), true) + 0.3 * helped


@torch.inference_mode()
def logits(model: Any, images: list[Bytes]) -> np.ndarray:
    """float64 [n, labels]."""
    found = [model(inputs(images[i : i + 100])).logits for i in range(0, len(images), 100)]
    return torch.cat(found).numpy().astype(np.float64)


def measure(model: nn.Module, samples: Samples) -> dict[str, Metric]:
    """The mean average precision of the digits, in percent."""
    found, true = logits(model, [each.image for each in samples]), np.stack([each.labels for each in samples])

    return {"mAP": precision(functools.partial(mean_precision, found, true), len(samples), int(true.sum()), "labels")}


def helper() -> nn.Module:
    return nn.Linear(WIDTH, len(digits.NAMES) + 1)


def build() -> nn.Module:
    return vit(digits.NAMES, problem_type="multi_label_classification")


KIND = Kind(Recipe(16000, 5000, 32, 1e-3), build, draw, loss, measure, processors, helper=helper)
