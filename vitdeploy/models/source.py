"""From the recipe's source to the original model: a PyTorch module with its weights, in evaluation mode."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from vitdeploy.errors import CheckpointError
from vitdeploy.models.catalog import adapt_to_checkpoint, config_for
from vitdeploy.models.checkpoint import load_state, read_checkpoint
from vitdeploy.models.vit import VisionTransformer, ViTConfig
from vitdeploy.spec import PreprocessSpec

SEED = 0


@dataclass(frozen=True)
class Original:
    """The model that everything else is measured against."""

    name: str
    config: ViTConfig
    module: VisionTransformer

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())


def load_original(name: str, checkpoint: Path | None) -> Original:
    """Build the architecture `name` and load `checkpoint` into it; without one, the weights are seeded noise.

    Raises:
        UnknownModelError, MissingFileError, CheckpointError, NonFiniteWeightsError, PickleError.
    """
    config = config_for(name)
    if checkpoint is None:
        torch.manual_seed(SEED)
        return Original(name, config, VisionTransformer(config).eval())
    state = read_checkpoint(checkpoint)
    config = adapt_to_checkpoint(config, state)
    with torch.device("meta"):
        module = VisionTransformer(config)
    module = module.to_empty(device="cpu")
    load_state(module, state, str(checkpoint))
    return Original(name, config, module.eval())


def default_preprocess(config: ViTConfig) -> PreprocessSpec:
    """What timm's augreg ViTs were trained with: mean = std = 0.5, bicubic, the short side resized to crop / 0.9.

    Raises:
        CheckpointError: the patch embedding has neither 1 nor 3 channels, so no image fits it.
    """
    height, width = config.image_size
    if config.in_channels not in (1, 3):
        raise CheckpointError(
            "the model does not take images", found=f"{config.in_channels} input channels", wanted="1 (grey) or 3 (RGB)"
        )
    return PreprocessSpec(
        resize=int(min(height, width) / 0.9),
        crop=config.image_size,
        interpolation="bicubic",
        mean=(0.5,) * config.in_channels,
        std=(0.5,) * config.in_channels,
    )
