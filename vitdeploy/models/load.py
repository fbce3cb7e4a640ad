"""Load the original model from a source: a PyTorch module with its weights, in evaluation mode.

A user may name:

    vit_base_patch16_224              a built-in architecture; without a checkpoint, seeded random weights
    vit_base_patch16_224 + FILE       with a checkpoint in any key style that its family reads
    FILE alone                        the architecture is recognised by keys and shapes; reads a config.json next to it
    timm:NAME[.TAG], hf:FOLDER ...    a model folder; the built-in architecture if there is one, else the library's
    timm:NAME + FILE                  likewise, with the weights from a file
    a module in memory                as a file that `external.module` wrote; from Python only
    package.module:function           the user's own module, with the weights of FILE if given; never from a recipe
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, InputError, UserCodeError
from vitdeploy.graph.io.meanings import ONE_NUMBER, PROBLEMS, left_out, of_problem
from vitdeploy.models import catalog, json_file, memory_bank, names, open_clip, towers
from vitdeploy.models.architectures.layers import RESAMPLING
from vitdeploy.models.checkpoints import fit, read
from vitdeploy.models.external import adapted, image_text, transformers
from vitdeploy.models.external.module import from_function, open_module, weights_digest
from vitdeploy.models.family import Family, Hints, LoadedModel, Recognised, refuse_channels
from vitdeploy.models.model_folder import folder as configs
from vitdeploy.models.model_folder import hub, image_processor
from vitdeploy.models.source import Source
from vitdeploy.runtime.tasks.segmentation import SegmentationSpec
from vitdeploy.runtime.values import number_of_classes
from vitdeploy.spec import PreprocessSpec, Task, postprocess_of, task_read_by

SEED = 0
SEEDED = "no checkpoint given: the weights are random (seeded), so accuracies are meaningless"

HALF_ASSUMED = f"no {configs.PREPROCESSOR}: assuming mean = std = 0.5 and a plain resize"
UNUSED = "__background__"  # RF-DETR's own name for the last column of a head
HEADLESS = "no classification head: used as a feature extractor"


def located(source: Source) -> tuple[Source, configs.ModelFolder | None]:
    """Return the source with its files on this machine (downloaded from a hub if needed), and their folder.

    Raises:
        InputError: neither a model nor a checkpoint is given.
        MissingFileError, HubError, MissingPackageError: the files are not available.
    """
    if (source.model, source.checkpoint, source.function, source.module) == (None,) * 4:
        raise InputError("no model given", expected="a model, a checkpoint, or both", fix="vitdeploy export list")
    checkpoint = source.checkpoint
    if (
        source.model is not None
        and hub.is_hub_name(source.model)
        and not (checkpoint and source.model.startswith("timm:"))
    ):
        folder = hub.locate(source.model)
        folder = dataclasses.replace(folder, given=json_file.files_of(checkpoint)) if checkpoint else folder
        return dataclasses.replace(source, model=f"hf:{folder.path}"), folder
    if checkpoint is None or (near := configs.beside(checkpoint)) is None:
        return source, None
    if near.has_config and source.model is None and source.function is None:
        source = dataclasses.replace(source, model=f"hf:{near.path}")
    return source, near


def load_model(source: Source) -> LoadedModel:
    """Build the model and load its weights.

    Raises:
        UnknownModelError, MissingFileError, CheckpointError, NonFiniteWeightsError, PickleError, UserCodeError,
        MissingPackageError, HubError.
    """
    original = load_features(source)
    target, own = source.task, original.signature.task
    read = task_read_by(target)
    if target not in (None, "classification", own) and own in ("classification", *PROBLEMS.values()) and read is None:
        original = of_task(original, target)
    if original.classes == 1:
        original = of_task(original, "tensors", ONE_NUMBER)
    if source.task == "anomaly":
        original = memory_bank.with_memory(original, _memory(source))
    if target is not None and read == original.signature.task:
        original = _read_as(original, target)
    if source.task not in (None, original.signature.task):
        raise CheckpointError(
            f"{source.name} cannot be used for the task {source.task}",
            found=original.signature.task,
            expected=str(source.task),
            fix=f"omit the task: the model's own task is {original.signature.task}",
        )
    if original.signature.notes:
        original = dataclasses.replace(original, notes=(*original.notes, *original.signature.notes))
    if source.text_features is not None:
        original = towers.with_text_features(original, source.text_features)
    if source.weights is not None and weights_digest(original.module) != source.weights:
        raise UserCodeError(
            f"{source.name} returned different weights than before",
            found="weights with a different digest",
            expected="the same weights on every call, in every process",
            fix="save the weights once and pass them with --checkpoint or source.checkpoint",
        )
    return original


def load_features(source: Source) -> LoadedModel:
    """Load the model before its features are turned into another task; errors as `load_model`."""
    read = task_read_by(source.task)
    original = _load(source if read is None else dataclasses.replace(source, task=read))
    return original if source.preprocess is None else dataclasses.replace(original, preprocess=source.preprocess)


class _Some(nn.Module):
    """A module reduced to the outputs at some positions."""

    def __init__(self, module: nn.Module, places: Sequence[int]) -> None:
        super().__init__()
        self.module, self.places = module, tuple(places)

    def forward(self, image: Tensor, *further: Tensor) -> Tensor | tuple[Tensor, ...]:
        outputs = self.module(image, *further)
        kept = tuple(outputs[place] for place in self.places)
        return kept[0] if len(kept) == 1 else kept


def _read_as(original: LoadedModel, task: Task) -> LoadedModel:
    """Turn a model of the task that `task` reads into one of `task`: keep only the outputs that it reads."""
    kind, own = postprocess_of(task), original.signature
    assert kind is not None
    places = [place for place, output in enumerate(own.outputs) if output.name in kind.tensors]
    module, notes = original.module, own.notes
    if len(places) < len(own.outputs):
        module = _Some(module, places).eval()
        notes = (*notes, left_out([each.name for each in own.outputs if each.name not in kind.tensors]))
    outputs = tuple(own.outputs[place] for place in places)
    signature = dataclasses.replace(own, task=task, outputs=outputs, postprocess=kind(), notes=notes)
    return dataclasses.replace(original, module=module, signature=signature)


def _memory(source: Source) -> Path:
    """Return the file of the memory bank; raise CheckpointError if none was fitted."""
    if source.memory is None:
        raise CheckpointError(
            f"the anomaly task of {source.name} needs normal reference images",
            found="no folder of normal images",
            expected="a folder with at least 5 images of good parts",
            fix="--normal DIR (in a recipe: source.normal)",
        )
    return source.memory


def _asked(source: Source) -> Task | None:
    """The task to interpret the outputs as. Anomaly models always read tokens, whatever the other outputs."""
    return None if source.task == "anomaly" else source.task


def _load(source: Source) -> LoadedModel:
    if source.module is not None:
        return open_module(source.module, source.image_size, source.preprocess, source.bind)
    if source.function is not None:
        how = source.size, source.checkpoint, _asked(source), source.preprocess, source.bind
        return from_function(source.function, *how)
    local, folder = located(source)
    if folder is not None and local.model is not None and local.model.startswith("hf:"):
        return _from_folder(local, folder, source.name)
    if folder is not None and folder.has_config and source.model and (check := _beside(folder, source.model)):
        return _from_folder(local, folder, source.name, check)
    if source.model is not None and source.model.startswith("timm:"):
        return _from_timm_name(source, source.model.removeprefix("timm:"))
    if source.model is None:
        return _from_checkpoint(source)
    family, config = _built_in(source.model)
    if source.checkpoint is None:
        return _seeded(source, family, config)
    return _of_name(source, source.model, family, config)


def _built_in(name: str) -> tuple[Family, Any]:
    """Like `catalog.find_or_raise`; for a path or a repository, the error says how to name it.

    Raises:
        UnknownModelError: not a built-in name.
    """
    names.check_name(name)
    return catalog.find_or_raise(name)


def _from_checkpoint(source: Source) -> LoadedModel:
    assert source.checkpoint is not None
    state, notes = read.read_checkpoint(source.checkpoint)
    found = catalog.recognise_within(state, Hints(source.heads, source.size), str(source.checkpoint))
    if found is None:
        open_clip.refuse_without_config(state, str(source.checkpoint))
        raise catalog.unrecognised(state, str(source.checkpoint))
    return _recognised(source, found, notes)


def _from_timm_name(source: Source, name: str) -> LoadedModel:
    """Load timm:NAME with a checkpoint file: the built-in architecture if the name is known, else timm's module."""
    assert source.checkpoint is not None
    architecture = name.partition(".")[0]
    for known in (name, architecture):
        if (found := catalog.find(known)) is not None:
            return _of_name(source, known, *found)
    state, notes = read.read_checkpoint(source.checkpoint)
    file = str(source.checkpoint)
    return _noted(_timm(architecture, {}, state, source, file), source.name, {}, notes)


def _timm(name: str, config: Mapping[str, Any], state: Mapping[str, Tensor], source: Source, file: str) -> LoadedModel:
    return transformers.from_timm(name, config, state, source.size, file, _asked(source), source.preprocess)


def _of_name(source: Source, name: str, family: Family, config: Any) -> LoadedModel:
    """Load a checkpoint file as the model of a built-in name."""
    assert source.checkpoint is not None
    state, notes = read.read_checkpoint(source.checkpoint)
    return _recognised(
        source, catalog.read_as(name, family, config, state, source.heads, str(source.checkpoint)), notes
    )


def _beside(folder: configs.ModelFolder, model: str) -> Callable[[Recognised], None] | None:
    """Return a check that weights with a config.json belong to the named model. None means that the config is not read:
    it is for another timm architecture, or only timm has the name and the config is not from timm."""
    if folder.is_open_clip:
        return None
    name = model.removeprefix("timm:")
    own = configs.model_config(folder.path / configs.CONFIG).get("architecture")
    if own is not None and str(own).partition(".")[0] != name.partition(".")[0]:
        return None
    if (known := catalog.find(name) or catalog.find(name.partition(".")[0])) is None:
        return None if own is None else lambda found: None
    return lambda found: catalog.refuse_another(found, name, *known, str(folder.weights[0]))


def _from_folder(
    source: Source,
    folder: configs.ModelFolder,
    name: str,
    check: Callable[[Recognised], None] = lambda found: None,
) -> LoadedModel:
    """Load a folder with config.json: as a built-in architecture if a family recognises the weights and `check`
    passes, else as the library's own."""
    if folder.is_open_clip:
        return _open_clip(source, folder, name)
    config = configs.model_config(folder.path / configs.CONFIG)
    transformers.refuse_unsupported(config)
    state, notes = _weights(folder, configs.CONFIG)
    file = str(folder.weights[0])
    processor = None if source.preprocess else image_processor.transformers_processor(folder.path)
    stated = configs.stated_size(config) or image_processor.fixed_size(processor)
    found: Recognised | None = None
    if config.get("model_type") not in (image_text.MODEL_TYPE, *towers.KINDS):
        hints = Hints(source.heads, stated or source.size, config)
        # A part of a library's model, such as a detector's backbone, may be a built-in one: the user means the whole.
        ours = _is_ours(config)
        found = catalog.recognise_within(state, hints, file) if ours else catalog.recognise(state, hints)
    if found is None:
        size = (
            source.size
            or stated
            or configs.detector_size(config, processor)
            or configs.backbone_size(config)
            or adapted.IMAGE_SIZE
        )
        return _of_library(source, folder, name, config, state, notes, size)
    check(found)
    catalog.check_config(config, found, str(folder.path) if not folder.given else file)
    family = catalog.family_named(found.family)
    signature = family.describe(found.config)
    preprocess, remarks = _folder_preprocess(source, folder, config, signature.channels, signature.image_size)
    original = _built(source, family, found.config, found.state, preprocess, (*notes, *found.notes, *remarks))
    if source.text_features is None:
        original = towers.with_text_tower(original, folder.path, state, config, source.task)
    return _noted(original, name, config, ())


def _of_library(
    source: Source,
    folder: configs.ModelFolder,
    name: str,
    config: Mapping[str, Any],
    state: Mapping[str, Tensor],
    notes: tuple[str, ...],
    size: tuple[int, int],
) -> LoadedModel:
    """Load a folder with the library's own architecture."""
    kind, path = config.get("model_type"), folder.path
    # transformers is never given pickles to read
    own = state if folder.given or not (path / configs.SAFETENSORS).is_file() else None
    if kind == image_text.MODEL_TYPE:  # the encoder's config has the image size
        encoder = config.get("encoder")
        encoder = encoder if isinstance(encoder, dict) else {}
        size = (
            source.size
            or configs.stated_size(encoder)
            or image_processor.fixed_size(image_processor.transformers_processor(path))
            or adapted.IMAGE_SIZE
        )
        spec, remarks = _folder_preprocess(source, folder, encoder, _told_channels(encoder), size)
        original = image_text.from_encoder_decoder(path, config, spec, size, own)
        return dataclasses.replace(original, name=name, notes=(*notes, *original.notes, *remarks))
    if kind in towers.KINDS:  # an open-vocabulary detector
        original = towers.from_owl(path, config, partial(_folder_preprocess, source, folder, config), source.size, own)
        return dataclasses.replace(original, name=name, notes=(*notes, *original.notes))
    if "architecture" in config:
        original = _timm(config["architecture"], config, state, source, str(folder.weights[0]))
        return _noted(original, name, config, notes)
    spec, remarks = _folder_preprocess(source, folder, config, _told_channels(config), size)
    assumed, remarks = (HALF_ASSUMED, ()) if remarks == (HALF_ASSUMED,) else (None, remarks)
    original = transformers.from_transformers(path, config, spec, size, own, _asked(source))
    original = with_label_values(
        adapted.with_own_scaling(original, assumed), image_processor.transformers_processor(path)
    )
    return _noted(original, name, config, (*notes, *configs.size_note(config, size), *remarks))


def _weights(folder: configs.ModelFolder, config: str) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    state, notes = read.read_checkpoint(*folder.weights)
    if folder.revision:
        notes = (f"{folder.repository} at {folder.revision}", *notes)
    if folder.given:
        notes = (f"configuration from {folder.path / config}", *notes)
    return state, notes


def _open_clip(source: Source, folder: configs.ModelFolder, name: str) -> LoadedModel:
    """Load a folder in OpenCLIP's layout: both encoders if it has a tokenizer, else the image encoder."""
    config = open_clip.open_clip_config(folder.path)
    state, notes = _weights(folder, configs.OPEN_CLIP)
    preprocess = source.preprocess or open_clip.open_clip_preprocess(config)
    found = open_clip.image_part(state, config, source, str(folder.weights[0]))
    if isinstance(found, Recognised):
        family = catalog.family_named(found.family)
        original = _built(source, family, found.config, found.state, preprocess, (*notes, *found.notes))
    else:
        size = found.signature.image_size
        preprocess = source.preprocess or image_processor.scaled(preprocess, config.image_size, size)
        original = dataclasses.replace(found, preprocess=preprocess, notes=(*notes, *found.notes))
    original = dataclasses.replace(open_clip.as_features(original, config.features), name=name)
    alone = source.text_features is not None or source.task == "features"
    return original if alone else open_clip.with_text(original, folder, state, config)


def _is_ours(config: Mapping[str, Any]) -> bool:
    """Whether a config.json names an architecture of one of our families."""
    if "model_type" in config:
        return any(config["model_type"] in family.model_types for family in catalog.families())
    return catalog.named_config(str(config.get("architecture"))) is not None


def _folder_preprocess(
    source: Source, folder: configs.ModelFolder, config: Mapping[str, Any], channels: int, size: tuple[int, int]
) -> tuple[PreprocessSpec, tuple[str, ...]]:
    if source.preprocess is not None:
        return source.preprocess, ()
    if (of_timm := configs.timm_config(config)) is not None:
        return image_processor.timm_preprocess(of_timm, channels, size), ()
    if (processor := image_processor.transformers_processor(folder.path)) is not None:
        return image_processor.transformers_preprocess(processor, channels, size)
    if (usual := configs.usual_processor(config)) is not None:
        note = f"no {configs.PREPROCESSOR}: assuming the defaults of {usual['image_processor_type']}"
        spec, remarks = image_processor.transformers_preprocess(usual, channels, size)
        return spec, (note, *remarks)
    half = (0.5,) * channels
    return PreprocessSpec(size, size, "bilinear", half, half), (HALF_ASSUMED,)


def _told_channels(config: Mapping[str, Any]) -> int:
    channels = configs.vision_part(config).get("num_channels", 3)
    return channels if isinstance(channels, int) else 3


def _recognised(source: Source, found: Recognised, notes: tuple[str, ...]) -> LoadedModel:
    family = catalog.family_named(found.family)
    file = f"{source.checkpoint} ({found.style}'s keys of a {family.name})"
    preprocess = family.preprocess(found.config)
    original = _built(source, family, found.config, found.state, preprocess, (*notes, *found.notes), file=file)
    return (
        _with_trained_names(original, source.checkpoint) if family.name == "rfdetr" and source.checkpoint else original
    )


def _with_trained_names(original: LoadedModel, checkpoint: Path) -> LoadedModel:
    """Add the class names that RF-DETR's training saves next to the weights; its head has one more column."""
    names, columns = read.class_names(checkpoint), original.signature.outputs[0].shape[-1]
    if not names:
        return original
    whole = {len(names): names, len(names) + 1: (*names, UNUSED)}
    if columns not in whole:
        note = f"class names ignored: the checkpoint's arguments have {len(names)} for {columns} output columns"
        return dataclasses.replace(original, notes=(*original.notes, note))
    assumed = f"class names from the checkpoint's arguments: {names[0]} is column 0"
    unused = f"; column {len(names)}, {UNUSED}, is unused" if len(names) < columns else ""
    note = f"{assumed}{unused} (use --labels FILE if training numbered classes from 1)"
    labels = tuple(" ".join(name.split()) for name in whole[columns])
    return dataclasses.replace(original, labels=labels, notes=(*original.notes, note))


def _seeded(source: Source, family: Family, config: Any) -> LoadedModel:
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
) -> LoadedModel:
    """Build the module of a config and load its state, at the image size of the source.

    `file` is the name of the state in errors.
    """
    own = family.describe(config).image_size
    if source.size is not None and source.size != own:
        config, state = family.resize(config, state, source.size)
        if preprocess and preprocess != source.preprocess:
            preprocess = image_processor.scaled(preprocess, own, source.size)
        method = RESAMPLING.get(getattr(config, "position_resampling", ""))
        notes = (*notes, f"resized from {own[0]}x{own[1]} to {source.size[0]}x{source.size[1]} pixels")
        notes = (*notes, f"position embeddings resized: {method}") if method else notes
        module = None
    elif source.image_size is not None:
        notes = (*notes, f"image size {own[0]}x{own[1]}, as requested")
    if module is None:
        module = family.empty(config)
        checkpoint = str(source.checkpoint or source.name)
        notes = (*notes, *fit.load_state(module, state, file or checkpoint, checkpoint))
    signature = family.describe(config)
    if family.num_classes(config) == 0:
        notes = (*notes, HEADLESS)
    return LoadedModel(
        source.name, family.name, module.eval(), signature, preprocess, notes=tuple(dict.fromkeys(notes))
    )


def _noted(original: LoadedModel, name: str, config: Mapping[str, Any], notes: tuple[str, ...]) -> LoadedModel:
    """Return the original under the user's name for it, with the class names of its config file."""
    signature = original.signature
    classes = None if signature.task == "features" else number_of_classes(signature.outputs, signature.postprocess)
    labels, remarks = configs.labels_for(config, classes)
    original = dataclasses.replace(original, name=name, labels=labels, notes=(*notes, *original.notes, *remarks))
    problem = of_problem(config)
    return of_task(original, *problem) if problem and signature.task == "classification" else original


def of_task(original: LoadedModel, task: Task, *notes: str) -> LoadedModel:
    """Return the model with its single output [batch, width] as that of another task; unchanged if the task needs other
    outputs."""
    kind, (output, *others) = postprocess_of(task), original.signature.outputs
    names = [output.name] if task == "tensors" else [*kind.tensors] if kind is not None else []
    if kind is None or others or len(names) != 1 or (task != "tensors" and 2 not in kind.axes(names[0])):
        return original
    outputs, postprocess = (dataclasses.replace(output, name=names[0]),), kind()
    labels = original.labels if postprocess.number_of_classes(outputs) == len(original.labels) else ()
    signature = dataclasses.replace(original.signature, task=task, outputs=outputs, postprocess=postprocess)
    return dataclasses.replace(original, signature=signature, labels=labels, notes=(*original.notes, *notes))


def with_label_values(original: LoadedModel, processor: Mapping[str, Any] | None) -> LoadedModel:
    """Return the original with its image processor's settings for label maps (reduce_labels, ignore_index)."""
    head, settings = original.signature.postprocess, processor or {}
    if not isinstance(head, SegmentationSpec):
        return original
    reduced = bool(settings.get("do_reduce_labels", settings.get("reduce_labels", head.reduce_labels)))
    ignore = settings.get("ignore_index")
    head = dataclasses.replace(head, reduce_labels=reduced, ignore=ignore if isinstance(ignore, int) else head.ignore)
    return dataclasses.replace(original, signature=dataclasses.replace(original.signature, postprocess=head))


def refuse_unusable(original: LoadedModel) -> None:
    """Raise CheckpointError if the model cannot take images."""
    if original.signature.task != "sequence":
        refuse_channels(original.signature.channels)
