"""The table of architectures; it finds the one that a name or a bare state dict stands for.

Our own come first; those of other packages (entry points of the group `vitdeploy.families`) are loaded if none of ours
fits, or if all are requested.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitdeploy.errors import CheckpointError, HostError
from vitdeploy.extensions import load_row
from vitdeploy.models import names
from vitdeploy.models.checkpoints import fit as prefixes
from vitdeploy.models.families import detr, rfdetr, rtdetr, swin, transformer, vit
from vitdeploy.models.family import Family, Hints, Recognised

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

FAMILIES: tuple[Family, ...] = (
    vit.FAMILY,
    vit.DEIT_FAMILY,
    swin.FAMILY,
    detr.FAMILY,
    rtdetr.FAMILY,
    rfdetr.FAMILY,
    transformer.FAMILY,
)
SHOWN_NAMES = 6
_INITIAL = {Tensor.uniform_, Tensor.normal_, nn.init.uniform_, nn.init.normal_, nn.init.kaiming_uniform_}


@dataclass(frozen=True)
class CatalogEntry:
    """One row of the list: a built-in name with its family, its parameters and its default image size (h, w)."""

    name: str
    family: str
    paper: str
    parameters: int
    task: str
    image_size: tuple[int, int]


def families() -> Iterator[Family]:
    """All families; those of other packages are loaded when the caller is through with ours.

    Raises:
        HostError: a family of another package cannot be loaded, or has names that are not its own.
    """
    yield from FAMILIES
    yield from _extensions()


def find(name: str) -> tuple[Family, Any] | None:
    """The family and config of a built-in name, None if it is nobody's.

    Raises:
        UnknownModelError: a family's name with sizes that contradict each other.
        HostError: as `families`; or two families of other packages have the name.
    """
    if (own := _find(FAMILIES, name)) is not None:
        return own
    entries = names.extensions_for(name)
    found = [(entry, known) for entry in entries if (known := _find([_extension(entry)], name)) is not None]
    if len(found) > 1:
        raise _claimed(name, [entry.value for entry, _ in found])
    return found[0][1] if found else None


def _find(rows: Iterable[Family], name: str) -> tuple[Family, Any] | None:
    for family in rows:
        config = family.names.get(name) or family.parse(name)
        if config is not None:
            return family, config
    return None


def _extensions() -> tuple[Family, ...]:
    return tuple(map(_extension, names.extensions().values()))


def _extension(entry: EntryPoint) -> Family:
    family = load_row(entry, Family)
    if family.name != entry.name:
        raise HostError(
            f"the family of the entry point {entry.name!r} is called otherwise",
            found=f"{entry.value}: {family.name!r}",
            wanted=f"{entry.name!r}: commands tell by it whose name is meant before they load a family",
            fix="give both one name",
        )
    for name in family.names:
        if entry not in names.extensions_for(name):
            raise HostError(
                f"the family {family.name!r} has a name that is not told by the family's",
                found=f"{entry.value}: {name}",
                wanted=f"{family.name}, or {family.name}_...",
                fix="rename the model",
            )
        if (own := _find(FAMILIES, name)) is not None:
            raise _claimed(name, [f"vitdeploy's own {own[0].name}", entry.value])
    return family


def _claimed(name: str, claimants: list[str]) -> HostError:
    return HostError(
        f"two families have the name {name}",
        found=" and ".join(claimants),
        wanted="one",
        fix="rename the model, or uninstall the package that brings it",
    )


def find_or_raise(name: str) -> tuple[Family, Any]:
    """Like `find`, but raises UnknownModelError with the nearest names."""
    found = find(name)
    if found is None:
        others = (known for entry in names.extensions_for(name) for known in _extension(entry).names)
        raise names.unknown_model(name, others)
    return found


def family_named(name: str) -> Family:
    return next(family for family in families() if family.name == name)


def recognise(
    state: Mapping[str, Tensor], hints: Hints, readers: Collection[Family] | None = None
) -> Recognised | None:
    """Find the family of a state dict by keys and shapes; None if none of the `readers` (default: all) recognises it.

    Raises:
        CheckpointError: a family recognises it, but the tensors do not determine everything.
    """
    asked = families() if readers is None else readers
    return next((found for family in asked if (found := family.recognise(state, hints)) is not None), None)


def recognise_within(
    state: Mapping[str, Tensor],
    hints: Hints,
    file: str,
    fits: Callable[[Recognised], bool] = lambda found: True,
    readers: Collection[Family] | None = None,
) -> Recognised | None:
    """Like `recognise`; if no family recognises the whole state, try its parts, whatever prefix their keys have. If
    several parts are recognised, take the one that `fits`.

    Raises:
        CheckpointError: as `recognise`; or several parts fit, or tensors outside the part may belong to the model.
    """

    def within(rows: Collection[Family]) -> Recognised | None:
        part = prefixes.search(state, lambda inner: recognise(inner, hints, rows), file, fits)
        return part and dataclasses.replace(part[0], notes=(*part[1], *part[0].notes))

    if readers is not None:
        return within(readers)
    return within(FAMILIES) or ((others := _extensions()) and within(others)) or None


def unrecognised(state: Mapping[str, Tensor], source: str) -> CheckpointError:
    keys = list(state)
    return CheckpointError(
        f"{source} is of no architecture that vitdeploy knows by its keys",
        found=f"{len(keys)} tensors: {', '.join(keys[:SHOWN_NAMES])}{' ...' if len(keys) > SHOWN_NAMES else ''}",
        wanted=f"a {', '.join((*names.NAMES, *names.extensions()))} state dict",
        fix="name it (timm:NAME --checkpoint FILE), give its folder (hf:FOLDER), or --model module:function",
    )


def entries(pattern: str = "*") -> Iterator[CatalogEntry]:
    """The built-in names that match an fnmatch pattern. Parameters are counted without allocating them."""
    for family in families():
        for name, config in family.names.items():
            if fnmatchcase(name, pattern):
                signature = family.describe(config)
                count = family.parameters.get(name) or _parameters(family, config)
                yield CatalogEntry(name, family.name, family.paper, count, signature.task, signature.image_size)


def _parameters(family: Family, config: Any) -> int:
    """The number of parameters of a config's module. If its blocks are alike, two of them give the size of all."""
    field = family.repeated
    count = getattr(config, field) if field else 0
    if field and count > 2:
        one, two = (_parameters(family, dataclasses.replace(config, **{field: number})) for number in (1, 2))
        return int(one + (count - 1) * (two - one))
    try:
        with torch.device("meta"), _WithoutNoise():
            module = family.build(config)
    except (NotImplementedError, RuntimeError):  # it reads a tensor's numbers while it is built
        module = family.build(config)
    return sum(parameter.numel() for parameter in module.parameters())


class _WithoutNoise(TorchFunctionMode):
    """Initial values, which take most of the time and a large import even where there is no memory, are not made."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _INITIAL:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)
