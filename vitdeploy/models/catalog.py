"""The table of architectures that are ours, and what a name or a bare state dict stands for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitdeploy.errors import CheckpointError
from vitdeploy.models import detr_family, prefixes, swin_family, transformer_family, vit_family
from vitdeploy.models.family import Family, Hints, Recognised
from vitdeploy.models.names import unknown_model
from vitdeploy.models.vit import ViTConfig

FAMILIES: tuple[Family, ...] = (
    vit_family.FAMILY,
    vit_family.DEIT_FAMILY,
    swin_family.FAMILY,
    detr_family.FAMILY,
    transformer_family.FAMILY,
)
SHOWN_NAMES = 6
_INITIAL = {Tensor.uniform_, Tensor.normal_, nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_}


@dataclass(frozen=True)
class Entry:
    """One row of the list: a built-in name with its family, its parameters and its default image size (h, w)."""

    name: str
    family: str
    paper: str
    parameters: int
    task: str
    image_size: tuple[int, int]


def find(name: str) -> tuple[Family, Any] | None:
    """The family and config of a built-in name, None where it is nobody's.

    Raises:
        UnknownModelError: a family's name with sizes that contradict each other.
    """
    for family in FAMILIES:
        config = family.names.get(name) or family.parse(name)
        if config is not None:
            return family, config
    return None


def find_or_raise(name: str) -> tuple[Family, Any]:
    """As `find`; raises UnknownModelError with the nearest names."""
    found = find(name)
    if found is None:
        raise unknown_model(name)
    return found


def family_named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def recognise(state: Mapping[str, Tensor], hints: Hints) -> Recognised | None:
    """Whose state dict this is, by keys and shapes; None where no family of ours knows it.

    Raises:
        CheckpointError: a family knows it, but not enough can be known.
    """
    return next((found for family in FAMILIES if (found := family.recognise(state, hints)) is not None), None)


def recognise_within(
    state: Mapping[str, Tensor], hints: Hints, file: str, fits: Callable[[Recognised], bool] = lambda found: True
) -> Recognised | None:
    """As `recognise`; where the state as it is is nobody's, of the one part of it that is somebody's, whatever prefix
    its keys have. Where several parts are, of the one that `fits`.

    Raises:
        CheckpointError: as `recognise`; or several parts fit, or tensors stand beside the part that may belong to it.
    """
    part = prefixes.search(state, lambda inner: recognise(inner, hints), file, fits)
    return part and dataclasses.replace(part[0], notes=(*part[1], *part[0].notes))


def unrecognised(state: Mapping[str, Tensor], source: str) -> CheckpointError:
    keys = list(state)
    return CheckpointError(
        f"{source} is of no architecture that vitdeploy knows by its keys",
        found=f"{len(keys)} tensors: {', '.join(keys[:SHOWN_NAMES])}{' ...' if len(keys) > SHOWN_NAMES else ''}",
        wanted=f"a {', '.join(family.name for family in FAMILIES)} state dict",
        fix="name it (timm:NAME --checkpoint FILE), give its folder (hf:FOLDER), or --model module:function",
    )


def entries(pattern: str = "*") -> Iterator[Entry]:
    """The built-in names that match an fnmatch pattern. Parameters are counted without allocating them."""
    for family in FAMILIES:
        for name, config in family.names.items():
            if fnmatchcase(name, pattern):
                signature = family.describe(config)
                count = _parameters(family, config)
                yield Entry(name, family.name, family.paper, count, signature.task, signature.image_size)


def _parameters(family: Family, config: Any) -> int:
    """How many parameters a config's module has. The blocks of a ViT are alike: two of them tell the size of all."""
    if isinstance(config, ViTConfig) and config.depth > 2:
        one, two = (_parameters(family, dataclasses.replace(config, depth=depth)) for depth in (1, 2))
        return one + (config.depth - 1) * (two - one)
    with torch.device("meta"), _WithoutNoise():
        return sum(parameter.numel() for parameter in family.build(config).parameters())


class _WithoutNoise(TorchFunctionMode):
    """Initial values, which take most of the time and a large import even where there is no memory, are not made."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _INITIAL:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)
