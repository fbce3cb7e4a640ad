"""How many shapes are in a picture: a ViT (arXiv 2010.11929) whose head gives one number."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from calibration.scenes import shapes
from calibration.scenes.canvas import Bytes
from calibration.scenes.stream import stream
from calibration.scenes.training.intervals import mean_of_images
from calibration.scenes.training.libraries import transformers
from calibration.scenes.training.loop import Kind, Metric, Random, Recipe, Samples, pixels
from calibration.scenes.write import SIZES

SIDE, PATCH, WIDTH = SIZES["counts"][0], 8, 64
MEAN = 3.5  # of 1 to 6 shapes: the head begins there


def draw(split: str, index: int) -> shapes.Scene:
    return shapes.scattered(stream("counts", split, index), SIDE)


def build() -> nn.Module:
    config = transformers.ViTConfig(
        image_size=SIDE,
        patch_size=PATCH,
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=4 * WIDTH,
        problem_type="regression",
        id2label={0: "shapes"},
        label2id={"shapes": 0},
    )
    model = transformers.ViTForImageClassification(config)
    nn.init.constant_(model.classifier.bias, MEAN)
    return model


def processors() -> tuple[Any, ...]:
    return (transformers.ViTImageProcessor(size={"height": SIDE, "width": SIDE}),)


def inputs(images: list[Bytes]) -> Tensor:
    return pixels(images, (0.5,) * 3, (0.5,) * 3)


def loss(model: Any, samples: Samples, random: Random) -> Tensor:
    """The squared error; scenes are turned and mirrored, which changes no number."""
    images = [np.rot90(each.image, random.randint(4))[:, :: 1 - 2 * random.randint(2)] for each in samples]
    true = torch.tensor([[float(len(each.shapes))] for each in samples])
    return nn.functional.mse_loss(model(inputs(images)).logits, true)


@torch.inference_mode()
def measure(model: Any, samples: Samples) -> dict[str, Metric]:
    """The mean absolute error, and the share of pictures whose number is right when it is rounded, in percent."""
    images = [each.image for each in samples]
    logits = torch.cat([model(inputs(images[i : i + 100])).logits for i in range(0, len(images), 100)])
    true = np.array([len(each.shapes) for each in samples])
    apart = np.abs(logits[:, 0].numpy().astype(np.float64) - true)
    return {
        "MAE": mean_of_images(apart[:, None], "images"),
        "rounded": mean_of_images((apart < 0.5)[:, None], "images", percent=True),
    }


KIND = Kind(Recipe(8000, 4000, 32, 1e-3), build, draw, loss, measure, processors)
