"""A module that is not ours with a signature, which one run of it tells: the names and shapes of its outputs say which
task they are for. It then goes through the same export, parity and bundle as ours.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError
from vitdeploy.graph.io.meanings import (
    OUTPUTS,
    PROBABILITIES,
    all_kept,
    left_out,
    may_be_logits,
    meaning_of,
    of_problem,
    of_training,
)
from vitdeploy.models.external.outputs import (
    ROWS,
    OutputWatch,
    map_of,
    name_of,
    names_beside,
    other_tasks,
    recognised,
    sizes_of_patches,
    watched,
)
from vitdeploy.models.external.sizes import FewTokens, QueriesTaken, nearest_sizes, runs, smallest_size
from vitdeploy.models.family import Signature, few_tokens
from vitdeploy.models.model_folder.folder import backbone_size, sides
from vitdeploy.models.source import where
from vitdeploy.runtime.values import last_resort
from vitdeploy.spec import INVERSE_ASSUMED, Task, TensorSpec

IMAGE_SIZE = (224, 224)
SEED = 0
SHOWN_CHARACTERS = 300
LEAST = float(np.finfo(np.float32).tiny)


class Adapted(nn.Module):
    """An external module with the outputs of a `Signature`: tensors in a fixed order, whatever it returns.

    `arguments` are passed after the image, the module's first argument. `task`: what its outputs are to be taken for.
    `probabilities`: they are a softmax already, of which the logarithm gives logits.
    """

    def __init__(self, model: nn.Module, arguments: Mapping[str, Any] | None = None, task: Task | None = None) -> None:
        super().__init__()
        self.model = model
        self.arguments = dict(arguments or {})
        # timm's modules without classes, and those made like them, return their pooled features.
        self.task: Task | None = task or ("features" if getattr(model, "num_classes", None) == 0 else None)
        self.probabilities = False

    def returned(self, image: Tensor) -> Any:
        """Whatever the module itself gives."""
        return self.model(image, **self.arguments)

    def forward(self, image: Tensor) -> Tensor | tuple[Tensor, ...]:
        found = recognised(self.returned(image), self.task)
        assert found is not None, "`adapt` refuses a module without outputs of a task"
        tensors = tuple(tensor for _, tensor in found[1])
        if self.probabilities:
            tensors = tuple(tensor.clamp_min(LEAST).log() for tensor in tensors)
        return tensors[0] if len(tensors) == 1 else tensors


def size_of(model: nn.Module, pretrained: Mapping[str, Any]) -> tuple[int, int] | None:
    """The image size, (height, width), that a module says: timm's, torchvision's and transformers' do."""
    found = (
        getattr(getattr(model, "patch_embed", None), "img_size", None),
        getattr(model, "image_size", None),
        getattr(getattr(model, "config", None), "image_size", None),
        pretrained.get("input_size"),
    )
    return next(filter(None, map(sides, found)), None)


def size_within(model: nn.Module) -> tuple[int, int] | None:
    """The image size, (height, width), that the parts of a module say, where all that say one say the same."""
    to_dict = getattr(getattr(model, "config", None), "to_dict", None)
    if callable(to_dict) and (size := backbone_size(to_dict())) is not None:
        return size
    sizes = {size_of(part, {}) or sides(getattr(part, "img_size", None)) for part in model.modules()} - {None}
    return sizes.pop() if len(sizes) == 1 else None


def adapt(
    model: nn.Module,
    image_size: tuple[int, int],
    channels: int,
    what: str,
    arguments: Mapping[str, Any] | None = None,
    *,
    task: Task | None = None,
) -> tuple[nn.Module, Signature]:
    """Wrap the module in `Adapted`; also returns what one run on two images of noise shows about its outputs.

    Raises:
        CheckpointError: it does not run on such images, or its outputs are of no task, or of another than `task`.
    """
    module = Adapted(model.float(), arguments, task).eval()
    # No image is blank: what its answers have in common, such as a length of 1, is to be seen.
    image = torch.rand(2, channels, *image_size, generator=torch.Generator().manual_seed(SEED))
    try:
        # Not inference_mode: what a module keeps from this run must still be usable when it is exported.
        with torch.no_grad(), QueriesTaken():
            returned, watch = watched(module.model, lambda: module.returned(image))
    except FewTokens as error:
        tokens, queries = error.args
        smallest = smallest_size(module.model, image_size, channels, module.arguments, queries / tokens)
        raise few_tokens(what, image_size, tokens, queries, smallest) from None
    except Exception as error:
        raise CheckpointError(
            f"{what} does not run on an image of {image_size[0]}x{image_size[1]} with {channels} channels",
            found=where(error),
            wanted=f"a model that takes float32 [batch, {channels}, height, width] and nothing else",
            fix=_fix(module, image_size, channels),
        ) from None
    notes = _settle(module, returned, watch, image_size)
    found = recognised(returned, module.task)
    if found is None or any(len(tensor) != len(image) for _, tensor in found[1]):
        shapes = ", ".join(
            f"{key} {_dtype(tensor)} {list(tensor.shape)}" for key, tensor in (found[1] if found else [])
        )
        raise CheckpointError(
            f"{what} returns something that vitdeploy has no task for",
            found=f"for 2 images: {shapes or _described(returned)}"[:SHOWN_CHARACTERS],
            wanted="; or ".join(row.wanted for row in reversed(ROWS)),
            fix="wrap it in a module that returns one of these",
        )
    row, outputs = found
    nearest = sizes_of_patches(model, image_size) if row.task in ("segmentation", "depth") else None
    if nearest is not None:  # the rest of the image would be left out, and the map stretched over all of it
        raise CheckpointError(
            f"{what} does not see the whole of an image of {image_size[0]}x{image_size[1]}",
            found="sides that its patches do not divide",
            wanted=nearest,
            fix=f"--image-size {nearest.split()[0]}",
        )
    specs = tuple(TensorSpec(name, _dtype(tensor), ("batch", *tensor.shape[1:])) for name, tensor in outputs)
    if task not in (None, row.task):
        raise CheckpointError(
            f"{what} gives no answers of the task that is asked for",
            found=f"{row.task}: {', '.join(f'{spec.name} {list(spec.shape)}' for spec in specs)}"
            + "".join(f"; {note.removeprefix(OUTPUTS)}" for note in notes if row.task == "tensors"),
            wanted=str(task),
            fix="name its own task, or wrap it in a module that returns what the task is made of",
        )
    if row.task == "tensors" != task and not notes:
        notes = (last_resort(other_tasks(returned, row.task)),)
    if row.task == "depth" and getattr(model, "config", None) is None:
        notes = (*notes, INVERSE_ASSUMED)
    return module, Signature(row.task, image_size, channels, specs, row.postprocess(model, specs), notes=notes)


def _fix(module: Adapted, size: tuple[int, int], channels: int) -> str:
    """What a module that does not run needs, as far as it is found by trying."""
    other = 1 if channels == 3 else 3
    if runs(module.model, size, other, module.arguments):
        return f"preprocess: in a recipe, with mean and std of {other}: it runs on images of so many channels"
    near = " or ".join(f"{h}x{w}" for h, w in nearest_sizes(module.model, size, channels, module.arguments))
    if near:
        return f"--image-size {near}: it runs on these"
    return "--image-size HEIGHTxWIDTH, or wrap it in a module that takes the image alone"


def _settle(module: Adapted, returned: Any, watch: OutputWatch, image_size: tuple[int, int]) -> tuple[str, ...]:
    """Decide what is no matter of shapes: `task` and `probabilities` of the module. Returns notes on what is assumed,
    or is not as the user asked."""
    asked, found = module.task, recognised(returned, module.task)
    if found is None or found[0].task == "tensors":
        return ()
    (row, outputs), told = found, ""
    task, tensor = row.task, outputs[0][1]
    if task == "classification":
        name, layer = name_of(returned, tensor), watch.layers.get(tensor.data_ptr(), "")
        task, told = meaning_of(name, tensor.shape[1], watch.ending(tensor), layer, _classes(module.model))
        problem = of_problem({"problem_type": getattr(getattr(module.model, "config", None), "problem_type", None)})
        task, told = ("tensors", problem) if problem else (task, told)
        if asked == "classification" and (task != "tensors" or may_be_logits(told)):
            task, told = asked, told if told == PROBABILITIES else ""
        module.probabilities = told == PROBABILITIES
    elif task == "features" != asked and isinstance(returned, Tensor):
        task, told = map_of(returned, image_size)
    # A library's own module gives one answer, and what it was computed of.
    left = () if _is_library(module.model) else names_beside(returned, [tensor for _, tensor in outputs])
    own = [name for name in left if not of_training(name)]
    if own and task in ("classification", "features") and asked != task:
        module.probabilities = False
        task, told, left = "tensors", all_kept(task, [name_of(returned, tensor)], own), ()
    if task != row.task:
        module.task = task
    return (*filter(None, [told]), *([left_out(left)] if left and task != "tensors" else []))


def _classes(model: nn.Module) -> int | None:
    """How many classes a module of timm or of transformers, or one made like them, says that it has."""
    config = getattr(model, "config", None) if "Classification" in type(model).__name__ else None
    found = getattr(model, "num_classes", getattr(config, "num_labels", None))
    return found if isinstance(found, int) else None


def _is_library(model: nn.Module) -> bool:
    return type(model).__module__.partition(".")[0] in ("timm", "transformers")


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


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
