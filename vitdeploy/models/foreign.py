"""Modules that are not ours: timm's, transformers', or what a user's own function returns.

They go through the same export, parity and bundle. Here they are built, loaded, and given a signature by running them
once: the names and shapes of their outputs say which task they are for.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError, MissingPackageError, UnknownModelError, UserCodeError
from vitdeploy.models.checkpoint import load_state
from vitdeploy.models.config_files import labels_of, timm_preprocess
from vitdeploy.models.family import Signature
from vitdeploy.models.original import Original
from vitdeploy.spec import PostprocessSpec, PreprocessSpec, TensorSpec

IMAGE_SIZE = (224, 224)
SEED = 0
Output = tuple[str, Tensor]


class Adapted(nn.Module):
    """A foreign module with the outputs of a `Signature`: float tensors in a fixed order, whatever it returns."""

    def __init__(self, model: nn.Module, argument: str | None = None) -> None:
        super().__init__()
        self.model = model
        self.argument = argument

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        result = self.model(image) if self.argument is None else self.model(**{self.argument: image})
        tensors = tuple(tensor for _, tensor in named_outputs(result))
        return tensors[0] if len(tensors) == 1 else tensors


def named_outputs(result: Any) -> list[Output]:
    """The outputs that a task is made of, by what a module returned; [] where nothing is recognised.

    A tensor [b, c] is logits; a tuple or a mapping of [b, q, c] and [b, q, 4] is a detector's; transformers' outputs
    are taken by their field names.
    """
    if isinstance(result, Tensor):
        return [("logits", result)] if result.ndim == 2 else _tokens(result)
    if isinstance(result, Mapping):
        fields: Mapping[str, Any] = result
        boxes = fields.get("pred_boxes")
        logits = fields.get("logits", fields.get("pred_logits"))
        if isinstance(logits, Tensor) and isinstance(boxes, Tensor):
            masks = fields.get("pred_masks")
            return [("logits", logits), ("boxes", boxes), *([("masks", masks)] if isinstance(masks, Tensor) else [])]
        if isinstance(logits, Tensor) and logits.ndim == 2:
            return [("logits", logits)]
        return _features(fields)
    if isinstance(result, tuple | list) and len(result) in (2, 3) and all(isinstance(t, Tensor) for t in result):
        logits, boxes = result[:2]
        if logits.ndim == 3 and boxes.ndim == 3 and boxes.shape[-1] == 4:
            return list(zip(("logits", "boxes", "masks"), result, strict=False))
        if logits.ndim == 2 and boxes.ndim == 3:
            return [("features", logits), ("patch_features", boxes)]
    return []


def _tokens(result: Tensor) -> list[Output]:
    """[b, n, d]: the first token and the others; [b, d, h, w]: a feature map and its mean."""
    if result.ndim == 3:
        return [("features", result[:, 0]), ("patch_features", result[:, 1:])]
    if result.ndim == 4:
        return [("features", result.mean(dim=(2, 3))), ("patch_features", result.flatten(2).transpose(1, 2))]
    return []


def _features(fields: Mapping[str, Any]) -> list[Output]:
    pooled, hidden = fields.get("pooler_output"), fields.get("last_hidden_state")
    pooled = fields.get("image_embeds", pooled)
    found: list[Output] = [("features", pooled.flatten(1))] if isinstance(pooled, Tensor) else []
    if isinstance(hidden, Tensor):
        tokens = _tokens(hidden)
        found += tokens[1:] if found else tokens
    return found


def from_timm(
    name: str, config: Mapping[str, Any], state: Mapping[str, Tensor] | None, image_size: tuple[int, int] | None
) -> Original:
    """timm's own module of an architecture; `config` is timm's config.json, {} without one; `state` None: seeded noise.

    Raises:
        MissingPackageError: timm is not installed.
        UnknownModelError: timm has no such architecture.
    """
    timm = _library("timm", f"the architecture {name}")
    if not timm.is_model(name):
        near = timm.list_models(f"{name.split('_')[0]}*")[:3]
        raise UnknownModelError(
            f"timm {timm.__version__} has no architecture {name!r}",
            found=name,
            wanted="one of timm.list_models()",
            fix=f"for example {', '.join(near)}" if near else "check the name",
        )
    arguments = dict(config.get("model_args") or {})
    if config.get("num_classes") is not None:
        arguments["num_classes"] = config["num_classes"]
    torch.manual_seed(SEED)
    try:
        model = timm.create_model(name, pretrained=False, **arguments)
    except Exception as error:
        raise CheckpointError(
            f"timm cannot build {name}", found=_last_line(error), wanted=f"arguments that it takes, not {arguments}"
        ) from None
    own = {**model.pretrained_cfg, **(config.get("pretrained_cfg") or {})}
    if state is not None:
        load_state(model, state, name)
    size = tuple(own["input_size"][1:])
    if image_size is not None and image_size != size and hasattr(model, "set_input_size"):
        model.set_input_size(img_size=image_size)
    size = image_size or size
    channels = int(own["input_size"][0])
    return Original(
        name,
        "timm",
        *_adapt(model, size, channels, None, f"timm's {name}"),
        preprocess=timm_preprocess(own, channels, size),
        labels=labels_of(config),
        notes=(f"exported from timm {timm.__version__}'s own module",),
    )


def from_transformers(
    folder: Path, config: Mapping[str, Any], preprocess: PreprocessSpec, image_size: tuple[int, int]
) -> Original:
    """transformers' own module of a folder, of the class that the config's "architectures" names.

    Raises:
        MissingPackageError: transformers is not installed.
        UnknownModelError: it has no such class.
        CheckpointError: it cannot load the folder.
    """
    name = str((config.get("architectures") or [""])[0])
    transformers = _library("transformers", f"the architecture {name or config.get('model_type')}")
    cls = getattr(transformers, name, None)
    if cls is None:
        raise UnknownModelError(
            f"transformers {transformers.__version__} has no class {name!r}",
            found=f"architectures in {folder / 'config.json'}",
            wanted="the name of a model class",
            fix="pip install --upgrade transformers",
        )
    try:
        model = cls.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False, dtype=torch.float32, use_safetensors=True
        )
    except Exception as error:
        raise CheckpointError(f"transformers cannot load {folder} as {name}", found=_last_line(error)) from None
    return Original(
        folder.name,
        "transformers",
        *_adapt(model, image_size, preprocess.channels, "pixel_values", f"transformers' {name}"),
        preprocess=preprocess,
        labels=labels_of(config),
        notes=(f"exported from transformers {transformers.__version__}'s own module",),
    )


def from_function(reference: str, image_size: tuple[int, int] | None) -> Original:
    """What `package.module:function` returns when called without arguments, looked for from the working folder too.

    Preprocessing comes from the module's `pretrained_cfg` where it has one (timm's modules do), else mean = std = 0.5.

    Raises:
        UserCodeError: no such module or function, it fails, or it returns something else than a torch.nn.Module.
    """
    model = _call(_function(reference), reference)
    own = getattr(model, "pretrained_cfg", None) or {}
    configured = own.get("input_size", (0, 0, 0))
    size = image_size or (tuple(configured[1:]) if all(configured) else IMAGE_SIZE)
    channels = _channels(model)
    notes = [f"{reference} returned a {type(model).__name__}"]
    if own:
        preprocess = timm_preprocess(own, channels, size)
    else:
        preprocess = PreprocessSpec(min(size), size, mean=(0.5,) * channels, std=(0.5,) * channels)
        notes.append("the module does not say how images are prepared: mean = std = 0.5 is assumed")
    if image_size is None and not all(configured):
        notes.append(f"the module does not say its image size: {size[0]}x{size[1]} is assumed (--image-size)")
    adapted, signature = _adapt(model, size, channels, None, reference)
    return Original(reference, "function", adapted, signature, preprocess, notes=tuple(notes))


def _function(reference: str) -> Callable[[], Any]:
    module_name, separator, function_name = reference.partition(":")
    if not separator or not function_name:
        raise UserCodeError(f"{reference!r} names no function", wanted="package.module:function")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise UserCodeError(
            f"{module_name} cannot be imported",
            found=_where(error),
            wanted="a module on the Python path, or in the working folder",
        ) from None
    function = getattr(module, function_name, None)
    if not callable(function):
        near = ", ".join(name for name in vars(module) if callable(getattr(module, name)) and not name.startswith("_"))
        raise UserCodeError(
            f"{module_name} has no function {function_name!r}", found=near[:200] or "no function", wanted=function_name
        )
    return function


def _call(function: Callable[[], Any], reference: str) -> nn.Module:
    try:
        model = function()
    except Exception as error:
        raise UserCodeError(f"{reference} failed", found=_where(error), wanted="a torch.nn.Module") from None
    if not isinstance(model, nn.Module):
        raise UserCodeError(f"{reference} returned no model", found=type(model).__name__, wanted="a torch.nn.Module")
    return model.float().eval()


def _channels(model: nn.Module) -> int:
    """Input channels of the first convolution; 3 where there is none."""
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return first.in_channels if first is not None else 3


def _adapt(
    model: nn.Module, image_size: Any, channels: int, argument: str | None, what: str
) -> tuple[nn.Module, Signature]:
    """The module behind `Adapted`, and what one run of two blank images says of its outputs."""
    module = Adapted(model.float().eval(), argument)
    image = torch.zeros(2, channels, *image_size)
    try:
        with torch.inference_mode():
            outputs = named_outputs(model(image) if argument is None else model(**{argument: image}))
    except Exception as error:
        raise CheckpointError(
            f"{what} does not run on an image of {image_size[0]}x{image_size[1]} with {channels} channels",
            found=_where(error),
            fix="--image-size HEIGHTxWIDTH",
        ) from None
    if not outputs:
        raise CheckpointError(
            f"{what} returns something that vitdeploy has no task for",
            wanted="logits [batch, classes]; or logits [batch, queries, classes] and boxes [batch, queries, 4]; "
            "or features [batch, width]",
            fix="wrap it in a module that returns one of these",
        )
    names = [name for name, _ in outputs]
    task: Any = "features" if "features" in names else "classification"
    task = "panoptic" if "masks" in names else "detection" if "boxes" in names else task
    specs = tuple(TensorSpec(name, "float32", ("batch", *tensor.shape[1:])) for name, tensor in outputs)
    # transformers' own post-processing: DETR and YOLOS score by softmax, all later detectors by sigmoid.
    scores: Any = "softmax" if type(model).__name__.startswith(("DetrFor", "Yolos")) else "sigmoid"
    head = PostprocessSpec(scores=scores) if task in ("detection", "panoptic") else None
    return module, Signature(task, tuple(image_size), channels, specs, head)


def _library(name: str, why: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        raise MissingPackageError(name, name, why) from None


def _where(error: Exception) -> str:
    """The error, with the last line of the user's own code that it came through."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    ours = str(Path(__file__).parent.parent)
    frames = [f for f in frames if not f.filename.startswith((ours, "<"))]
    line = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno}: {frames[-1].line})" if frames else ""
    return f"{type(error).__name__}: {_last_line(error)}{line}"


def _last_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:300]
