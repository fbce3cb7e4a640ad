"""Which image sizes a module takes, found by running it on tensors without numbers: patches, windows and strides that a
size must be a multiple of have other names in every library.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

# What sizes of published models are multiples of: patches and strides, with windows of 2 to 8 of them.
UNITS = (8, 12, 14, 16, 24, 28, 32, 48, 56, 64, 96, 112, 128, 224, 256)
# Sizes that are tried before there is no answer.
TRIALS = 24


class FewTokens(Exception):
    """More is to be taken than there is: how many there are, and how many are wanted."""


class QueriesTaken(TorchFunctionMode):
    """Inside it a `torch.topk` of more than there is raises `FewTokens`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {**dict(zip(("input", "k", "dim"), args, strict=False)), **(kwargs or {})}
        if func in (torch.topk, torch.Tensor.topk) and isinstance(options.get("k"), int):
            tokens = options["input"].shape[options.get("dim", -1)]
            if 0 < tokens < options["k"]:
                raise FewTokens(tokens, options["k"])
        return func(*args, **(kwargs or {}))


def smallest_size(
    model: nn.Module, size: tuple[int, int], channels: int, arguments: Mapping[str, Any], share: float
) -> tuple[int, int] | None:
    """The smallest (height, width) of about the same aspect that the module takes; it needs `share` times the tokens
    that it has at `size`."""
    least = [side * share**0.5 for side in size]
    units = [(unit, up) for unit in UNITS for up in (0, 1)]
    sizes = {(int(least[0] // unit + up) * unit, int(least[1] // unit + up) * unit) for unit, up in units}
    sizes = {each for each in sizes if min(each) > 0 and max(each) > max(size)}
    return next(
        (
            each
            for each in sorted(sizes, key=lambda each: (each[0] * each[1], each))
            if runs(model, each, channels, arguments)
        ),
        None,
    )


def nearest_sizes(
    model: nn.Module, size: tuple[int, int], channels: int, arguments: Mapping[str, Any]
) -> list[tuple[int, int]]:
    """The nearest (height, width) below and above `size` that the module takes, where any is found; smallest first."""
    found: dict[bool, tuple[int, int]] = {}
    first = next((part for part in model.modules() if isinstance(part, nn.Conv2d)), None)
    stride = max(first.stride) if first is not None else 1  # what is no multiple of a patch would be cut off
    for candidate in _candidates(size, int(stride)):
        smaller = candidate < size
        if smaller not in found and runs(model, candidate, channels, arguments):
            found[smaller] = candidate
        if len(found) == 2:
            break
    return sorted(found.values())


def _candidates(size: tuple[int, int], stride: int) -> Iterator[tuple[int, int]]:
    """Sizes whose sides are the next multiples of one unit, the nearest first."""
    sizes = {
        (height // unit * unit + up * unit, width // unit * unit + up * unit)
        for height, width in [size]
        for unit in UNITS
        if unit % stride == 0
        for up in (0, 1)
    } - {size}
    usable = [each for each in sizes if min(each) > 0]
    yield from sorted(usable, key=lambda each: (sum(abs(a - b) for a, b in zip(each, size, strict=True)), each))[
        :TRIALS
    ]


def runs(model: nn.Module, size: tuple[int, int], channels: int, arguments: Mapping[str, Any]) -> bool:
    """Whether the module gives anything for images of this size. Nothing is computed."""
    logger = logging.getLogger(fake_tensor.__name__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it reports every operator that refuses a shape
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            model(torch.empty(2, channels, *size), **arguments)
    except Exception:
        return False
    finally:
        logger.setLevel(level)
    return True
