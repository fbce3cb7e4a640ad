"""Promptable segmentation: SAM (arXiv 2304.02643), a point inside an object or a box around it as the prompt.

While it is trained, a linear head also names the classes of all pixels from the picture's embedding, four by four in a
patch. Masks alone stand still for long at blobs around the prompt that ignore the picture.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from calibration.scenes import shapes
from calibration.scenes.canvas import Bytes, Floats
from calibration.scenes.stream import stream
from calibration.scenes.training.intervals import mean_of_images
from calibration.scenes.training.libraries import transformers
from calibration.scenes.training.loop import Kind, Metric, Random, Recipe, Samples, pixels
from calibration.scenes.write import SIZES, inside, semantic_map

SIDE, PATCH, WIDTH, EMBEDDING = SIZES["prompted"][0], 8, 96, 64
PROMPTS = 4  # for each picture of a batch, with repetition
CELLS = 4  # of a patch along a side, for the head of the training
CLASSES = 1 + len(shapes.NAMES)  # of a cell: the ground, or a shape
CELL_LOSS = 3.0  # its weight
JITTER = 0.04  # of a box's sides: people draw boxes loosely


@dataclass(frozen=True)
class Sample:
    """`image` uint8 [SIDE, SIDE, 3]; `masks` bool [n, SIDE, SIDE]; `points` [n, 2] (column, row), `boxes` [n, 4].

    shares: float32 [CLASSES, CELLS * SIDE / PATCH, the same], what of each cell each class covers.
    """

    image: Bytes
    masks: np.ndarray
    points: Floats
    boxes: Floats
    shares: np.ndarray


def draw(split: str, index: int) -> Sample:
    random = stream("prompted", split, index)
    scene = shapes.scattered(random, SIDE)
    masks = np.stack([scene.owner == k + 1 for k in range(len(scene.shapes))])
    points = np.array([inside(random, mask) for mask in masks])
    boxes = np.array([scene.box(k) for k in range(len(masks))], np.float64)
    cells = CELLS * SIDE // PATCH
    classes = np.eye(CLASSES, dtype=np.float32)[semantic_map(scene)]
    shares = classes.reshape(cells, SIDE // cells, cells, SIDE // cells, CLASSES).mean(axis=(1, 3))
    return Sample(scene.image, masks, points, boxes, shares.transpose(2, 0, 1))


def build() -> nn.Module:
    vision = {
        **{"image_size": SIDE, "patch_size": PATCH, "hidden_size": WIDTH, "num_hidden_layers": 4},
        **{"num_attention_heads": 3, "window_size": 6, "global_attn_indexes": [1, 3], "output_channels": EMBEDDING},
        **{"num_pos_feats": EMBEDDING // 2, "initializer_range": 0.02},
    }
    prompt = {"hidden_size": EMBEDDING, "image_size": SIDE, "patch_size": PATCH}
    decoder = {
        **{"hidden_size": EMBEDDING, "mlp_dim": 4 * EMBEDDING, "num_attention_heads": 4},
        "iou_head_hidden_dim": EMBEDDING,
    }
    config = transformers.SamConfig(vision_config=vision, prompt_encoder_config=prompt, mask_decoder_config=decoder)
    model = transformers.SamModel(config)
    # Frequencies of deviation 1, as in the paper's code. A config asks for hidden_size / 2: then the positions of
    # neighbours have nothing in common, and the decoder learns to ignore the prompt.
    nn.init.normal_(model.shared_image_embedding.positional_embedding)
    model.tie_weights()
    return model


def processors() -> tuple[Any, ...]:
    side, low = {"height": SIDE, "width": SIDE}, 4 * SIDE // PATCH
    sizes = {"size": {"longest_edge": SIDE}, "pad_size": side}
    masks = {"mask_size": {"longest_edge": low}, "mask_pad_size": {"height": low, "width": low}}
    return (transformers.SamImageProcessor(**sizes, **masks),)


def inputs(images: list[Bytes]) -> Tensor:
    processor = processors()[0]
    return pixels(images, processor.image_mean, processor.image_std)


def prompts_of(samples: Samples, random: Random) -> tuple[Tensor, Tensor, Tensor]:
    """PROMPTS instances of each picture: points [b, p, 1, 2], boxes [b, p, 4], masks [b, p, SIDE, SIDE]."""
    points, boxes, masks = [], [], []
    for each in samples:
        for k in random.randint(0, len(each.masks), PROMPTS):
            points.append(inside(random, each.masks[k]))
            x0, y0, x1, y1 = each.boxes[k]
            sides = np.array([x1 - x0, y1 - y0, x1 - x0, y1 - y0])
            boxes.append(each.boxes[k] + random.uniform(-JITTER, JITTER, 4) * sides)
            masks.append(each.masks[k])
    n = len(samples)
    return (
        torch.tensor(np.array(points), dtype=torch.float32).view(n, PROMPTS, 1, 2),
        torch.tensor(np.array(boxes), dtype=torch.float32).view(n, PROMPTS, 4),
        torch.from_numpy(np.stack(masks)).float().view(n, PROMPTS, SIDE, SIDE),
    )


def loss(model: Any, samples: Samples, random: Random) -> Tensor:
    """Cross-entropy and dice of the best mask, the squared error of all promised IoUs, and the cells' classes.

    Batches of points and of boxes take turns at random; of three masks or of the single one, as a user may ask for.
    """
    points, boxes, masks = prompts_of(samples, random)
    embedding = model.vision_encoder(inputs([each.image for each in samples])).last_hidden_state
    prompt = {"input_points": points} if random.randint(2) else {"input_boxes": boxes}
    output = model(image_embeddings=embedding, multimask_output=bool(random.randint(2)), **prompt)
    logits = output.pred_masks  # [b, p, masks, low, low]
    # The share of each coarse pixel that is inside: the logit's zero is then the outline.
    share = F.adaptive_avg_pool2d(masks, logits.shape[-2:])[:, :, None].expand_as(logits)
    entropy = F.binary_cross_entropy_with_logits(logits, share, reduction="none").mean((-2, -1))
    found = logits.sigmoid()
    dice = 1 - (2 * (found * share).sum((-2, -1)) + 1) / ((found + share).sum((-2, -1)) + 1)
    with torch.no_grad():
        hard, true = logits > 0, share > 0.5
        iou = (hard & true).sum((-2, -1)) / (hard | true).sum((-2, -1)).clamp(min=1)
    best = (5 * entropy + dice).min(dim=2).values.mean()
    cells = F.pixel_shuffle(model.helper(embedding), CELLS)
    true = torch.from_numpy(np.stack([each.shares for each in samples]))
    return best + F.mse_loss(output.iou_scores, iou) + CELL_LOSS * F.cross_entropy(cells, true)


@torch.inference_mode()
def masks_of(model: Any, sample: Sample, prompt: str) -> np.ndarray:
    """The single mask for each prompt of a picture, by transformers' own post-processing: bool [n, SIDE, SIDE]."""
    given = {
        "point": {"input_points": torch.tensor(sample.points, dtype=torch.float32)[None, :, None]},
        "box": {"input_boxes": torch.tensor(sample.boxes, dtype=torch.float32)[None]},
    }
    output = model(pixel_values=inputs([sample.image]), multimask_output=False, **given[prompt])
    processor = processors()[0]
    return processor.post_process_masks(output.pred_masks, [[SIDE, SIDE]], [[SIDE, SIDE]])[0][:, 0].numpy()


def measure(model: nn.Module, samples: Samples) -> dict[str, Metric]:
    """Mean IoU (0..1) of the masks of all instances, prompted by the point inside and by the box."""
    found: dict[str, list[np.ndarray]] = {"point": [], "box": []}
    for sample in samples:
        for prompt, values in found.items():
            masks = masks_of(model, sample, prompt)
            both, either = (masks & sample.masks).sum((1, 2)), (masks | sample.masks).sum((1, 2))
            values.append(both / either)
    return {f"{prompt}_iou": mean_of_images(values, "instances") for prompt, values in found.items()}


def cell_head() -> nn.Module:
    return nn.Conv2d(EMBEDDING, CLASSES * CELLS**2, 1)


RECIPE = Recipe(4000, 2500, 16, 1e-3)
KIND = Kind(RECIPE, build, draw, loss, measure, processors, evaluated=300, helper=cell_head)
