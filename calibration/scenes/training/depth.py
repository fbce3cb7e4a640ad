"""Metric depth of one picture: Depth Anything (arXiv 2406.09414, metric head) on a DINOv2 backbone."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from calibration.scenes import rooms
from calibration.scenes.canvas import Bytes
from calibration.scenes.stream import stream
from calibration.scenes.training.intervals import mean_of_images
from calibration.scenes.training.libraries import transformers
from calibration.scenes.training.loop import Kind, Metric, Random, Recipe, Samples, pixels
from calibration.scenes.write import SIZES

SIDE, PATCH, WIDTH = SIZES["depth"][0], 8, 96
SPREAD = 0.5  # Eigen et al. (arXiv 1406.2283), equation 4: how much a common factor is forgiven
NEXT_TO = 1.25  # a pixel is right (delta-1) if the ratio of the two depths is below it


def draw(split: str, index: int) -> rooms.View:
    return rooms.room(stream("depth", split, index), SIDE)


def build() -> nn.Module:
    backbone = transformers.Dinov2Config(
        image_size=SIDE,
        patch_size=PATCH,
        hidden_size=WIDTH,
        num_hidden_layers=4,
        num_attention_heads=3,
        layerscale_value=0.1,  # DINOv2's 1.0 is that of trained weights; a small one lets a short training begin
        out_features=["stage1", "stage2", "stage3", "stage4"],
        reshape_hidden_states=False,
    )
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone,
        patch_size=PATCH,
        reassemble_hidden_size=WIDTH,
        neck_hidden_sizes=[24, 32, 48, 64],
        fusion_hidden_size=32,
        head_hidden_size=16,
        depth_estimation_type="metric",
        max_depth=int(rooms.FARTHEST),
    )
    return transformers.DepthAnythingForDepthEstimation(config)


def processors() -> tuple[Any, ...]:
    side = {"height": SIDE, "width": SIDE}
    mean, deviation = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    options = {"ensure_multiple_of": PATCH, "keep_aspect_ratio": False, "resample": 3}
    return (transformers.DPTImageProcessor(size=side, image_mean=mean, image_std=deviation, **options),)


def inputs(images: list[Bytes]) -> Tensor:
    processor = processors()[0]
    return pixels(images, processor.image_mean, processor.image_std)


def loss(model: Any, samples: Samples, random: Random) -> Tensor:
    """The scale-invariant logarithmic error; half of the rooms are mirrored."""
    steps = [-1 if random.randint(2) else 1 for _ in samples]
    images = [each.image[:, ::step] for each, step in zip(samples, steps, strict=True)]
    true = torch.from_numpy(np.stack([each.depth[:, ::step] for each, step in zip(samples, steps, strict=True)]))
    found = model(inputs(images)).predicted_depth
    error = torch.log(found.clamp(min=1e-3)) - torch.log(true)
    mean = error.mean((1, 2))
    return ((error**2).mean((1, 2)) - SPREAD * mean**2).clamp(min=1e-8).sqrt().mean()


@torch.inference_mode()
def depths(model: Any, images: list[Bytes]) -> np.ndarray:
    """float64 [n, SIDE, SIDE], metres."""
    found = [model(inputs(images[i : i + 50])).predicted_depth for i in range(0, len(images), 50)]
    return torch.cat(found).numpy().astype(np.float64)


def measure(model: nn.Module, samples: Samples) -> dict[str, Metric]:
    """AbsRel, the mean of |found - true| / true, and delta-1, the share of pixels within a factor of 1.25, in percent.

    Depth is absolute: nothing is aligned. Each picture counts as one sample, the mean of its pixels.
    """
    found, true = depths(model, [each.image for each in samples]), np.stack([each.depth for each in samples])
    relative = (np.abs(found - true) / true).mean(axis=(1, 2))
    near = (np.maximum(found / true, true / found) < NEXT_TO).mean(axis=(1, 2))
    return {
        "AbsRel": mean_of_images(relative[:, None], "images"),
        "delta1": mean_of_images(near[:, None], "images", percent=True),
    }


KIND = Kind(Recipe(6000, 3000, 16, 1e-3), build, draw, loss, measure, processors, evaluated=300)
