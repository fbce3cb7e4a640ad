"""The table of architectures: look up a name, recognise a bare state dict, and check that a checkpoint or a config
belongs to a named model.

Built-in families come first; those of other packages (entry points of the group `vitdeploy.families`) are loaded only
if no built-in family matches, or if all families are requested.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitdeploy.errors import CheckpointError, HostError, UnknownModelError
from vitdeploy.extensions import load_row
from vitdeploy.models import names
from vitdeploy.models.checkpoints import fit as prefixes
from vitdeploy.models.families import detr, rfdetr, rtdetr, swin, transformer, vit
from vitdeploy.models.family import Family, Hints, Recognised
from vitdeploy.models.model_folder.folder import counted, stated_size, vision_part
from vitdeploy.runtime.values import number_of_classes

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
    """One row of `vitdeploy export list`: name, family, number of parameters and default image size (h, w)."""

    name: str
    family: str
    paper: str
    parameters: int
    task: str
    image_size: tuple[int, int]


def families() -> Iterator[Family]:
    """Yield all families, built-in ones first; those of other packages are loaded only when they are reached.

    Raises:
        HostError: a family of another package cannot be loaded, or uses names outside its own prefix.
    """
    yield from FAMILIES
    yield from _extensions()


def find(name: str) -> tuple[Family, Any] | None:
    """Return the family and config of a model name, None if no family has it.

    Raises:
        UnknownModelError: a family's name with sizes that contradict each other.
        HostError: as `families`; or two families of other packages use the same name.
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
            f"the entry point {entry.name!r} provides a family with a different name",
            found=f"{entry.value}: {family.name!r}",
            expected=f"{entry.name!r}: model names are matched to entry points before a family is loaded",
            fix="give the entry point and the family the same name",
        )
    for name in family.names:
        if entry not in names.extensions_for(name):
            raise HostError(
                f"a model name of the family {family.name!r} does not begin with the family's name",
                found=f"{entry.value}: {name}",
                expected=f"{family.name}, or {family.name}_...",
                fix="rename the model",
            )
        if (own := _find(FAMILIES, name)) is not None:
            raise _claimed(name, [f"vitdeploy's own {own[0].name}", entry.value])
    return family


def _claimed(name: str, claimants: list[str]) -> HostError:
    return HostError(
        f"two families have the name {name}",
        found=" and ".join(claimants),
        expected="one family",
        fix="rename the model, or uninstall the package that provides it",
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
    """Recognise the family of a state dict by keys and shapes; None if none of the `readers` (default: all) does.

    Raises:
        CheckpointError: a family recognises it, but the tensors do not determine everything.
    """
    candidates = families() if readers is None else readers
    return next((found for family in candidates if (found := family.recognise(state, hints)) is not None), None)


def recognise_within(
    state: Mapping[str, Tensor],
    hints: Hints,
    file: str,
    fits: Callable[[Recognised], bool] = lambda found: True,
    readers: Collection[Family] | None = None,
) -> Recognised | None:
    """Like `recognise`; if no family recognises the whole state, try the parts below each key prefix. If several parts
    are recognised, choose the one for which `fits` is true.

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
        f"the keys of {source} match no architecture that vitdeploy knows",
        found=f"{len(keys)} tensors: {', '.join(keys[:SHOWN_NAMES])}{' ...' if len(keys) > SHOWN_NAMES else ''}",
        expected=f"a state dict of one of these families: {', '.join((*names.NAMES, *names.extensions()))}",
        fix="name the model (timm:NAME --checkpoint FILE), give its folder (hf:FOLDER), or use --model module:function",
    )


def entries(pattern: str = "*") -> Iterator[CatalogEntry]:
    """Yield the built-in models whose names match an fnmatch pattern. Parameters are counted, not allocated."""
    for family in families():
        for name, config in family.names.items():
            if fnmatchcase(name, pattern):
                signature = family.describe(config)
                count = family.parameters.get(name) or _parameters(family, config)
                yield CatalogEntry(name, family.name, family.paper, count, signature.task, signature.image_size)


def _parameters(family: Family, config: Any) -> int:
    """Return the number of parameters of a config's module. If its blocks are equal, two of them give the total."""
    field = family.repeated
    count = getattr(config, field) if field else 0
    if field and count > 2:
        one, two = (_parameters(family, dataclasses.replace(config, **{field: number})) for number in (1, 2))
        return int(one + (count - 1) * (two - one))
    try:
        with torch.device("meta"), _WithoutNoise():
            module = family.build(config)
    except (NotImplementedError, RuntimeError):  # its constructor reads tensor values
        module = family.build(config)
    return sum(parameter.numel() for parameter in module.parameters())


class _WithoutNoise(TorchFunctionMode):
    """Skip weight initialisation, which takes most of the time and a large import even on the meta device."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in _INITIAL:
            return args[0] if args else kwargs["tensor"]
        return function(*args, **kwargs)


# --- A checkpoint under a built-in name -------------------------------------------------------------------------------
# what the name says that tensors cannot show, and whether the two match.
#
# The checkpoint determines the number of classes, channels and vocabulary entries and the form of the head, and the
# image size if its tensors show it. Everything else in the architecture must match the name.


def read_as(
    name: str, family: Family, config: Any, state: Mapping[str, Tensor], heads: int | None, file: str
) -> Recognised:
    """Read the state dict in `file`, in any key style, as the model of a built-in name with that family and config.

    `heads`: the value of the user's --heads, or None.

    Raises:
        CheckpointError: the key style is unknown, or the state dict belongs to another architecture.
    """
    known = family.hints(name, config)
    hints = dataclasses.replace(known, heads=heads or known.heads, image_size=family.image_size(config))
    # Try all built-in families, so that an error can name the right one; from other packages try this family only.
    readers = FAMILIES if family in FAMILIES else (family,)
    try:
        found = recognise_within(state, hints, file, lambda part: not _differences(part, family, config), readers)
    except CheckpointError as error:
        raise CheckpointError(
            f"{file} cannot be read as {name}",
            found=": ".join(filter(None, (error.message, error.found))),
            expected=error.expected,
            fix=error.fix,
        ) from None
    if found is None:
        prefixes.load_state(family.empty(config), state, file)  # names what is missing and what is unexpected
        raise unrecognised(state, file)
    refuse_another(found, name, family, config, file, heads)
    notes = [
        f"{what}: {getattr(found.config, field)} in the checkpoint, {getattr(config, field)} in {name} by default"
        for field, what in family.free.items()
        if getattr(found.config, field, None) not in (getattr(config, field, None), 0)
    ]
    own_size, said_size = family.image_size(found.config), family.image_size(config)
    if own_size and said_size and own_size != said_size:
        default = f"the default of {name} is {said_size[0]}x{said_size[1]}"
        notes.append(f"image size {own_size[0]}x{own_size[1]}, from the checkpoint's position embeddings; {default}")
    settled, changed = family.settle(found.config, config)
    remarks = [f"taken from {name}: {', '.join(changed)}"] if changed else []
    return dataclasses.replace(found, config=settled, notes=(*found.notes, *notes, *remarks))


def refuse_another(
    recognised: Recognised, name: str, family: Family, config: Any, file: str, heads: int | None = None
) -> None:
    """Raise CheckpointError if the recognised architecture is not the named one."""
    if differences := _differences(recognised, family, config):
        only_heads = heads is not None and all(difference.startswith("heads ") for difference in differences)
        fix = f"omit --heads: {name} determines it" if only_heads else ""
        raise CheckpointError(
            f"{file} is not a checkpoint of {name}",
            found=", ".join(differences),
            expected=f"the architecture of {name}, with any number of classes",
            fix=fix or "omit the name: the architecture is then recognised by keys and shapes",
        )


def _differences(recognised: Recognised, family: Family, config: Any) -> list[str]:
    if recognised.family != family.name:
        return [f"a {recognised.family} instead of a {family.name}"]
    return family.differences(recognised.config, config)


# --- Check that a model's config file and its weights belong to the same model ----------------------------------------
# Our models are built from the weights, so a config with another depth or width would go unnoticed, although labels,
# preprocessing, heads and epsilon come from it. Every value that both contain is compared; all differences are
# reported. A key missing from the config is not compared.


# Top-level keys of an image-text config that apply to both parts.
ABOVE = ("projection_dim",)
RATIO = 0.02  # tolerance: a ratio of integer widths is only approximate


@dataclass(frozen=True)
class _Claim:
    """A config key whose value differs from the weights; both values as JSON values.

    `mend`: how to fix the config, for people; "" if only another file would do.
    """

    key: str
    said: Any
    found: Any
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.key} {_json(self.said)}, the weights have {_json(self.found)}"


def check_config(config: Mapping[str, Any], recognised: Recognised, where: str) -> None:
    """Compare `config` (timm's or transformers') with the weights that became `recognised`.

    Raises:
        CheckpointError: lists every key that contradicts the weights.
    """
    wrong = [claim for claim in _claims(config, recognised) if not _equal(claim.said, claim.found)]
    if not wrong:
        return
    mends = [claim.mend for claim in wrong]
    raise CheckpointError(
        f"config.json does not match the weights in {where}",
        found="; ".join(map(str, wrong)),
        expected="config and weights of the same model",
        fix="take both from the same save of the model"
        + (f"; or, if the weights are right, set in config.json: {', '.join(mends)}" if all(mends) else ""),
    )


def _keyed(key: str, stated: Any, found: Any, within: str = "") -> _Claim:
    pair = f'"{key}": {_json(found)}'
    return _Claim(key, stated, found, f'"{within}": {{{pair}}}' if within else pair)


def _equal(stated: Any, found: Any) -> bool:
    if isinstance(stated, list | tuple) and isinstance(found, list | tuple):
        return len(stated) == len(found) and all(map(_equal, stated, found))
    if isinstance(stated, int | float) and isinstance(found, int | float) and float in (type(stated), type(found)):
        return abs(stated - found) < RATIO
    return bool(stated == found)


def _json(value: Any) -> str:
    return json.dumps(round(value, 4) if isinstance(value, float) else value)


def _claims(config: Mapping[str, Any], recognised: Recognised) -> Iterator[_Claim]:
    family, own = family_named(recognised.family), recognised.config
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
        part, within = (values, "vision_config") if values is not config and key not in ABOVE else (config, "")
        if part.get(key) is not None:
            yield _keyed(key, part[key], value, within)
    name = str((config.get("architectures") or [""])[0])
    if "ForImageClassification" in name and family.num_classes(own) == 0:
        yield _keyed("architectures", [name], [name.partition("ForImageClassification")[0] + "Model"])


def _of_timm(config: Mapping[str, Any], family: Family, own: Any) -> Iterator[_Claim]:
    arguments = config.get("model_args")
    arguments = arguments if isinstance(arguments, Mapping) else {}
    table = family.timm_arguments
    stated = [(key, field) for key, field in table.items() if arguments.get(key) is not None]
    yield from (_keyed(key, arguments[key], getattr(own, field), "model_args") for key, field in stated)
    name = str(config["architecture"])
    named = named_config(name)
    if type(named) is type(own):
        implied = [(key, field) for key, field in table.items() if key != "in_chans" and arguments.get(key) is None]
        yield from (_Claim(f"{name} has {key}", getattr(named, field), getattr(own, field)) for key, field in implied)
    size = stated_size(config)
    if size is not None and family.tells_size(own):
        # The argument takes precedence over the evaluation size.
        key = "img_size" if arguments.get("img_size") else "input_size"
        built = family.image_size(own)
        yield _Claim(key, list(size), list(built or ()), f'"model_args": {{"img_size": {_json(built)}}}')
    classes = arguments.get("num_classes", config.get("num_classes"))
    if classes is not None and family.num_classes(own) is not None:
        within = "model_args" if "num_classes" in arguments else ""
        yield _keyed("num_classes", classes, family.num_classes(own), within)


def named_config(name: str) -> Any:
    """Return the built-in config for an architecture named in a file; None if unknown or contradictory."""
    try:
        found = find(name)
    except UnknownModelError:
        return None
    return found[1] if found else None
