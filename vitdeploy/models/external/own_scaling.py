"""How a module scales its own pixels: its forward pass up to the first layer, for a few images.

The module's own code runs, under a mode of PyTorch that sees each operator. Operators that scale, shift and move values
are followed from the image on; the pass ends at the first other one that reads what they made.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vitdeploy.models.loaded import LoadedModel
from vitdeploy.models.pixel_range import Floats, scaling_of, settled

MOVES = (
    *("_reshape_alias", "_to_copy", "_unsafe_view", "alias", "cat", "clone", "detach", "expand", "flip", "index"),
    *("index_select", "lift_fresh", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "stack"),
    *("transpose", "unbind", "unsqueeze", "view"),
    # Of values that are even, or lie between the bounds, as those that are tried are.
    *("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "clamp", "clamp_max", "clamp_min", "upsample_bicubic2d"),
    *("upsample_bilinear2d", "upsample_nearest2d"),
)
NORMS = ("_batch_norm_no_update", "_native_batch_norm_legit_no_training", "native_batch_norm")
# Of these one operand may be of the image, or both; of the others one alone.
SUMS, PRODUCTS = ("add", "rsub", "sub"), ("div", "mul", "neg")


class _Reached(BaseException):
    """The first layer is reached; no module takes it for an error of its own."""


class _Following(TorchDispatchMode):
    """`values`: what the first layer read of the image."""

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.followed = [image]
        self.values: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = list(_tensors((args, kwargs or {})))
        reads = [value for value in operands if any(value is image for image in self.followed)]
        if not reads:
            return func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        linear = name in (*MOVES, *SUMS) or (name in (*PRODUCTS, *NORMS) and reads == [args[0]])
        linear |= name == "mul" and len(reads) == 1
        if not linear:
            self.values = reads
            raise _Reached
        made = func(*args, **(kwargs or {}))
        self.followed += _tensors(made[:1] if name in NORMS else made)
        return made


def _tensors(values: Any) -> list[Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def first_values(module: nn.Module, images: Floats) -> list[Floats]:
    """What the first layer of a module reads of images; [] where the module does not come so far."""
    image = torch.from_numpy(images.copy())  # which the module may change
    following = _Following(image)
    try:
        with torch.no_grad(), following:
            module(image)
    except _Reached:
        pass
    except Exception:  # a scripted module wraps whatever ends it
        return [value.numpy() for value in following.values]
    return [value.numpy() for value in following.values]


def with_own_scaling(original: LoadedModel, assumed: str | None) -> LoadedModel:
    """The model with the pixels that its own scaling asks for, and notes on it; `assumed` as of `settled`."""
    signature, spec = original.signature, original.preprocess
    assert spec is not None
    scaling = scaling_of(lambda images: first_values(original.module, images), spec.channels, signature.image_size)
    spec, notes = settled(spec, scaling, assumed)
    return dataclasses.replace(original, preprocess=spec, notes=(*original.notes, *notes))
