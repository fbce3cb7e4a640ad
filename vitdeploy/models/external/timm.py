"""timm's own module of an architecture that is not ours."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, UnknownModelError
from vitdeploy.models.checkpoints.load_state import load_state
from vitdeploy.models.external.adapted import IMAGE_SIZE, SEED, adapt, size_of
from vitdeploy.models.libraries import last_line, library
from vitdeploy.models.loaded import LoadedModel
from vitdeploy.models.model_folder.config import timm_config
from vitdeploy.models.model_folder.image_processor import timm_preprocess
from vitdeploy.spec import PreprocessSpec, Task

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
    """timm's own module of an architecture; `config` is timm's config.json, {} without one; `state`, read from `file`,
    None: seeded noise; `preprocess` None: as timm's config says.

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
            wanted="one of timm.list_models()",
            fix=f"for example {', '.join(near)}" if near else "check the name",
        )
    state, converted = _converted(timm, name, state) if state is not None else (None, [])
    arguments, notes = _arguments(timm, name, config, state)
    notes += converted
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(SEED)
        try:
            model = timm.create_model(name, pretrained=False, **arguments)
        except Exception as error:
            raise CheckpointError(
                f"timm cannot build {name}",
                found=last_line(error),
                wanted=f"arguments that it takes, not {arguments}" if arguments else "",
            ) from None
    own = {**model.pretrained_cfg, **(timm_config(config) or {})}
    if state is not None:
        notes += load_state(model, state, name, file)
    size = size_of(model, own) or IMAGE_SIZE
    if image_size is not None and image_size != size:
        model = _resized(model, image_size, lambda: timm.create_model(name, **arguments | {"img_size": image_size}))
        notes.append(f"resized from {size[0]}x{size[1]} to {image_size[0]}x{image_size[1]} pixels")
        size = image_size
    channels = int(arguments.get("in_chans") or own["input_size"][0])
    return LoadedModel(
        name,
        "timm",
        *adapt(model, size, channels, f"timm's {name}", task=task),
        preprocess=preprocess or timm_preprocess(own, channels, size),
        notes=(f"exported from timm {timm.__version__}'s own module", *notes),
    )


def _converted(timm: ModuleType, name: str, state: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], list[str]]:
    """A state dict under the names that a paper's authors gave their tensors, as timm converts it when it loads one;
    any other as it is.

    Raises:
        CheckpointError: biases of query, key and value that this architecture of timm does not have.
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
    except Exception:  # of a state dict that is for something else, which `load_state` says
        return state, []
    # timm's loader also resizes tables without a word: those of another size are for another model.
    tables = [key for key in converted.keys() & state.keys() if key.endswith(RESIZED)]
    if not own <= converted.keys() or any(converted[key].numel() != state[key].numel() for key in tables):
        return state, []
    lost = [key for key in state if key.endswith("attn.qkv.bias") and state[key].any()]
    if lost and not any(key.endswith(("q_bias", "qkv.bias")) for key in converted):
        raise CheckpointError(
            f"timm's {name} has no biases of query, key and value, and the checkpoint has",
            found=f"{lost[0]} and {len(lost) - 1} more",
            wanted="an architecture with them",
            fix=f"name timm:{name}_qkvb",
        )
    return converted, [f"names of the original release, converted by timm's loader of {name}"]


def _resized(model: Any, image_size: tuple[int, int], build: Callable[[], nn.Module]) -> nn.Module:
    """timm's module for another image size: as `build` makes it, if the weights fit, so that windows keep their size;
    else with its positions resized by timm. A module without sizes, made of convolutions, takes all."""
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
    """Arguments for timm's `create_model`: from its config.json, else inferred from a fine-tuned checkpoint."""
    # The weights are those of the folder; timm would read the file of this name, wherever it lies.
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
