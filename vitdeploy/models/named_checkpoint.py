"""A checkpoint under a built-in name: what the name tells that tensors cannot, and whether the two fit each other.

Number of classes, channels and vocabulary, and the form of the head are the checkpoint's own. So is the image size,
where its tensors tell. Everything that makes another architecture must be as the name says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models import catalog
from vitdeploy.models.checkpoints.load_state import load_state
from vitdeploy.models.family import Family, Recognised


def read_as(
    name: str, family: Family, config: Any, state: Mapping[str, Tensor], heads: int | None, file: str
) -> Recognised:
    """The state dict in `file`, in any key style, as the model of a built-in name with that family and config.

    `heads`: the user's flag, None without one.

    Raises:
        CheckpointError: the state dict is of no style, or of another architecture than the name.
    """
    told = family.hints(name, config)
    hints = dataclasses.replace(told, heads=heads or told.heads, image_size=family.image_size(config))
    # All of ours are asked, so that an error can say which one it is; of another package's the family alone.
    readers = catalog.FAMILIES if family in catalog.FAMILIES else (family,)
    try:
        found = catalog.recognise_within(
            state, hints, file, lambda part: not _differences(part, family, config), readers
        )
    except CheckpointError as error:
        raise CheckpointError(
            f"{file} cannot be read as {name}",
            found=": ".join(filter(None, (error.message, error.found))),
            wanted=error.wanted,
            fix=error.fix,
        ) from None
    if found is None:
        load_state(family.empty(config), state, file)  # names what is missing and what is unexpected
        raise catalog.unrecognised(state, file)
    refuse_another(found, name, family, config, file, heads)
    notes = [
        f"{getattr(found.config, field)} {what} in the checkpoint, {name} has {getattr(config, field)} by default"
        for field, what in family.free.items()
        if getattr(found.config, field, None) not in (getattr(config, field, None), 0)
    ]
    own_size, said_size = family.image_size(found.config), family.image_size(config)
    if own_size and said_size and own_size != said_size:
        said = f"{name} says {said_size[0]}x{said_size[1]}"
        notes.append(f"image size {own_size[0]}x{own_size[1]}, as the checkpoint's positions have; {said}")
    settled, changed = family.settle(found.config, config)
    remarks = [f"as {name} has: {', '.join(changed)}"] if changed else []
    return dataclasses.replace(found, config=settled, notes=(*found.notes, *notes, *remarks))


def refuse_another(
    found: Recognised, name: str, family: Family, config: Any, file: str, heads: int | None = None
) -> None:
    """Raise CheckpointError if what was recognised is not the architecture of a name."""
    if differences := _differences(found, family, config):
        asked = heads is not None and all(difference.startswith("heads ") for difference in differences)
        raise _another(file, name, differences, f"leave --heads out: {name} says it" if asked else None)


def _differences(found: Recognised, family: Family, config: Any) -> list[str]:
    if found.family != family.name:
        return [f"a {found.family} instead of a {family.name}"]
    return family.differences(found.config, config)


def _another(file: str, name: str, differences: list[str], fix: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"{file} is not a checkpoint of {name}",
        found=", ".join(differences),
        wanted=f"the architecture of {name}, with any number of classes",
        fix=fix or "leave the name out: the architecture is then recognised by keys and shapes",
    )
