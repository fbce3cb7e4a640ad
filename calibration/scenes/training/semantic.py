"""Semantic segmentation: SegFormer (arXiv 2105.15203), a class for each pixel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibration.scenes import shapes
from calibration.scenes.canvas import Bytes
from calibration.scenes.stream import stream
from calibration.scenes.training.intervals import precision
from calibration.scenes.training.libraries import transformers
from calibration.scenes.training.loop import Kind, Metric, Random, Recipe, Samples, pixels
from calibration.scenes.write import SIZES, semantic_map

SIDE = SIZES["semantic"][0]
CLASSES = ("ground", *shapes.NAMES)


@dataclass(frozen=True)
class Sample:
    """`image` uint8 [SIDE, SIDE, 3]; `classes` uint8 [SIDE, SIDE]."""

    image: Bytes
    classes: Bytes


def draw(split: str, index: int) -> Sample:
    scene = shapes.scattered(stream("semantic", split, index), SIDE)
    return Sample(scene.image, semantic_map(scene))


def build() -> nn.Module:
    config = transformers.SegformerConfig(
        depths=[1, 1, 2, 1],
        hidden_sizes=[24, 48, 96, 128],
        num_attention_heads=[1, 2, 3, 4],
        sr_ratios=[4, 2, 1, 1],
        strides=[2, 2, 2, 2],
        decoder_hidden_size=64,
        drop_path_rate=0.0,
        classifier_dropout_prob=0.0,
        id2label=dict(enumerate(CLASSES)),
        label2id={name: k for k, name in enumerate(CLASSES)},
    )
    return transformers.SegformerForSemanticSegmentation(config)


def processors() -> tuple[Any, ...]:
    return (transformers.SegformerImageProcessor(size={"height": SIDE, "width": SIDE}),)


def inputs(images: list[Bytes]) -> Tensor:
    processor = processors()[0]
    return pixels(images, processor.image_mean, processor.image_std)


def loss(model: Any, samples: Samples, random: Random) -> Tensor:
    """Cross-entropy at the pictures' own size; quarter turns and mirrors change no class."""
    images, classes = [], []
    for each in samples:
        turns, step = random.randint(4), -1 if random.randint(2) else 1
        images.append(np.rot90(each.image[:, ::step], turns))
        classes.append(np.rot90(each.classes[:, ::step], turns))
    return model(inputs(images), labels=torch.from_numpy(np.stack(classes)).long()).loss


@torch.inference_mode()
def segment(model: Any, images: list[Bytes]) -> np.ndarray:
    """The best class of each pixel, int64 [n, SIDE, SIDE], from logits enlarged as transformers does."""
    found = []
    for first in range(0, len(images), 50):
        logits = model(inputs(images[first : first + 50])).logits
        found.append(F.interpolate(logits, (SIDE, SIDE), mode="bilinear", align_corners=False).argmax(dim=1))
    return torch.cat(found).numpy()


def measure(model: nn.Module, samples: Samples) -> dict[str, Metric]:
    """mIoU in percent: the mean over the seven classes of the IoU of all pixels of all pictures together."""
    found = segment(model, [each.image for each in samples])
    both, either = np.zeros((2, len(samples), len(CLASSES)))
    for i, (sample, map_) in enumerate(zip(samples, found, strict=True)):
        for k in range(len(CLASSES)):
            both[i, k] = ((sample.classes == k) & (map_ == k)).sum()
            either[i, k] = ((sample.classes == k) | (map_ == k)).sum()

    def mean_iou(weights: np.ndarray) -> np.ndarray:
        return ((weights @ both) / np.maximum(weights @ either, 1)).mean(axis=1)

    return {"mIoU": precision(mean_iou, len(samples), len(samples), "images")}


KIND = Kind(Recipe(4000, 1200, 16, 2e-3), build, draw, loss, measure, processors, evaluated=300)
