"""The patch tokens of a model of features, as a module that gives them alone: a row for each kind of module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError
from vitdeploy.models.architectures.swin import SwinTransformer
from vitdeploy.models.architectures.vit import VisionTransformer
from vitdeploy.models.external.adapted import Adapted
from vitdeploy.models.loaded import LoadedModel
from vitdeploy.models.model_folder.config import sides

Grid = tuple[int, int]


class PatchTokens(nn.Module):
    """float32 [b, channels, height, width] -> [b, rows * columns, width], the tokens of the patches, row by row.

    `tokens` gives them, perhaps after others, which are left out. `grid`: (rows, columns).
    """

    def __init__(self, model: nn.Module, tokens: Callable[[nn.Module, Tensor], Tensor], grid: Grid) -> None:
        super().__init__()
        self.model, self.tokens, self.grid = model, tokens, grid

    def forward(self, image: Tensor) -> Tensor:
        return self.tokens(self.model, image)[:, -self.grid[0] * self.grid[1] :]


def patch_tokens(original: LoadedModel) -> tuple[PatchTokens, int]:
    """The module that gives a model's patch tokens, and their width.

    Raises:
        CheckpointError: it has none, or they form no grid over the image.
    """
    module, size = original.module, original.signature.image_size
    tokens = _reader(original)
    if tokens is None:
        outputs = ", ".join(map(str, original.signature.outputs))
        raise CheckpointError(
            f"{original.name} gives no patch tokens, which anomalies are found by",
            found=f"{original.signature.task}: {outputs}",
            wanted="a Vision Transformer or Swin of vitdeploy's, timm's own module, or a model with the output "
            "patch_features [batch, patches, width]",
            fix="take the backbone alone, such as DINOv2's Dinov2Model, or wrap it in a module that returns "
            "features [batch, width] and patch_features",
        )
    with torch.no_grad():
        found = tokens(module, torch.zeros(1, original.signature.channels, *size))
    return PatchTokens(module, tokens, _grid(original, found.shape[1], size)).eval(), int(found.shape[2])


def _reader(original: LoadedModel) -> Callable[[nn.Module, Tensor], Tensor] | None:
    module = original.module
    names = [tensor.name for tensor in original.signature.outputs]
    if isinstance(module, VisionTransformer | SwinTransformer):  # of a classifier too, whose head is passed by
        return _encoded
    if "patch_features" in names:
        return _second if len(names) > 1 else _only
    if isinstance(module, Adapted) and hasattr(module.model, "forward_features"):
        return _timm_features
    return None


def _encoded(module: nn.Module, image: Tensor) -> Tensor:
    assert isinstance(module, VisionTransformer | SwinTransformer)
    return module.encode(image)


def _only(module: nn.Module, image: Tensor) -> Tensor:
    found: Tensor = module(image)
    return found


def _second(module: nn.Module, image: Tensor) -> Tensor:
    found: Tensor = module(image)[1]
    return found


def _timm_features(module: nn.Module, image: Tensor) -> Tensor:
    """timm's tokens [b, n, d], or a map [b, d, h, w], or [b, h, w, d] of a model that says so by its width."""
    model: Any = module.model
    found: Tensor = model.forward_features(image)
    if found.ndim == 3:
        return found
    last = found.shape[-1] == model.num_features and found.shape[1] != model.num_features
    return found.flatten(1, 2) if last else found.flatten(2).transpose(1, 2)


def _grid(original: LoadedModel, tokens: int, size: tuple[int, int]) -> Grid:
    """(rows, columns) of the patches: as the model says, else the only grid of the image's aspect.

    Tokens before the patches are left out only where the model says how many they are: its registers."""
    module = original.module
    model: Any = module.model if isinstance(module, Adapted) else module
    config = getattr(model, "config", None)
    if isinstance(module, VisionTransformer):
        return module.config.grid
    before = getattr(model, "num_prefix_tokens", None) or getattr(config, "num_register_tokens", None) or 0
    patch = sides(getattr(config, "patch_size", None) or getattr(getattr(model, "patch_embed", None), "patch_size", 0))
    if patch and (size[0] // patch[0]) * (size[1] // patch[1]) in (tokens, tokens - before):
        return size[0] // patch[0], size[1] // patch[1]
    for count in dict.fromkeys((tokens - before, tokens)):
        for rows in range(1, count + 1):
            if count % rows == 0 and rows * size[1] == count // rows * size[0]:
                return rows, count // rows
    raise CheckpointError(
        f"the tokens of {original.name} form no grid over its images",
        found=f"{tokens} tokens of an image of {size[0]}x{size[1]}",
        wanted="rows times columns, in the proportions of the image",
        fix="wrap the model in a module whose patch_features are the patches alone, or choose another --image-size",
    )
