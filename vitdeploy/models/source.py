"""From a source to the original model: a PyTorch module with its weights, in evaluation mode.

What a user may name:

    vit_base_patch16_224              a built-in architecture; without a checkpoint its weights are seeded noise
    vit_base_patch16_224 + FILE       with a checkpoint in any key style that its family reads
    FILE alone                        the architecture is recognised by keys and shapes
    timm:NAME[.TAG], hf:FOLDER ...    a model folder; the architecture is ours where we have it, the library's otherwise
    timm:NAME + FILE                  likewise, with the weights from a file
    package.module:function           the user's own module, with the weights of FILE if given; never from a recipe
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, InputError
from vitdeploy.models import catalog, foreign, function, named, names
from vitdeploy.models.checkpoint import load_state, read_checkpoint
from vitdeploy.models.config_files import (
    fixed_size,
    labels_of,
    read_json,
    timm_config,
    timm_preprocess,
    transformers_preprocess,
    transformers_processor,
)
from vitdeploy.models.family import Family, Hints, Recognised
from vitdeploy.models.given import Source as Source
from vitdeploy.models.hub import CONFIG, PREPROCESSOR, ModelFolder, is_hub_name, locate
from vitdeploy.models.original import Original
from vitdeploy.models.unwrap import without_shared_prefix
from vitdeploy.models.zero_shot import with_text_features
from vitdeploy.runtime.labels import number_of_classes
from vitdeploy.spec import PreprocessSpec

SEED = 0
SEEDED = "no checkpoint given: the weights are seeded random numbers, and so is every accuracy"

HEADLESS = "no classification head: a feature extractor"


def located(source: Source) -> tuple[Source, ModelFolder | None]:
    """The same source with its files on this machine (downloaded where it names a hub), and the folder they lie in.

    Raises:
        InputError: neither a model nor a checkpoint is named.
        MissingFileError, HubError, MissingPackageError: the files cannot be had.
    """
    if source.model is None and source.checkpoint is None and source.function is None:
        raise InputError("no model is named", wanted="a model, a checkpoint, or both", fix="vitdeploy export list")
    if source.model is None or not is_hub_name(source.model) or (source.checkpoint and source.model[:5] == "timm:"):
        return source, None
    folder = locate(source.model)
    return dataclasses.replace(source, model=f"hf:{folder.path}"), folder


def load_original(source: Source, preprocess: PreprocessSpec | None = None) -> Original:
    """Build the model and load its weights.

    Args:
        preprocess: instead of what the model's own config files say, which is then not read.

    Raises:
        UnknownModelError, MissingFileError, CheckpointError, NonFiniteWeightsError, PickleError, UserCodeError,
        MissingPackageError, HubError.
    """
    original = _load(source, preprocess)
    if preprocess is not None:
        original = dataclasses.replace(original, preprocess=preprocess)
    if source.text_features is not None:
        original = with_text_features(original, source.text_features)
    return original


def _load(source: Source, preprocess: PreprocessSpec | None) -> Original:
    if source.function is not None:
        return function.from_function(source.function, source.image_size, source.checkpoint)
    local, folder = located(source)
    if folder is not None:
        return _from_folder(local, folder, source.name, preprocess)
    if source.model is not None and source.model.startswith("timm:"):
        return _from_timm_name(source, source.model.removeprefix("timm:"))
    if source.model is None:
        return _from_checkpoint(source)
    family, config = _built_in(source.model)
    if source.checkpoint is None:
        return _seeded(source, family, config)
    return _of_name(source, source.model, family, config)


def _built_in(name: str) -> tuple[Family, Any]:
    """As `catalog.find_or_raise`; a path or a repository is answered with how such a thing is named.

    Raises:
        UnknownModelError: no built-in name.
    """
    names.check_name(name)
    return catalog.find_or_raise(name)


def _from_checkpoint(source: Source) -> Original:
    assert source.checkpoint is not None
    state, notes = read_checkpoint(source.checkpoint)
    hints = Hints(source.heads, source.image_size)
    found = catalog.recognise(state, hints)
    if found is None:
        inner, notes = without_shared_prefix(state, notes)
        found = catalog.recognise(inner, hints) if inner is not state else None
    if found is None:
        raise catalog.unrecognised(state, str(source.checkpoint))
    return _recognised(source, found, notes)


def _from_timm_name(source: Source, name: str) -> Original:
    """timm:NAME with a checkpoint file: ours where the family knows the name, else timm's own module."""
    assert source.checkpoint is not None
    architecture = name.partition(".")[0]
    for known in (name, architecture):
        if (found := catalog.find(known)) is not None:
            return _of_name(source, known, *found)
    state, notes = read_checkpoint(source.checkpoint)
    return _noted(foreign.from_timm(architecture, {}, state, source.image_size), source.name, notes)


def _of_name(source: Source, name: str, family: Family, config: Any) -> Original:
    """A checkpoint file as the model of a built-in name."""
    assert source.checkpoint is not None
    state, notes = read_checkpoint(source.checkpoint)
    return _recognised(source, named.read_as(name, family, config, state, source.heads, str(source.checkpoint)), notes)


def _from_folder(source: Source, folder: ModelFolder, name: str, given: PreprocessSpec | None) -> Original:
    """A folder with config.json: the architecture is ours where a family recognises the weights."""
    config = read_json(folder.path / CONFIG)
    state, notes = read_checkpoint(*((source.checkpoint,) if source.checkpoint else folder.weights))
    if folder.revision:
        notes = (f"{folder.repository} at {folder.revision}", *notes)
    told = _told_size(config) or (None if given else fixed_size(transformers_processor(folder.path)))
    found = catalog.recognise(state, Hints(source.heads, told or source.image_size, config))
    if found is None and "architecture" in config:
        return _noted(foreign.from_timm(config["architecture"], config, state, source.image_size), name, notes)
    if found is None and source.checkpoint is not None:
        raise CheckpointError(
            f"{source.checkpoint} is of no architecture of ours, and transformers takes weights from the folder only",
            found=f"--checkpoint beside {name}",
            fix=f"put it into a copy of {folder.path}, as model.safetensors",
        )
    if found is None:
        size = source.image_size or told or foreign.IMAGE_SIZE
        spec, remarks = (given, ()) if given else _folder_preprocess(folder, config, _told_channels(config), size)
        return _noted(foreign.from_transformers(folder.path, config, spec, size), name, (*notes, *remarks))
    family = catalog.family_named(found.family)
    config_of = found.config
    signature = family.describe(config_of)
    size = signature.image_size
    preprocess, remarks = (given, ()) if given else _folder_preprocess(folder, config, signature.channels, size)
    original = _built(source, family, config_of, found.state, preprocess, (*notes, *found.notes, *remarks))
    return dataclasses.replace(original, name=name, labels=_fitting(labels_of(config), original))


def _folder_preprocess(
    folder: ModelFolder, config: Mapping[str, Any], channels: int, size: tuple[int, int]
) -> tuple[PreprocessSpec, tuple[str, ...]]:
    if (of_timm := timm_config(config)) is not None:
        return timm_preprocess(of_timm, channels, size), ()
    if (processor := transformers_processor(folder.path)) is not None:
        return transformers_preprocess(processor, channels, size)
    half = (0.5,) * channels
    note = f"no {PREPROCESSOR}: mean = std = 0.5 and a plain resize are assumed"
    return PreprocessSpec(size, size, "bilinear", half, half), (note,)


def _vision(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of transformers' config that is about images: a whole one, or one of an image and a text model."""
    inner = config.get("vision_config")
    return inner if isinstance(inner, Mapping) else config


def _told_size(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Image size that a config file tells, None where it tells none; timm has channels before it."""
    arguments = config.get("model_args")
    of_timm = arguments.get("img_size") if isinstance(arguments, Mapping) else None
    size = _vision(config).get("image_size") or of_timm or (timm_config(config) or {}).get("input_size")
    if isinstance(size, int):
        return size, size
    if isinstance(size, list | tuple) and len(size) >= 2 and all(isinstance(side, int) for side in size):
        return int(size[-2]), int(size[-1])
    return None


def _told_channels(config: Mapping[str, Any]) -> int:
    channels = _vision(config).get("num_channels", 3)
    return channels if isinstance(channels, int) else 3


def _recognised(source: Source, found: Recognised, notes: tuple[str, ...]) -> Original:
    family = catalog.family_named(found.family)
    file = f"{source.checkpoint} ({found.style}'s keys of a {family.name})"
    preprocess = family.preprocess(found.config)
    return _built(source, family, found.config, found.state, preprocess, (*notes, *found.notes), file=file)


def _seeded(source: Source, family: Family, config: Any) -> Original:
    torch.manual_seed(SEED)
    module = family.build(config)
    return _built(source, family, config, module.state_dict(), family.preprocess(config), (SEEDED,), module)


def _built(
    source: Source,
    family: Family,
    config: Any,
    state: Mapping[str, Tensor],
    preprocess: PreprocessSpec | None,
    notes: tuple[str, ...],
    module: nn.Module | None = None,
    file: str | None = None,
) -> Original:
    """The module of a config with a state that fits it, at the image size that the source asks for.

    `file` is what an error calls the state.
    """
    own = family.describe(config).image_size
    if source.image_size is not None and source.image_size != own:
        config, state = family.resize(config, state, source.image_size)
        preprocess = scaled(preprocess, own, source.image_size) if preprocess else None
        notes = (*notes, f"resized from {own[0]}x{own[1]} to {source.image_size[0]}x{source.image_size[1]} pixels")
        module = None
    elif source.image_size is not None:
        notes = (*notes, f"image size {own[0]}x{own[1]}, as asked")
    if module is None:
        with torch.device("meta"):
            module = family.build(config)
        module = module.to_empty(device="cpu")
        load_state(module, state, file or str(source.checkpoint or source.name))
    signature = family.describe(config)
    if getattr(config, "num_classes", None) == 0:
        notes = (*notes, HEADLESS)
    return Original(source.name, family.name, module.eval(), signature, preprocess, notes=tuple(dict.fromkeys(notes)))


def scaled(spec: PreprocessSpec, own: tuple[int, int], wanted: tuple[int, int]) -> PreprocessSpec:
    """The preprocessing for another size: the same share of the resized image is cropped."""
    resize, fit = spec.resize, spec.fit
    if isinstance(resize, int):
        if wanted[0] == wanted[1]:
            return dataclasses.replace(spec, resize=int(resize * wanted[0] / min(own)), crop=wanted)
        # The short side of an image need not be that of the input: the image is to cover both.
        resize, own, fit = (resize, resize), (min(own), min(own)), "cover"
    scaled = (int(resize[0] * wanted[0] / own[0]), int(resize[1] * wanted[1] / own[1]))
    return dataclasses.replace(spec, resize=scaled, crop=wanted, fit=fit)


def _fitting(labels: tuple[str, ...], original: Original) -> tuple[str, ...]:
    """The config's labels, where there is one a class."""
    signature = original.signature
    classes = None if signature.task == "features" else number_of_classes(signature.outputs, signature.postprocess)
    return labels if classes == len(labels) else ()


def _noted(original: Original, name: str, notes: tuple[str, ...]) -> Original:
    labels = _fitting(original.labels, original)
    return dataclasses.replace(original, name=name, labels=labels, notes=(*notes, *original.notes))


def refuse_unusable(original: Original) -> None:
    """Raise CheckpointError where no image fits the model."""
    if original.signature.task != "sequence" and original.signature.channels not in (1, 3):
        raise CheckpointError(
            "the model does not take images",
            found=f"{original.signature.channels} input channels",
            wanted="1 (grey) or 3 (RGB)",
        )
