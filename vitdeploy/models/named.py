"""A checkpoint under a built-in name: what the name tells that tensors cannot, and whether the two fit each other.

Number of classes, channels and vocabulary, and the form of the head are the checkpoint's own. So is the image size,
where its tensors tell. Everything that makes another architecture must be as the name says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vitdeploy.errors import CheckpointError
from vitdeploy.models import catalog
from vitdeploy.models.checkpoint import load_state
from vitdeploy.models.detr import DETRConfig
from vitdeploy.models.family import Family, Hints, Recognised
from vitdeploy.models.swin import SwinConfig
from vitdeploy.models.transformer import TransformerConfig
from vitdeploy.models.vit import ViTConfig

# Fields that no tensor of a Transformer tells; its reader takes them by these names.
_OF_SEQUENCES = ("heads", "max_length", "pad", "start", "end", "pre_norm", "layer_norm_eps")
# What a ViT's reader has to assume where keys of another library do not come with that library's config file.
_CONVENTIONS = ("activation", "layer_norm_eps", "preset")
_FREE = {
    "num_classes": "classes",
    "in_channels": "channels",
    "source_vocabulary": "tokens",
    "target_vocabulary": "tokens",
}


def read_as(
    name: str, family: Family, config: Any, state: Mapping[str, Tensor], heads: int | None, file: str
) -> Recognised:
    """The state dict in `file`, in any key style, as the model of a built-in name with that family and config.

    `heads`: the user's flag, None without one.

    Raises:
        CheckpointError: the state dict is of no style, or of another architecture than the name.
    """
    hints = _hints(name, config, heads)
    try:
        found = catalog.recognise_within(state, hints, file, lambda part: not _misfits(part, family, config))
    except CheckpointError as error:
        raise CheckpointError(
            f"{file} cannot be read as {name}",
            found=": ".join(filter(None, (error.message, error.found))),
            wanted=error.wanted,
            fix=error.fix,
        ) from None
    if found is None:
        with torch.device("meta"):
            module = family.build(config)
        load_state(module, state, file)  # names what is missing and what is unexpected
        raise catalog.unrecognised(state, file)
    refuse_another(found, name, family, config, file, heads)
    notes = [
        f"{getattr(found.config, field)} {what} in the checkpoint, {name} has {getattr(config, field)} by default"
        for field, what in _FREE.items()
        if getattr(found.config, field, None) not in (getattr(config, field, None), 0)
    ]
    own_size, said_size = _size(found.config), _size(config)
    if own_size and said_size and own_size != said_size:
        said = f"{name} says {said_size[0]}x{said_size[1]}"
        notes.append(f"image size {own_size[0]}x{own_size[1]}, as the checkpoint's positions have; {said}")
    settled, remarks = _settled(name, found.config, config)
    return dataclasses.replace(found, config=settled, notes=(*found.notes, *notes, *remarks))


def refuse_another(
    found: Recognised, name: str, family: Family, config: Any, file: str, heads: int | None = None
) -> None:
    """Raise CheckpointError where what was recognised is not the architecture of a name."""
    if misfits := _misfits(found, family, config):
        asked = heads is not None and all(misfit.startswith("heads ") for misfit in misfits)
        raise _another(file, name, misfits, f"leave --heads out: {name} says it" if asked else None)


def _misfits(found: Recognised, family: Family, config: Any) -> list[str]:
    if found.family != family.name:
        return [f"a {found.family} instead of a {family.name}"]
    own, wanted = _architecture(found.config), _architecture(config)
    if _size(found.config) != _size(config):
        own.pop("windows", None)  # they shrink with the image
    return [f"{key} {own[key]} instead of {wanted[key]}" for key in own if own[key] != wanted[key]]


def _hints(name: str, config: Any, heads: int | None) -> Hints:
    told: dict[str, Any] = {"architecture": name}
    if isinstance(config, DETRConfig):
        told = {"dilation": config.backbone.dilate_last}
    elif isinstance(config, TransformerConfig):
        told = {field: getattr(config, field) for field in _OF_SEQUENCES}
    elif isinstance(config, SwinConfig):
        told = {}
    return Hints(heads or (None if isinstance(config, SwinConfig) else config.heads), _size(config), told)


def _size(config: Any) -> tuple[int, int] | None:
    size: tuple[int, int] | None = getattr(config, "image_size", None)
    return size


def _architecture(config: Any) -> dict[str, Any]:
    """What two configs of one architecture have in common, by the word that a user knows it by."""
    if isinstance(config, ViTConfig):
        return {
            "patch size": config.patch_size,
            "width": config.width,
            "depth": config.depth,
            "heads": config.heads,
            "MLP width": config.hidden,
            "class token": config.class_token,
            "registers": config.registers,
            "norm before the blocks": config.stem_norm,
            "norms of query and key": config.qk_norm,
            "LayerScale": config.layer_scale,
            "MLP": config.mlp,
        }
    if isinstance(config, SwinConfig):
        return {
            "patch size": config.patch_size,
            "width": config.width,
            "depths": config.depths,
            "heads": config.heads,
            "MLP ratio": config.mlp_ratio,
            "norm of the patches": config.patch_norm,
            "windows": tuple(stage.window for stage in config.stages),
        }
    if isinstance(config, DETRConfig):
        return {
            "backbone's blocks": config.backbone.depths,
            "backbone's widths": config.backbone.widths,
            "width": config.width,
            "heads": config.heads,
            "encoder layers": config.encoder_layers,
            "decoder layers": config.decoder_layers,
            "MLP width": config.hidden,
            "queries": config.queries,
            "mask head": config.panoptic,
        }
    return {
        "width": config.width,
        "encoder blocks": config.encoder_depth,
        "decoder blocks": config.decoder_depth,
        "heads": config.heads,
        "MLP width": config.hidden,
    }


def _settled(name: str, own: Any, named: Any) -> tuple[Any, list[str]]:
    """The checkpoint's config with what the name says of it that tensors do not, and what that changed."""
    if isinstance(own, SwinConfig):
        # A window that shrank to its image is known only as far as that.
        same_size = own.image_size == named.image_size
        return (dataclasses.replace(own, windows=named.windows) if same_size else own), []
    if not isinstance(own, ViTConfig):
        return own, []
    said = {field: getattr(named, field) for field in _CONVENTIONS}
    changed = [f"{f} {value}" for f, value in said.items() if f != "preset" and value != getattr(own, f)]
    remarks = [f"as {name} has: {', '.join(changed)}"] if changed else []
    return dataclasses.replace(own, **said), remarks


def _another(file: str, name: str, misfits: list[str], fix: str | None = None) -> CheckpointError:
    return CheckpointError(
        f"{file} is not a checkpoint of {name}",
        found=", ".join(misfits),
        wanted=f"the architecture of {name}, with any number of classes",
        fix=fix or "leave the name out: the architecture is then recognised by keys and shapes",
    )
