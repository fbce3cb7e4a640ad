"""A module that is not ours with a signature, which one run of it tells: the names and shapes of its outputs say which
task they are for. It then goes through the same export, parity and bundle as ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError
from vitdeploy.models.external.libraries import where
from vitdeploy.models.external.sizes import nearest_sizes
from vitdeploy.models.family import Signature
from vitdeploy.models.model_folder.config import sides
from vitdeploy.models.model_folder.objects import reading_rule
from vitdeploy.spec import PostprocessSpec, Task, TensorSpec

IMAGE_SIZE = (224, 224)
SEED = 0
SHOWN_CHARACTERS = 300
Output = tuple[str, Tensor]


class Adapted(nn.Module):
    """An external module with the outputs of a `Signature`: float tensors in a fixed order, whatever it returns.

    `arguments` are passed after the image, the module's first argument. `headless`: see `named_outputs`.
    """

    def __init__(self, model: nn.Module, arguments: Mapping[str, Any] | None = None, *, headless: bool = False) -> None:
        super().__init__()
        self.model = model
        self.arguments = dict(arguments or {})
        # timm's modules without classes, and those made like them, return their pooled features.
        self.headless = headless or getattr(model, "num_classes", None) == 0

    def returned(self, image: Tensor) -> Any:
        """Whatever the module itself gives."""
        return self.model(image, **self.arguments)

    def outputs(self, image: Tensor) -> list[Output]:
        return self.named(self.returned(image))

    def named(self, result: Any) -> list[Output]:
        return named_outputs(result, headless=self.headless)

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        tensors = tuple(tensor for _, tensor in self.outputs(image))
        return tensors[0] if len(tensors) == 1 else tensors


def named_outputs(result: Any, *, headless: bool = False) -> list[Output]:
    """The outputs that a task is made of, by what a module returned; [] if nothing is recognised.

    A tensor [b, c] is logits, or features of a `headless` module; a tuple or a mapping of [b, q, c] and [b, q, 4] is a
    detector's; transformers' outputs are taken by their field names.
    """
    if isinstance(result, Tensor):
        return [("features" if headless else "logits", result)] if result.ndim == 2 else _tokens(result)
    if isinstance(result, tuple | list) and len(result) == 1:
        return named_outputs(result[0], headless=headless)
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


def size_of(model: nn.Module, pretrained: Mapping[str, Any]) -> tuple[int, int] | None:
    """The image size, (height, width), that a module says: timm's, torchvision's and transformers' do."""
    found = (
        getattr(getattr(model, "patch_embed", None), "img_size", None),
        getattr(model, "image_size", None),
        getattr(getattr(model, "config", None), "image_size", None),
        pretrained.get("input_size"),
    )
    return next(filter(None, map(sides, found)), None)


def adapt(
    model: nn.Module,
    image_size: tuple[int, int],
    channels: int,
    what: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    headless: bool = False,
) -> tuple[nn.Module, Signature]:
    """Wrap the module in `Adapted`; also returns what one run on two blank images shows about its outputs."""
    module = Adapted(model.float(), arguments, headless=headless).eval()
    image = torch.zeros(2, channels, *image_size)
    try:
        # Not inference_mode: what a module keeps from this run must still be usable when it is exported.
        with torch.no_grad():
            returned = module.returned(image)
    except Exception as error:
        near = " or ".join(f"{h}x{w}" for h, w in nearest_sizes(module.model, image_size, channels, module.arguments))
        raise CheckpointError(
            f"{what} does not run on an image of {image_size[0]}x{image_size[1]} with {channels} channels",
            found=where(error),
            wanted=f"a model that takes float32 [batch, {channels}, height, width] and nothing else",
            fix=f"--image-size {near}: it runs on these"
            if near
            else "--image-size HEIGHTxWIDTH, or wrap it in a module that takes the image alone",
        ) from None
    outputs = module.named(returned)
    if not outputs or any(len(tensor) != len(image) or not tensor.is_floating_point() for _, tensor in outputs):
        shapes = ", ".join(f"{name} {tensor.dtype} {list(tensor.shape)}" for name, tensor in outputs)
        raise CheckpointError(
            f"{what} returns something that vitdeploy has no task for",
            found=f"for 2 images: {shapes or _described(returned)}"[:SHOWN_CHARACTERS],
            wanted="logits [batch, classes]; or logits [batch, queries, classes] and boxes [batch, queries, 4]; "
            "or features [batch, width]",
            fix="wrap it in a module that returns one of these",
        )
    names = [name for name, _ in outputs]
    task: Task = "features" if "features" in names else "classification"
    task = "panoptic" if "masks" in names else "detection" if "boxes" in names else task
    specs = tuple(TensorSpec(name, "float32", ("batch", *tensor.shape[1:])) for name, tensor in outputs)
    return module, Signature(task, image_size, channels, specs, _head(model) if "boxes" in names else None)


def _head(model: nn.Module) -> PostprocessSpec | None:
    """How objects are read from a detector's outputs: as transformers does; by sigmoid if it is no model of theirs."""
    config = getattr(model, "config", None)
    own = {key: getattr(config, key, None) for key in ("model_type", "use_focal_loss")}
    return reading_rule(own) if own["model_type"] else PostprocessSpec(scores="sigmoid")


def _described(result: Any) -> str:
    """Describe what a module returned: tensors by their shapes, one level deep in tuples and mappings."""
    if isinstance(result, Tensor):
        return f"{str(result.dtype).removeprefix('torch.')} {list(result.shape)}"
    if isinstance(result, Mapping):
        return f"{type(result).__name__} of {', '.join(f'{key} {_short(value)}' for key, value in result.items())}"
    if isinstance(result, tuple | list):
        return f"{type(result).__name__} of {', '.join(map(_short, result)) or 'nothing'}"
    return type(result).__name__


def _short(value: Any) -> str:
    return _described(value) if isinstance(value, Tensor) else type(value).__name__
