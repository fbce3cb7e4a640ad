"""Key points of people in given boxes: ViTPose (arXiv 2204.12484) with its simple decoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibration.scenes import figures
from calibration.scenes.canvas import Bytes, Floats
from calibration.scenes.stream import stream
from calibration.scenes.training.intervals import mean_of_images, precision
from calibration.scenes.training.libraries import transformers
from calibration.scenes.training.loop import Kind, Metric, Random, Recipe, Samples, pixels
from calibration.scenes.write import SIZES
from vitdeploy.verification.average_precision import Matches, average_precision, match_entries, matches_of

SIDE = SIZES["keypoints"][0]
HEIGHT, WIDTH, PATCH = 96, 72, 8  # of the crop around a person
HEAT_HEIGHT, HEAT_WIDTH, SIGMA = 4 * HEIGHT // PATCH, 4 * WIDTH // PATCH, 1.5  # of the heat maps; SIGMA in their pixels
PADDING = 1.25  # how much larger the crop is than the box: the image processor's
NEAR = 0.1  # PCK: of the box's longer side
AREA = 0.53  # of the box, as in annotations.json


@dataclass(frozen=True)
class Sample:
    """`image` uint8 [SIDE, SIDE, 3]; `points` [n, 17, 2], the first pixel's centre is 0; `boxes` [n, 4], x y w h."""

    image: Bytes
    points: Floats
    boxes: Floats


def draw(split: str, index: int) -> Sample:
    picture = figures.figures(stream("keypoints", split, index), SIDE)
    corners = np.array([figure.box for figure in picture.figures])
    boxes = np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1)
    return Sample(picture.image, np.stack([figure.points for figure in picture.figures]) - 0.5, boxes)


def build() -> nn.Module:
    backbone = transformers.VitPoseBackboneConfig(
        image_size=[HEIGHT, WIDTH],
        patch_size=[PATCH, PATCH],
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        out_indices=[4],
    )
    config = transformers.VitPoseConfig(
        backbone_config=backbone,
        use_simple_decoder=True,
        id2label=dict(enumerate(figures.NAMES)),
        label2id={name: k for k, name in enumerate(figures.NAMES)},
        edges=[[a - 1, b - 1] for a, b in figures.SKELETON],
    )
    return transformers.VitPoseForPoseEstimation(config)


def processors() -> tuple[Any, ...]:
    return (transformers.VitPoseImageProcessor(size={"height": HEIGHT, "width": WIDTH}),)


def crops(samples: Samples, random: Random) -> tuple[Tensor, Tensor]:
    """One person of each picture as the image processor cuts it, from a box somewhat moved and scaled.

    Returns float32 [n, 3, HEIGHT, WIDTH], normalised, and the points in the heat maps' pixels, float32 [n, 17, 2].
    """
    thetas, points = [], []
    for each in samples:
        k = random.randint(len(each.boxes))
        x, y, w, h = each.boxes[k]
        shift, scale = random.uniform(-0.06, 0.06, 2), random.uniform(0.9, 1.12)
        centre = np.array([x + w / 2 + shift[0] * w, y + h / 2 + shift[1] * h])
        width = max(w, h * WIDTH / HEIGHT) * PADDING * scale
        sides = np.array([width, width * HEIGHT / WIDTH])
        # Crop and picture span from the first pixel's centre to the last one's (arXiv 1911.07524): align_corners.
        offset = 2 * centre / (SIDE - 1) - 1
        thetas.append([[sides[0] / (SIDE - 1), 0, offset[0]], [0, sides[1] / (SIDE - 1), offset[1]]])
        points.append((each.points[k] - centre + sides / 2) / sides * (HEAT_WIDTH - 1, HEAT_HEIGHT - 1))
    processor = processors()[0]
    images = pixels([each.image for each in samples], [0.0] * 3, [1.0] * 3)
    theta = torch.tensor(np.array(thetas), dtype=torch.float32)
    grid = F.affine_grid(theta, [len(samples), 3, HEIGHT, WIDTH], align_corners=True)
    cut = F.grid_sample(images, grid, align_corners=True)
    mean, deviation = (torch.tensor(v).view(3, 1, 1) for v in (processor.image_mean, processor.image_std))
    return (cut - mean) / deviation, torch.tensor(np.stack(points), dtype=torch.float32)


def heat(points: Tensor) -> Tensor:
    """Gaussians around the points: float32 [n, 17, HEAT_HEIGHT, HEAT_WIDTH], 1 at the top."""
    x = torch.exp(-((torch.arange(HEAT_WIDTH) - points[..., :1]) ** 2) / (2 * SIGMA**2))
    y = torch.exp(-((torch.arange(HEAT_HEIGHT) - points[..., 1:]) ** 2) / (2 * SIGMA**2))
    return y[..., :, None] * x[..., None, :]


def loss(model: Any, samples: Samples, random: Random) -> Tensor:
    """The squared error of the heat maps, scaled to be about 1 for empty ones."""
    images, points = crops(samples, random)
    error = (model(images).heatmaps - heat(points)) ** 2
    return error.sum((-2, -1)).mean() / (np.pi * SIGMA**2)


@torch.inference_mode()
def find(model: Any, samples: Samples) -> list[list[dict[str, np.ndarray]]]:
    """Key points [17, 2] and scores [17] of each person of each picture, by transformers' own processor."""
    processor, found = processors()[0], []
    for first in range(0, len(samples), 50):
        part = samples[first : first + 50]
        boxes = [each.boxes.astype(np.float32) for each in part]
        images = [torch.from_numpy(each.image).permute(2, 0, 1) for each in part]
        output = model(**processor(images, boxes=boxes, return_tensors="pt"))
        found += processor.post_process_pose_estimation(output, boxes=boxes)
    return [[{name: each[name].numpy() for name in ("keypoints", "scores")} for each in people] for people in found]


def measure(model: nn.Module, samples: Samples) -> dict[str, Metric]:
    """PCK at 0.1 of the box's longer side, and COCO's OKS-AP matched by pycocotools, in percent; boxes are given."""
    found = find(model, samples)
    near = []
    for sample, people in zip(samples, found, strict=True):
        apart = np.linalg.norm(np.stack([each["keypoints"] for each in people]) - sample.points, axis=-1)
        near.append((apart <= NEAR * sample.boxes[:, 2:].max(axis=1, keepdims=True)).ravel())
    matches = matched(samples, found)
    people = sum(len(sample.boxes) for sample in samples)
    return {
        "PCK@0.1": mean_of_images(near, "points", percent=True),
        "OKS_AP": precision(lambda w: average_precision(matches, w).mean(axis=1), len(samples), people, "people"),
    }


def matched(samples: Samples, found: list[list[dict[str, np.ndarray]]]) -> list[Matches]:
    """What pycocotools matches in the pictures, by OKS."""
    truth, answers = [], []
    for sample, people in zip(samples, found, strict=True):
        boxes = [
            {"category_id": 1, "iscrowd": 0, "bbox": [x, y, w, h], "area": AREA * w * h}
            for x, y, w, h in sample.boxes.tolist()
        ]
        seen, told = (
            [np.insert(p, 2, 2, axis=1).ravel().tolist() for p in side]
            for side in (sample.points, [person["keypoints"] for person in people])
        )
        visible = [len(points) for points in sample.points]
        truth.append([{**b, "keypoints": k, "num_keypoints": n} for b, k, n in zip(boxes, seen, visible, strict=True)])
        scores = [float(person["scores"].mean()) for person in people]
        answers.append([{**b, "keypoints": k, "score": s} for b, k, s in zip(boxes, told, scores, strict=True)])
    return matches_of(match_entries([{}] * len(samples), truth, answers, "keypoints"), len(samples))


KIND = Kind(Recipe(3000, 1200, 16, 1e-3), build, draw, loss, measure, processors, evaluated=200)
