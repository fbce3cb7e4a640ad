"""Train the small Vision Transformer of the digits set, on the images that `prepare.py` wrote to `training/`.

    python calibration/digits/train.py --hold-out   choose hyper-parameters: 7/8 of training/, scored on the other 1/8
    python calibration/digits/train.py              the released checkpoint: all of training/

The evaluation images are read once, after the last epoch of a run without `--hold-out`, to print one accuracy: no
weight, epoch or hyper-parameter is chosen by them. The calibration images are not read at all.

The result is a plain state dict of `VisionTransformer`, float32, in safetensors form.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors.torch import save
from torch import Tensor, nn

from vitdeploy.models.architectures.vit import VisionTransformer, ViTConfig

FOLDER = Path(__file__).resolve().parent
CONFIG = ViTConfig(image_size=(32, 32), patch_size=4, in_channels=1, width=192, depth=4, heads=3, num_classes=10)
HOLD_OUT_STRIDE = 8  # files are sorted by class first, so every 8th is a sample of each class
BACKGROUND = -1.0  # an empty pixel after normalisation


@dataclass(frozen=True)
class Recipe:
    """Hyper-parameters of the optimisation, chosen on the hold-out alone."""

    batch_size: int = 32
    peak_learning_rate: float = 5e-4
    warm_up_fraction: float = 0.1  # of all steps
    weight_decay: float = 0.05
    label_smoothing: float = 0.1
    max_gradient_norm: float = 1.0


@dataclass(frozen=True)
class Augmentation:
    """Largest size of each random change; every image draws its own, uniformly between both signs."""

    rotation: float = 8.0  # degrees
    scale: float = 0.08  # relative change, drawn apart for the two axes
    shear: float = 0.1  # horizontal displacement per vertical distance: the slant of the hand
    shift: float = 0.0625  # of the image's side: half a pixel of the 8x8 original


@dataclass(frozen=True)
class LabelledImages:
    """`images` float32 [n, 1, 32, 32], normalised pixels in [-1, 1]; `labels` int64 [n]."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


def load_image(path: Path) -> Tensor:
    """Read one grey image as float32 [1, 32, 32] in [-1, 1]."""
    height, width = CONFIG.image_size
    with Image.open(path) as image:
        resized = image.convert("L").resize((width, height), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(resized, dtype=np.float32))
    return ((pixels / 255 - 0.5) / 0.5).unsqueeze(0)


def load_split(folder: Path) -> LabelledImages:
    """Read all images below `folder`: a class's index is its folder's place in the sorted folder names."""
    classes = sorted(entry for entry in folder.iterdir() if entry.is_dir())
    files = [(path, index) for index, name in enumerate(classes) for path in sorted(name.glob("*.png"))]
    return LabelledImages(
        images=torch.stack([load_image(path) for path, _ in files]),
        labels=torch.tensor([index for _, index in files]),
    )


def take_hold_out(data: LabelledImages) -> tuple[LabelledImages, LabelledImages]:
    """Cut the data into (images to fit, images held out)."""
    held = torch.arange(len(data)) % HOLD_OUT_STRIDE == 0
    return (
        LabelledImages(data.images[~held], data.labels[~held]),
        LabelledImages(data.images[held], data.labels[held]),
    )


def uniform(count: int, limit: float) -> Tensor:
    """float32 [count], uniform in [-limit, limit]."""
    return (torch.rand(count) * 2 - 1) * limit


def random_affine(images: Tensor, augmentation: Augmentation) -> Tensor:
    """Rotate, scale, shear and shift each image by its own random amounts. float32 [b, c, H, W] in and out."""
    count = len(images)
    angle = uniform(count, math.radians(augmentation.rotation))
    scale_x, scale_y = (1 + uniform(count, augmentation.scale) for _ in range(2))
    shear = uniform(count, augmentation.shear)
    # affine_grid measures in half sides: the image spans [-1, 1] on each axis.
    shift_x, shift_y = (uniform(count, 2 * augmentation.shift) for _ in range(2))
    cos, sin = angle.cos(), angle.sin()
    row_x = torch.stack([scale_x * cos, scale_y * (shear * cos - sin), shift_x], dim=1)
    row_y = torch.stack([scale_x * sin, scale_y * (shear * sin + cos), shift_y], dim=1)
    grid = F.affine_grid(torch.stack([row_x, row_y], dim=1), list(images.shape), align_corners=False)
    # grid_sample fills what comes from outside with zero: make zero the background for its time.
    moved = F.grid_sample(images - BACKGROUND, grid, mode="bilinear", padding_mode="zeros", align_corners=False)
    return moved + BACKGROUND


def shuffled_batches(data: LabelledImages, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """One pass over the data in random order, as (images, labels) of at most `batch_size`."""
    for chosen in torch.randperm(len(data)).split(batch_size):
        yield data.images[chosen], data.labels[chosen]


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Decay the matrices alone: biases, LayerNorm's gains and the token and position embeddings have no reason to."""
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        is_embedding = name in ("cls_token", "pos_embed")
        (free if parameter.ndim < 2 or is_embedding else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


def learning_rate_factor(step: int, warm_up_steps: int, total_steps: int) -> float:
    """Linear warm-up to 1, then half a cosine down to 0 at `total_steps`."""
    if step < warm_up_steps:
        return (step + 1) / warm_up_steps
    progress = (step - warm_up_steps) / max(1, total_steps - warm_up_steps)
    return 0.5 * (1 + math.cos(math.pi * progress))


def train(data: LabelledImages, epochs: int, recipe: Recipe, augmentation: Augmentation) -> VisionTransformer:
    """Fit a fresh model to the data, printing one line an epoch. Random numbers come from torch's global generator."""
    model = VisionTransformer(CONFIG)
    optimizer = torch.optim.AdamW(parameter_groups(model, recipe.weight_decay), lr=recipe.peak_learning_rate)
    total_steps = epochs * math.ceil(len(data) / recipe.batch_size)
    warm_up_steps = max(1, round(recipe.warm_up_fraction * total_steps))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, warm_up_steps, total_steps)
    )
    start = time.perf_counter()
    for epoch in range(1, epochs + 1):
        model.train()
        loss_sum, correct = 0.0, 0
        for images, labels in shuffled_batches(data, recipe.batch_size):
            logits = model(random_affine(images, augmentation))
            loss = F.cross_entropy(logits, labels, label_smoothing=recipe.label_smoothing)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.max_gradient_norm)
            optimizer.step()
            schedule.step()
            loss_sum += loss.item() * len(labels)
            correct += int((logits.argmax(1) == labels).sum())
        print(
            f"epoch {epoch}/{epochs}  loss {loss_sum / len(data):.4f}  "
            f"augmented training accuracy {correct / len(data):.4f}  {time.perf_counter() - start:.0f} s",
            flush=True,
        )
    return model.eval()


@torch.inference_mode()
def count_correct(model: nn.Module, data: LabelledImages, batch_size: int = 128) -> int:
    """Number of images whose largest logit is that of their label."""
    batches = zip(data.images.split(batch_size), data.labels.split(batch_size), strict=True)
    return sum(int((model(images).argmax(1) == labels).sum()) for images, labels in batches)


def print_accuracy(name: str, model: nn.Module, data: LabelledImages) -> None:
    correct = count_correct(model, data)
    print(f"{name} accuracy {100 * correct / len(data):.2f} % ({correct} of {len(data)})")


def save_checkpoint(model: nn.Module, path: Path) -> None:
    """Write the state dict; the name appears only once the file is whole, so no reader meets half a checkpoint."""
    temporary = path.with_name(path.name + ".tmp")
    # save_file would make the file readable to its owner alone; write_bytes leaves that to the umask.
    temporary.write_bytes(save({name: tensor.contiguous() for name, tensor in model.state_dict().items()}))
    temporary.replace(path)  # os.replace: atomic


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train the digits Vision Transformer.")
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--output", type=Path, default=FOLDER / "vit_digits.safetensors", help="checkpoint to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--hold-out", action="store_true", help="score on a hold-out of training/; write no checkpoint")
    return parser.parse_args()


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(2)  # part of the recipe: the order of float sums, so the last bits, depends on it
    torch.manual_seed(arguments.seed)
    data = load_split(FOLDER / "training")
    if arguments.hold_out:
        fitted, held_out = take_hold_out(data)
        print_accuracy("hold-out", train(fitted, arguments.epochs, Recipe(), Augmentation()), held_out)
        return
    model = train(data, arguments.epochs, Recipe(), Augmentation())
    save_checkpoint(model, arguments.output)
    print_accuracy("evaluation", model, load_split(FOLDER / "evaluation"))


if __name__ == "__main__":
    main()
