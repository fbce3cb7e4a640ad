"""A module of the user's own, with what has to be known of it: what a function returned, or one that is in memory."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from vitdeploy.errors import CheckpointError, UserCodeError
from vitdeploy.models.external.adapted import IMAGE_SIZE, adapt, size_of, size_within
from vitdeploy.models.external.own_scaling import with_own_scaling
from vitdeploy.models.libraries import last_line
from vitdeploy.models.loaded import LoadedModel
from vitdeploy.models.model_folder.image_processor import timm_preprocess
from vitdeploy.runtime.labels import number_of_classes
from vitdeploy.spec import PostprocessSpec, PreprocessSpec, Task

ASSUMED = "the module does not say how images are prepared: mean = std = 0.5 is assumed"
# Tasks whose answer is about an image as such: its short side is resized, and the middle is cut out.
OF_THE_MIDDLE: tuple[Task, ...] = ("classification", "features", "zero-shot")


def from_module(
    module: nn.Module,
    *,
    name: str = "",
    preprocess: PreprocessSpec | None = None,
    image_size: tuple[int, int] | None = None,
    task: Task | None = None,
    labels: Sequence[str] = (),
) -> LoadedModel:
    """A copy of a module in memory as the original of a job: on the CPU, float32, in evaluation mode.

    Args:
        name: for people; by default that of its class.
        preprocess: how its images are prepared; by default as `pretrained_cfg` says (timm's modules have it), else
            as its first operators scale pixels, or mean = std = 0.5. Where answers lie in the image, as maps and boxes
            do, by default both sides are resized.
        image_size: (height, width) in pixels; by default the crop of `preprocess`, else what the module says, else 224.
        task: what its outputs are to be taken for; "features" where one output [batch, width] is no logits.
        labels: one name a class, in the order of the outputs.

    Raises:
        UserCodeError: no torch.nn.Module, or one that cannot be copied.
        CheckpointError: it does not run on such images, its outputs are of no task or of another one, or preprocessing
            or labels do not fit it.
    """
    require_module(module, f"{name or 'what is given'} is no model")
    name = name or type(module).__name__
    own = copied(module, name)
    original = described(own, name, image_size, preprocess=preprocess, task=task)
    signature = original.signature
    classes = number_of_classes(signature.outputs, signature.postprocess) if signature.task != "features" else None
    if labels and len(labels) != classes:
        raise CheckpointError(
            f"the labels do not fit {name}",
            found=f"{len(labels)} labels",
            wanted=f"one per class: {classes}" if classes else "none: it has no classes",
        )
    return dataclasses.replace(original, family="module", labels=tuple(labels))


def copied(module: nn.Module, name: str) -> nn.Module:
    """A copy on the CPU. Raises UserCodeError if copy.deepcopy does not take the module."""
    try:
        return copy.deepcopy(module).cpu()
    except Exception as error:  # tensors that are results of a computation, locks, open files
        raise UserCodeError(
            f"{name} cannot be copied",
            found=f"{type(error).__name__}: {last_line(error)}",
            wanted="a module that copy.deepcopy takes: the one that is given stays as it is",
            fix="give one that is built anew, with load_state_dict(module.state_dict())",
        ) from None


def require_module(model: object, refused: str) -> nn.Module:
    """The model itself. Raises UserCodeError, called `refused`, where it is no torch.nn.Module."""
    if isinstance(model, nn.Module):
        return model
    found = f"the class {model.__name__} itself" if isinstance(model, type) else type(model).__name__
    raise UserCodeError(refused, found=found, wanted="a torch.nn.Module")


def described(
    model: nn.Module,
    name: str,
    image_size: tuple[int, int] | None,
    *,
    preprocess: PreprocessSpec | None = None,
    task: Task | None = None,
    notes: Sequence[str] = (),
) -> LoadedModel:
    """A user's module with its size, preprocessing and outputs, as far as it declares them; `notes` come first.

    Raises:
        CheckpointError: it does not run on such images, its outputs fit no task, or `preprocess` does not fit it.
    """
    told = list(notes)
    own = getattr(model, "pretrained_cfg", None) or {}
    known = size_of(model, own)
    within = None if known else size_within(model)
    chosen = image_size or (preprocess.crop if preprocess is not None else None)
    size = chosen or known or within or IMAGE_SIZE
    channels = preprocess.channels if preprocess is not None else _channels(model)
    if preprocess is not None and preprocess.crop != size:
        raise CheckpointError(
            f"the preprocessing does not fit {name}",
            found=f"crop {preprocess.crop[0]}x{preprocess.crop[1]}",
            wanted=f"crop {size[0]}x{size[1]}, the image size that is asked for",
            fix="change the crop, or leave the image size out",
        )
    if chosen is None and known is None:
        assumption = f"{size[0]}x{size[1]} is {'that of its parts' if within else 'assumed'}"
        told.append(
            f"the module does not say its image size: {assumption} (--image-size; source.image_size in a recipe)"
        )
    adapted, signature = adapt(model, size, channels, name, task=task)
    if isinstance(signature.postprocess, PostprocessSpec):
        scores = signature.postprocess.scores
        told.append(f"detections are scored by {scores}, as far as the module tells (postprocess: says otherwise)")
    assumed = None if preprocess is not None or own else ASSUMED
    preprocess = preprocess or _preprocess(own, channels, size, signature.task)
    return with_own_scaling(LoadedModel(name, "function", adapted, signature, preprocess, notes=tuple(told)), assumed)


def _preprocess(pretrained: Mapping[str, Any], channels: int, size: tuple[int, int], task: Task) -> PreprocessSpec:
    """Of timm's config, or one that is assumed. Where answers lie in the image the model sees all of it."""
    if pretrained:
        spec = timm_preprocess(pretrained, channels, size)
    else:
        plain = size[0] if size[0] == size[1] else size
        spec = PreprocessSpec(plain, size, mean=(0.5,) * channels, std=(0.5,) * channels)
    return spec if task in OF_THE_MIDDLE else dataclasses.replace(spec, resize=size, fit="stretch")


def _channels(model: nn.Module) -> int:
    """Input channels of the first convolution; 3 where there is none."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return first.in_channels if first is not None else 3
