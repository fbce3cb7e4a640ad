"""A detection transformer with deformable attention: RT-DETRv2 (arXiv 2407.17140) on a small ResNet."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from calibration.scenes import shapes
from calibration.scenes.canvas import Bytes, Floats
from calibration.scenes.stream import stream
from calibration.scenes.training.intervals import precision
from calibration.scenes.training.libraries import transformers
from calibration.scenes.training.loop import Kind, Metric, Random, Recipe, Samples
from calibration.scenes.write import SIZES
from vitdeploy.data.detection import Boxes
from vitdeploy.verification.average_precision import Objects, average_precision, match_boxes, matches_of

SIDE = SIZES["detection"][0]
WIDTH, QUERIES = 64, 30
CHANNELS = (24, 40, 64, 96)


@dataclass(frozen=True)
class Sample:
    """`image` uint8 [SIDE, SIDE, 3]; `boxes` float32 [n, 4], x0 y0 x1 y1 in pixels; `classes` int64 [n]."""

    image: Bytes
    boxes: Floats
    classes: np.ndarray


def draw(split: str, index: int) -> Sample:
    scene = shapes.scattered(stream("detection", split, index), SIDE)
    boxes = np.array([scene.box(k) for k in range(len(scene.shapes))], np.float32)
    return Sample(scene.image, boxes, np.array([shapes.NAMES.index(shape.name) for shape in scene.shapes]))


def build() -> nn.Module:
    backbone = transformers.RTDetrResNetConfig(
        embedding_size=CHANNELS[0],
        hidden_sizes=list(CHANNELS),
        depths=[1, 1, 1, 1],
        layer_type="basic",
        out_features=["stage2", "stage3", "stage4"],
    )
    config = transformers.RTDetrV2Config(
        backbone_config=backbone,
        freeze_backbone_batch_norms=False,
        encoder_in_channels=list(CHANNELS[1:]),
        encoder_hidden_dim=WIDTH,
        encoder_ffn_dim=2 * WIDTH,
        encoder_attention_heads=4,
        hidden_expansion=0.5,
        d_model=WIDTH,
        decoder_in_channels=[WIDTH] * 3,
        decoder_ffn_dim=2 * WIDTH,
        decoder_layers=3,
        decoder_attention_heads=4,
        num_queries=QUERIES,
        num_denoising=20,
        id2label=dict(enumerate(shapes.NAMES)),
        label2id={name: k for k, name in enumerate(shapes.NAMES)},
    )
    return transformers.RTDetrV2ForObjectDetection(config)


def processors() -> tuple[object, ...]:
    return (transformers.RTDetrImageProcessor(size={"height": SIDE, "width": SIDE}),)


def turned(sample: Sample, turns: int, flip: bool) -> Sample:
    """The scene after quarter turns and perhaps a mirror: shapes stay what they are."""
    image, boxes = sample.image, sample.boxes
    if flip:
        image, boxes = image[:, ::-1], np.stack([SIDE - boxes[:, 2], boxes[:, 1], SIDE - boxes[:, 0], boxes[:, 3]], 1)
    for _ in range(turns):  # counter-clockwise: (x, y) goes to (y, side - x)
        image = np.rot90(image)
        boxes = np.stack([boxes[:, 1], SIDE - boxes[:, 2], boxes[:, 3], SIDE - boxes[:, 0]], 1)
    return Sample(np.ascontiguousarray(image), boxes, sample.classes)


def inputs(samples: Samples) -> Tensor:
    """float32 [n, 3, SIDE, SIDE] in 0..1, as the image processor gives them."""
    return torch.from_numpy(np.stack([each.image for each in samples])).permute(0, 3, 1, 2).float() / 255


def loss(model: nn.Module, samples: Samples, random: Random) -> Tensor:
    samples = [turned(each, random.randint(4), random.randint(2) == 1) for each in samples]
    labels = []
    for each in samples:
        corners = torch.from_numpy(each.boxes) / SIDE
        boxes = torch.cat([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]], dim=1)
        labels.append({"class_labels": torch.from_numpy(each.classes), "boxes": boxes})
    return model(inputs(samples), labels=labels).loss


@torch.inference_mode()
def detect(model: nn.Module, samples: Samples) -> list[Objects]:
    """All queries of each image, with the classes and scores of transformers' own post-processing."""
    processor, found = processors()[0], []
    for first in range(0, len(samples), 50):
        part = samples[first : first + 50]
        output = model(inputs(part))
        results = processor.post_process_object_detection(
            output, threshold=0, target_sizes=torch.tensor([[SIDE, SIDE]] * len(part))
        )
        found += [Objects(*(result[name].numpy() for name in ("labels", "scores", "boxes"))) for result in results]
    return found


def measure(model: nn.Module, samples: Samples) -> dict[str, Metric]:
    """COCO's mAP, matched by pycocotools, and AP at an IoU of 0.5, in percent."""
    truth = []
    for each in samples:
        area = (each.boxes[:, 2:] - each.boxes[:, :2]).prod(axis=1).astype(np.float64)
        crowd = np.zeros(len(area), bool)
        truth.append(Boxes((SIDE, SIDE), each.boxes.astype(np.float64), each.classes, crowd, area))
    matches = matches_of(match_boxes(detect(model, samples), truth), len(truth))
    objects = sum(len(each.classes) for each in samples)
    return {
        "mAP": precision(lambda w: average_precision(matches, w).mean(axis=1), len(samples), objects, "objects"),
        "AP50": precision(lambda w: average_precision(matches, w)[:, 0], len(samples), objects, "objects"),
    }


KIND = Kind(Recipe(5000, 2500, 16, 1e-3, warm_up_steps=200), build, draw, loss, measure, processors)
