"""Load modules of transformers and timm."""

import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models.checkpoints.fit import load_state
from vitdeploy.models.checkpoints.mismatch import COMPUTED, Mismatch, listed, of_training, patterns
from vitdeploy.models.external import adapted, outputs
from vitdeploy.models.external.prompted import as_prompted
from vitdeploy.models.family import LoadedModel
from vitdeploy.models.model_folder.folder import reading_rule, timm_config
from vitdeploy.models.model_folder.image_processor import timm_preprocess, transformers_processor
from vitdeploy.models.source import cannot_import, last_line, library
from vitdeploy.runtime.tasks.instance_segmentation import QUERIES_ASSUMED
from vitdeploy.spec import PreprocessSpec, Task

# --- transformers' own module of a model folder, for architectures that are not built in ------------------------------


POOLER = "pooler."
_POINTS = "a model whose prompts are points and boxes"
_TRACKER = "use its tracker: transformers' Sam3TrackerModel.from_pretrained(FOLDER).save_pretrained(OTHER)"
# Classes whose outputs would differ from the library's: their special part, the supported alternative, and the fix.
MISSING = {
    "ZoeDepthForDepthEstimation": (
        "a processor that pads images by mirroring and crops the output; several metric heads, selected by a vote "
        "over the batch",
        "no such padding, and one head",
        "use DepthAnythingForDepthEstimation with depth_estimation_type metric, or DPTForDepthEstimation",
    ),
    "SamHQModel": (
        "a decoder that reads the encoder's intermediate blocks, with one mask more than SAM's four",
        "SAM's encoder and decoder",
        "use SamModel, Sam2Model or EdgeTamModel",
    ),
    "Sam3Model": ("layers that attend to the tokens of a text prompt", _POINTS, _TRACKER),
    "Sam3LiteTextModel": (
        "layers that attend to the tokens of a text prompt",
        _POINTS,
        "use Sam3TrackerModel, Sam2Model or EdgeTamModel",
    ),
    "Sam3VideoModel": ("a text-prompted detector combined with a tracker", _POINTS, _TRACKER),
}
# Video classes that contain a whole single-image class: the library loads the inner class from the same files, as in
# its documentation of SAM 2.
OF_VIDEOS = {
    "Sam2VideoModel": "Sam2Model",
    "EdgeTamVideoModel": "EdgeTamModel",
    "Sam3TrackerVideoModel": "Sam3TrackerModel",
}
# SigLIP 2 for images of any aspect ratio: it takes a sequence of patches with a mask and sizes.
NAFLEX = ("siglip2", "siglip2_vision_model")
# Open-vocabulary detectors with layers that read the text prompt (ADR 18), by model_type.
OPEN_VOCABULARY = {
    "grounding-dino": "Grounding DINO",
    "mm-grounding-dino": "MM Grounding DINO",
    "omdet-turbo": "OmDet-Turbo",
}


def refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Raise CheckpointError for an unsupported model, before its files are read."""
    kind, name = str(config.get("model_type")), str((config.get("architectures") or [""])[0])
    if kind in NAFLEX:
        raise CheckpointError(
            "this version does not support SigLIP 2 for images of any aspect ratio (NaFlex)",
            found=f"model_type {kind}: it takes patches with pixel_attention_mask and spatial_shapes",
            expected="a SigLIP 2 with a fixed image size, whose config has model_type siglip",
            fix="use a checkpoint with a fixed size, such as google/siglip2-base-patch16-224",
        )
    if kind in OPEN_VOCABULARY:
        raise CheckpointError(
            f"this version does not support {OPEN_VOCABULARY[kind]}, a detector with text prompts at run time",
            found=f"model_type {kind}; its layers attend to the text tokens, which flows do not support yet",
            expected="a detector with fixed classes",
            fix="for a fixed list of classes: --model package.module:function, returning a module that holds their "
            "tokens, takes only the image and returns class logits and boxes",
        )
    if name in MISSING:
        found, expected, fix = MISSING[name]
        raise CheckpointError(f"transformers' {name} is not supported", found=found, expected=expected, fix=fix)


def from_transformers(
    folder: Path,
    config: Mapping[str, Any],
    preprocess: PreprocessSpec,
    image_size: tuple[int, int],
    state: Mapping[str, Tensor] | None = None,
    task: Task | None = None,
) -> LoadedModel:
    """Load transformers' own module of a folder, of the class in the config's "architectures"; with the weights of
    `state`, or those of the folder.

    Raises:
        MissingPackageError: transformers is not installed.
        UnknownModelError: transformers has no such class.
        CheckpointError: transformers cannot load the folder; or weights of the class are missing or unexpected.
    """
    model, name, notes = library_model(folder, config, state)
    own = adapted.size_of(model, {})
    resized = own is not None and image_size != own
    takes = inspect.signature(model.forward).parameters
    arguments = {"interpolate_pos_encoding": True} if resized and "interpolate_pos_encoding" in takes else {}
    if own is not None and resized:
        notes.append(f"resized from {own[0]}x{own[1]} to {image_size[0]}x{image_size[1]} pixels")
    prompted = as_prompted(model, image_size)
    if prompted is not None:
        return LoadedModel(folder.name, "transformers", *prompted, preprocess=preprocess, notes=tuple(notes))
    task = task or ("instance-segmentation" if name == outputs.RF_DETR else None)
    module, signature = adapted.adapt(
        model, image_size, preprocess.channels, f"transformers' {name}", arguments, task=task
    )
    if signature.task == "segmentation" != task and signature.outputs[0].name == "class_logits":
        notes.append(QUERIES_ASSUMED)
    if signature.task == "instance-segmentation" and name.endswith("DetrForSegmentation"):
        raise _instances(name)
    if signature.task in ("detection", "panoptic"):
        rule = reading_rule(config, transformers_processor(folder))
        signature = dataclasses.replace(signature, postprocess=rule)
        if signature.task == "panoptic" and (rule is None or rule.scores != "softmax"):
            raise _instances(name)
    return LoadedModel(
        folder.name,
        "transformers",
        module,
        signature,
        preprocess=preprocess,
        notes=tuple(notes),
    )


def library_model(
    folder: Path, config: Mapping[str, Any], state: Mapping[str, Tensor] | None = None
) -> tuple[Any, str, list[str]]:
    """Return the module itself, its class name, and notes; arguments and errors as `from_transformers`."""
    named = str((config.get("architectures") or [""])[0])
    name = OF_VIDEOS.get(named, named)
    transformers = library("transformers", f"the architecture {name or config.get('model_type')}")
    try:
        cls = getattr(transformers, name, None)
    except Exception as error:  # classes are imported on access
        raise cannot_import("transformers", f"transformers' {name}", error) from None
    if cls is None:
        raise UnknownModelError(
            f"transformers {transformers.__version__} has no class {name!r}",
            found=f"architectures in {folder / 'config.json'}",
            expected="the name of a model class",
            fix="pip install --upgrade transformers",
        )
    with _quiet(transformers):
        model, remarks = _loaded(cls, folder, state, name)
    if name != named:
        remarks.append(f"{name}, the single-image part of {named}")
    _settle(model)
    return model, name, [f"exported from transformers {transformers.__version__}'s own module", *remarks]


def _instances(name: str) -> CheckpointError:
    """Return the error for masks without a task: with sigmoid scores they may overlap, which a panoptic map cannot; and
    DETR's are panoptic only."""
    return CheckpointError(
        f"vitdeploy does not support the masks of transformers' {name}",
        found="logits, boxes and masks that its processor decodes differently",
        expected='panoptic masks with a softmax over classes and "no object" (DETR), or instances of '
        f"{outputs.RF_DETR}",
        fix="for boxes only, save it as its class ...ForObjectDetection",
    )


def _settle(model: Any) -> None:
    """Turn checkpoint values that the model's Python code branches on into constants, as an exporter cannot trace a
    branch on a tensor: EoMT's mask probabilities, which training has annealed."""
    for name in ("attn_mask_probs",):
        if isinstance(found := getattr(model, name, None), Tensor):
            delattr(model, name)
            setattr(model, name, tuple(found.tolist()))


def _loaded(cls: Any, folder: Path, state: Mapping[str, Tensor] | None, name: str) -> tuple[Any, list[str]]:
    """Return the model and notes. A pooling layer without weights in the file is removed, as it would be random."""
    model, found, remarks = _attempt(cls, folder, state)
    takes = inspect.signature(cls.__init__).parameters
    if found.missing and all(POOLER in key for key in found.missing) and "add_pooling_layer" in takes:
        model, found, remarks = _attempt(cls, folder, state, add_pooling_layer=False)
        remarks.append("pooling layer removed: the checkpoint has no weights for it")
    if found:
        # transformers would continue, with random values for missing weights and without the unexpected ones.
        own = model.state_dict()
        summary = found.told(own, [*own, *found.unexpected])
        if len(found.missing) == len(own):
            summary += "; none of the names matches the model"
        raise CheckpointError(
            f"the weights in {folder} do not match the class {name}",
            found=summary,
            expected="exactly the tensors of the model",
            fix='save the whole model, or name the class that was saved in "architectures" of config.json',
        )
    return model, remarks


def _attempt(
    cls: Any, folder: Path, state: Mapping[str, Tensor] | None, **more: Any
) -> tuple[Any, Mismatch, list[str]]:
    """Return the model as loaded by transformers, the mismatch, and notes on weights that can be ignored."""
    arguments: dict[str, Any] = {"dtype": torch.float32, "output_loading_info": True, "ignore_mismatched_sizes": True}
    try:
        if state is None:
            arguments |= {"local_files_only": True, "trust_remote_code": False, "use_safetensors": True}
            model, loaded = cls.from_pretrained(folder, **arguments, **more)
        else:
            config = cls.config_class.from_pretrained(folder, local_files_only=True)
            model, loaded = cls.from_pretrained(None, config=config, state_dict=dict(state), **arguments, **more)
    except Exception as error:
        raise CheckpointError(
            f"transformers cannot load {folder} as {cls.__name__}",
            found=last_line(error),
            expected="a config.json and weights that this version of transformers accepts",
            fix="load it where it was saved, and save it again with save_pretrained",
        ) from None
    unexpected = sorted(loaded["unexpected_keys"])
    left = [key for key in unexpected if COMPUTED.fullmatch(key) or of_training(key) or key.startswith(POOLER)]
    shapes = {key: (str(list(saved)), str(list(own))) for key, saved, own in sorted(loaded["mismatched_keys"])}
    absent = sorted(key for key in loaded["missing_keys"] if key not in shapes)
    learned = dict(model.named_parameters(remove_duplicate=False))
    computed = [key for key in absent if key not in learned and COMPUTED.fullmatch(key)]
    missing = [key for key in absent if key not in computed]
    mismatch = Mismatch(tuple(missing), tuple(key for key in unexpected if key not in left), shapes, {})
    remarks = [f"left out, not part of the model: {listed(patterns(left, unexpected))}"] if left else []
    if computed:
        remarks.append(
            f"not in the checkpoint, computed by the model itself: {listed(patterns(computed, model.state_dict()))}"
        )
    return model, mismatch, remarks


@contextlib.contextmanager
def _quiet(transformers: ModuleType) -> Iterator[None]:
    """Suppress transformers' progress bar while loading weights, and its report of mismatches."""
    logging = transformers.utils.logging
    shown, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if shown:
            logging.enable_progress_bar()


# --- timm's own module of an architecture that is not built in --------------------------------------------------------


RESIZED = ("pos_embed", "patch_embed.proj.weight", "relative_position_bias_table")


def from_timm(
    name: str,
    config: Mapping[str, Any],
    state: Mapping[str, Tensor] | None,
    image_size: tuple[int, int] | None,
    file: str = "",
    task: Task | None = None,
    preprocess: PreprocessSpec | None = None,
) -> LoadedModel:
    """Build timm's own module of an architecture. `config`: timm's config.json, or {}; `state`, read from `file`: None
    for seeded random weights; `preprocess`: None to use timm's config.

    Raises:
        MissingPackageError: timm is not installed.
        UnknownModelError: timm has no such architecture.
    """
    timm = library("timm", f"the architecture {name}")
    if not timm.is_model(name):
        near = timm.list_models(f"{name.split('_')[0]}*")[:3]
        raise UnknownModelError(
            f"timm {timm.__version__} has no architecture {name!r}",
            found=name,
            expected="one of timm.list_models()",
            fix=f"for example {', '.join(near)}" if near else "check the name",
        )
    state, converted = _converted(timm, name, state) if state is not None else (None, [])
    arguments, notes = _arguments(timm, name, config, state)
    notes += converted
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(adapted.SEED)
        try:
            model = timm.create_model(name, pretrained=False, **arguments)
        except Exception as error:
            raise CheckpointError(
                f"timm cannot build {name}",
                found=last_line(error),
                expected=f"arguments that it accepts, not {arguments}" if arguments else "",
            ) from None
    own = {**model.pretrained_cfg, **(timm_config(config) or {})}
    if state is not None:
        notes += load_state(model, state, name, file)
    size = adapted.size_of(model, own) or adapted.IMAGE_SIZE
    if image_size is not None and image_size != size:
        model = _resized(model, image_size, lambda: timm.create_model(name, **arguments | {"img_size": image_size}))
        notes.append(f"resized from {size[0]}x{size[1]} to {image_size[0]}x{image_size[1]} pixels")
        size = image_size
    channels = int(arguments.get("in_chans") or own["input_size"][0])
    return LoadedModel(
        name,
        "timm",
        *adapted.adapt(model, size, channels, f"timm's {name}", task=task),
        preprocess=preprocess or timm_preprocess(own, channels, size),
        notes=(f"exported from timm {timm.__version__}'s own module", *notes),
    )


def _converted(timm: ModuleType, name: str, state: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], list[str]]:
    """Convert a state dict with a paper's original tensor names, as timm does on loading; return any other unchanged.

    Raises:
        CheckpointError: biases of query, key and value that this timm architecture does not have.
    """
    with torch.device("meta"):
        own = {key for key, _ in timm.create_model(name, pretrained=False).named_parameters()}
    if own <= state.keys():
        return state, []
    with torch.random.fork_rng(devices=()):
        model = timm.create_model(name, pretrained=False)
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    try:
        converted = convert(dict(state), model) if convert is not None else {}
    except Exception:  # the state dict belongs to another model, which `load_state` reports
        return state, []
    # timm's loader also resizes tables silently, but tables of a different size belong to another model.
    tables = [key for key in converted.keys() & state.keys() if key.endswith(RESIZED)]
    if not own <= converted.keys() or any(converted[key].numel() != state[key].numel() for key in tables):
        return state, []
    lost = [key for key in state if key.endswith("attn.qkv.bias") and state[key].any()]
    if lost and not any(key.endswith(("q_bias", "qkv.bias")) for key in converted):
        raise CheckpointError(
            f"the checkpoint has biases of query, key and value, but timm's {name} does not",
            found=f"{lost[0]} and {len(lost) - 1} more",
            expected="an architecture with them",
            fix=f"name timm:{name}_qkvb",
        )
    return converted, [f"tensor names of the original release, converted by timm's loader for {name}"]


def _resized(model: Any, image_size: tuple[int, int], build: Callable[[], nn.Module]) -> nn.Module:
    """Return timm's module for another image size: the one of `build` if the weights fit, so that windows keep their
    size; else with positions resized by timm. A fully convolutional module accepts all sizes."""
    if not hasattr(model, "set_input_size"):
        return model
    state, other = model.state_dict(), build()
    own = other.state_dict()
    if own.keys() == state.keys() and all(own[key].shape == state[key].shape for key in own):
        other.load_state_dict(state)
        return other
    model.set_input_size(img_size=image_size)
    return model


def _arguments(
    timm: ModuleType, name: str, config: Mapping[str, Any], state: Mapping[str, Tensor] | None
) -> tuple[dict[str, Any], list[str]]:
    """Return arguments for timm's `create_model`: from its config.json, else inferred from a fine-tuned checkpoint."""
    # Use the weights of the folder; timm would read the file at this path, wherever it is.
    arguments = {key: value for key, value in (config.get("model_args") or {}).items() if key != "checkpoint_path"}
    if config.get("num_classes") is not None:
        arguments["num_classes"] = config["num_classes"]
    if config or state is None:
        return arguments, []
    own, notes = timm.get_pretrained_cfg(name), []
    for layer, axis, argument, default in (
        (own.classifier, 0, "num_classes", own.num_classes),
        (own.first_conv, 1, "in_chans", own.input_size[0]),
    ):
        weight = state.get(f"{layer}.weight") if isinstance(layer, str) else None
        found = weight.shape[axis] if weight is not None and weight.ndim > axis else 0
        if isinstance(layer, str) and found != default and (found or argument == "num_classes"):
            arguments[argument] = int(found)
            notes.append(f"{argument} {found} in the checkpoint, {name} has {default} by default")
    return arguments, notes
