"""A checkpoint's name and config against the model that is asked for."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models import catalog
from vitdeploy.models.checkpoints.fit import load_state
from vitdeploy.models.family import Family, Recognised
from vitdeploy.models.model_folder.folder import counted, stated_size, vision_part
from vitdeploy.runtime.values import number_of_classes

# --- A checkpoint under a built-in name -------------------------------------------------------------------------------
# what the name tells that tensors cannot, and whether the two fit each other.
#
# Number of classes, channels and vocabulary, and the form of the head are the checkpoint's own. So is the image size,
# where its tensors tell. Everything that makes another architecture must be as the name says.


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


# --- Check that a model's config file and its weights belong to the same model ----------------------------------------
# Our models are built from the weights, so a config of another depth or width would go unnoticed, and yet labels,
# preprocessing, heads and epsilon come from it. Everything that both contain is compared; all differences are reported.
# A key that the config lacks claims nothing.


# Keys of a config of an image and a text model that are about both.
ABOVE = ("projection_dim",)
RATIO = 0.02  # a width of whole numbers is a ratio only nearly


@dataclass(frozen=True)
class _Claim:
    """A key's value in the config, and the value that the weights have instead, as JSON values.

    `mend`: how to fix the config, for people; "" if only another file would do.
    """

    key: str
    said: Any
    found: Any
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.key} {_json(self.said)}, the weights have {_json(self.found)}"


def check_config(config: Mapping[str, Any], found: Recognised, where: str) -> None:
    """Compare `config` (timm's or transformers') with the weights that became `found`.

    Raises:
        CheckpointError: lists every key that says something else than the weights.
    """
    wrong = [claim for claim in _claims(config, found) if not _equal(claim.said, claim.found)]
    if not wrong:
        return
    mends = [claim.mend for claim in wrong]
    raise CheckpointError(
        f"config.json does not fit the weights in {where}",
        found="; ".join(map(str, wrong)),
        wanted="the config and the weights of one model",
        fix="take both from one save of the model"
        + (f"; or, where the weights are the right ones, in config.json: {', '.join(mends)}" if all(mends) else ""),
    )


def _keyed(key: str, said: Any, found: Any, within: str = "") -> _Claim:
    pair = f'"{key}": {_json(found)}'
    return _Claim(key, said, found, f'"{within}": {{{pair}}}' if within else pair)


def _equal(said: Any, found: Any) -> bool:
    if isinstance(said, list | tuple) and isinstance(found, list | tuple):
        return len(said) == len(found) and all(map(_equal, said, found))
    if isinstance(said, int | float) and isinstance(found, int | float) and float in (type(said), type(found)):
        return abs(said - found) < RATIO
    return bool(said == found)


def _json(value: Any) -> str:
    return json.dumps(round(value, 4) if isinstance(value, float) else value)


def _claims(config: Mapping[str, Any], found: Recognised) -> Iterator[_Claim]:
    family, own = catalog.family_named(found.family), found.config
    if "model_type" in config:
        yield from _of_transformers(config, family, own)
    elif "architecture" in config:
        yield from _of_timm(config, family, own)
    yield from _of_classes(config, family, own)


def _of_classes(config: Mapping[str, Any], family: Family, own: Any) -> Iterator[_Claim]:
    signature = family.describe(own)
    if signature.task == "features":
        return
    classes = number_of_classes(signature.outputs, signature.postprocess)
    names = counted(config)
    if names is not None and names[1] != classes:
        key = names[0]
        yield _Claim(f"classes by {key}", names[1], classes, f"no {'id2label, no label2id' if '2' in key else key}")


def _of_transformers(config: Mapping[str, Any], family: Family, own: Any) -> Iterator[_Claim]:
    values = vision_part(config)
    for key, value in family.transformers_keys(values, own).items():
        said, within = (values, "vision_config") if values is not config and key not in ABOVE else (config, "")
        if said.get(key) is not None:
            yield _keyed(key, said[key], value, within)
    name = str((config.get("architectures") or [""])[0])
    if "ForImageClassification" in name and family.num_classes(own) == 0:
        yield _keyed("architectures", [name], [name.partition("ForImageClassification")[0] + "Model"])


def _of_timm(config: Mapping[str, Any], family: Family, own: Any) -> Iterator[_Claim]:
    arguments = config.get("model_args")
    arguments = arguments if isinstance(arguments, Mapping) else {}
    table = family.timm_arguments
    said = [(key, field) for key, field in table.items() if arguments.get(key) is not None]
    yield from (_keyed(key, arguments[key], getattr(own, field), "model_args") for key, field in said)
    name = str(config["architecture"])
    named = named_config(name)
    if type(named) is type(own):
        implied = [(key, field) for key, field in table.items() if key != "in_chans" and arguments.get(key) is None]
        yield from (_Claim(f"{name} has {key}", getattr(named, field), getattr(own, field)) for key, field in implied)
    size = stated_size(config)
    if size is not None and family.tells_size(own):
        # The argument counts before the evaluation's size.
        key = "img_size" if arguments.get("img_size") else "input_size"
        built = family.image_size(own)
        yield _Claim(key, list(size), list(built or ()), f'"model_args": {{"img_size": {_json(built)}}}')
    classes = arguments.get("num_classes", config.get("num_classes"))
    if classes is not None and family.num_classes(own) is not None:
        within = "model_args" if "num_classes" in arguments else ""
        yield _keyed("num_classes", classes, family.num_classes(own), within)


def named_config(name: str) -> Any:
    """Our config of an architecture as a file names it; None if it is nobody's of ours, or contradicts itself."""
    try:
        found = catalog.find(name)
    except UnknownModelError:
        return None
    return found[1] if found else None
