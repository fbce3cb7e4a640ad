"""What training a model is, whichever: batches of scenes, AdamW, warm-up and a half cosine; then its folder."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Random = np.random.RandomState
Samples = Sequence[Any]  # what a kind's `draw` returns


@dataclass(frozen=True)
class Recipe:
    """Settings of the optimisation. No value was chosen on evaluation scenes."""

    scenes: int  # training scenes, drawn once
    steps: int
    batch: int
    peak_learning_rate: float
    warm_up_steps: int = 100
    weight_decay: float = 0.02
    max_gradient_norm: float = 1.0


@dataclass(frozen=True)
class Metric:
    """A value and its 95 % interval, of `count` samples of which `of` says what they are."""

    value: float
    low: float
    high: float
    count: int
    of: str


@dataclass(frozen=True)
class Kind:
    """A model and its data.

    draw: scene `index` of a split, as `loss` and `measure` read it.
    loss: of a batch of scenes, the generator is for augmentation.
    processors: what is saved beside the model, such as an image processor and a tokenizer.
    helper: a head that the loss finds as `model.helper`; it is gone after training.
    """

    recipe: Recipe
    build: Callable[[], nn.Module]
    draw: Callable[[str, int], Any]
    loss: Callable[[Any, Samples, Random], Tensor]
    measure: Callable[[Any, Samples], dict[str, Metric]]
    processors: Callable[[], tuple[Any, ...]]
    evaluated: int = 500  # evaluation scenes
    helper: Callable[[], nn.Module] | None = None


def learning_rate_factor(step: int, recipe: Recipe) -> float:
    """Linear warm-up to 1, then half a cosine down to 0."""
    if step < recipe.warm_up_steps:
        return (step + 1) / recipe.warm_up_steps
    return 0.5 * (1 + math.cos(math.pi * (step - recipe.warm_up_steps) / (recipe.steps - recipe.warm_up_steps)))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Decay matrices alone: biases, gains of norms and embeddings have no reason to."""
    decayed, free = [], []
    for name, parameter in model.named_parameters():
        kept = parameter.ndim < 2 or "embed" in name or "token" in name
        (free if kept else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


def fit(model: nn.Module, kind: Kind, samples: Samples, steps: int | None = None) -> None:
    """Train `model` in place, printing its mean loss now and then. Batches are drawn from a stream of seed 0.

    `steps` takes the place of the recipe's, with a schedule of that length.
    """
    recipe = replace(kind.recipe, steps=steps or kind.recipe.steps)
    if kind.helper is not None:
        model.helper = kind.helper()
    model.train()
    groups = parameter_groups(model, recipe.weight_decay)
    optimizer = torch.optim.AdamW(groups, lr=recipe.peak_learning_rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate_factor(step, recipe))
    random, begun, total, shown = Random(0), time.perf_counter(), 0.0, max(1, recipe.steps // 40)
    for step in range(1, recipe.steps + 1):
        loss = kind.loss(model, [samples[i] for i in random.randint(0, len(samples), recipe.batch)], random)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.max_gradient_norm)
        optimizer.step()
        schedule.step()
        total += loss.item()
        if step % shown == 0:
            passed, used = time.perf_counter() - begun, time.process_time()
            print(f"step {step}/{recipe.steps}  loss {total / shown:.4f}  {passed:.0f} s, {used:.0f} s CPU", flush=True)
            total = 0.0
    if kind.helper is not None:
        del model.helper
    model.eval()


def drawn(kind: Kind, split: str, count: int) -> list[Any]:
    """The first `count` scenes of a split, with a sign of life."""
    begun, found = time.perf_counter(), []
    for index in range(count):
        found.append(kind.draw(split, index))
        if (index + 1) % 1000 == 0:
            print(f"{index + 1}/{count} scenes drawn  {time.perf_counter() - begun:.0f} s", flush=True)
    return found


def pixels(images: Sequence[np.ndarray], mean: Sequence[float], deviation: Sequence[float]) -> Tensor:
    """uint8 [height, width, 3] each as float32 [n, 3, height, width], (x / 255 - mean) / deviation."""
    scaled = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 255
    return (scaled - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(deviation).view(3, 1, 1)
