"""An external module with a signature inferred from one run: the names and shapes of its outputs determine the task.
It then goes through the same export, parity check and bundle as a built-in model.
"""

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from vitdeploy.errors import CheckpointError
from vitdeploy.graph.io import meanings
from vitdeploy.graph.io.bound import constants
from vitdeploy.models import family, pixel_range, source
from vitdeploy.models.external import arguments as bound
from vitdeploy.models.external.outputs import (
    ROWS,
    OutputWatch,
    evidence,
    map_of,
    name_of,
    names_beside,
    other_tasks,
    proposals,
    recognised,
    sizes_of_patches,
    watched,
)
from vitdeploy.models.model_folder.folder import backbone_size, sides
from vitdeploy.runtime.tasks.depth import INVERSE_ASSUMED
from vitdeploy.runtime.tasks.multi_label import PROBABILITIES
from vitdeploy.runtime.values import last_resort
from vitdeploy.spec import Task, TensorSpec

IMAGE_SIZE = (224, 224)
SEED = 0
SHOWN_CHARACTERS = 300
LEAST = float(np.finfo(np.float32).tiny)


class Adapted(nn.Module):
    """An external module that returns the outputs of a `Signature`: tensors in a fixed order.

    `arguments` are passed after the image, the module's first argument. `task`: the task to interpret its outputs as.
    `passings`: how the user's bound values are passed to further arguments; tensors become buffers. `inputs`: further
    per-image inputs, which `forward` takes after the image.
    `probabilities`: the outputs are softmax values, whose logarithm gives logits; `independent`: they are sigmoids.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: Mapping[str, Any] | None = None,
        task: Task | None = None,
        passings: bound.Passings | None = None,
        inputs: Sequence[TensorSpec] = (),
    ) -> None:
        super().__init__()
        self.model = model
        self.arguments = dict(arguments or {})
        self.passings = dict(passings or {})
        self.inputs = tuple(inputs)
        self.keyword = bound.image_keyword(model, [*self.passings, *(tensor.name for tensor in self.inputs)])
        for name, passing in self.passings.items():
            if isinstance(passing.value, Tensor):
                self.register_buffer(f"bound_{name}", passing.value, persistent=False)
        # timm's modules without classes, and similar ones, return their pooled features.
        self.task: Task | None = task or ("features" if getattr(model, "num_classes", None) == 0 else None)
        self.probabilities = self.independent = False

    def returned(self, image: Tensor, *further: Tensor) -> Any:
        """Return the module's own result."""
        values = dict(self.arguments)
        values |= {tensor.name: value for tensor, value in zip(self.inputs, further, strict=True)}
        for name, passing in self.passings.items():
            tensor = getattr(self, f"bound_{name}", None)  # on the device of this copy of the module
            values[name] = passing.for_images(image, passing.value if tensor is None else tensor)
        return self.model(image, **values) if self.keyword is None else self.model(**{self.keyword: image}, **values)

    def forward(self, image: Tensor, *further: Tensor) -> Tensor | tuple[Tensor, ...]:
        found = recognised(self.returned(image, *further), self.task)
        assert found is not None, "`adapt` refuses a module without outputs of a task"
        tensors = tuple(tensor for _, tensor in found[1])
        if self.probabilities:
            tensors = tuple(tensor.clamp_min(LEAST).log() for tensor in tensors)
        return tensors[0] if len(tensors) == 1 else tensors


def size_of(model: nn.Module, pretrained: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the image size (height, width) declared by a module of timm, torchvision or transformers; else None."""
    found = (
        getattr(getattr(model, "patch_embed", None), "img_size", None),
        getattr(model, "image_size", None),
        getattr(getattr(model, "config", None), "image_size", None),
        pretrained.get("input_size"),
    )
    return next(filter(None, map(sides, found)), None)


def size_within(model: nn.Module) -> tuple[int, int] | None:
    """Return the image size (height, width) declared by the parts of a module, if all declarations agree."""
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
    bind: Sequence[str] = (),
) -> tuple[Adapted, family.Signature]:
    """Wrap the module in `Adapted`; also return the signature inferred from one run on two images of noise.

    `bind`: "NAME=VALUE" for further arguments, see `arguments`; "NAME=input:..." for per-image inputs.

    Raises:
        CheckpointError: it does not run on such images, its outputs match no task, or not `task`; or a bound value does
            not fit it.
    """
    inputs = bound.declared_inputs(bind, what)
    passings = _passings(model.float(), bind, what, (channels, *image_size), task, inputs)
    module = Adapted(model, arguments, task, passings, inputs).eval()
    # Noise instead of blank images, so that common properties of the outputs show, such as a length of 1.
    image = torch.rand(2, channels, *image_size, generator=torch.Generator().manual_seed(SEED))
    try:
        # Not inference_mode: tensors that a module keeps from this run must be usable during export.
        with torch.no_grad(), _QueriesTaken():
            further = bound.example_inputs(inputs, len(image))
            returned, watch = watched(module.model, lambda: module.returned(image, *further))
    except _FewTokens as error:
        tokens, queries = error.args
        smallest = smallest_size(module, image_size, channels, queries / tokens)
        raise family.few_tokens(what, image_size, tokens, queries, smallest) from None
    except Exception as error:
        raise CheckpointError(
            f"{what} does not run on an image of {image_size[0]}x{image_size[1]} with {channels} channels",
            found=source.where(error),
            expected=_expected(channels, inputs),
            fix=_fix(module, image_size, channels),
        ) from None
    notes = _settle(module, returned, watch, image_size)
    found = recognised(returned, module.task)
    if found is None or any(len(tensor) != len(image) for _, tensor in found[1]):
        shapes = ", ".join(
            f"{key} {_dtype(tensor)} {list(tensor.shape)}" for key, tensor in (found[1] if found else [])
        )
        raise CheckpointError(
            f"the outputs of {what} match no task of vitdeploy",
            found=f"for 2 images: {shapes or _described(returned)}"[:SHOWN_CHARACTERS],
            expected="; or ".join(row.expected for row in reversed(ROWS)),
            fix="wrap it in a module that returns one of these",
        )
    row, outputs = found
    outputs = [(PROBABILITIES, tensor) for _, tensor in outputs] if module.independent else outputs
    nearest = sizes_of_patches(model, image_size) if row.task in ("segmentation", "depth", "foreground") else None
    if nearest is not None:  # the rest of the image would be ignored, and the map stretched over all of it
        raise CheckpointError(
            f"the patches of {what} do not cover an image of {image_size[0]}x{image_size[1]}",
            found="sides that are not multiples of the patch size",
            expected=nearest,
            fix=f"--image-size {nearest.split()[0]}",
        )
    specs = tuple(TensorSpec(name, _dtype(tensor), ("batch", *tensor.shape[1:])) for name, tensor in outputs)
    if task not in (None, row.task):
        raise CheckpointError(
            f"{what} cannot be used for the task {task}",
            found=f"{row.task}: {', '.join(f'{spec.name} {list(spec.shape)}' for spec in specs)}"
            + "".join(f"; {note.removeprefix(meanings.OUTPUTS)}" for note in notes if row.task == "tensors"),
            expected=str(task),
            fix="name its own task, or wrap it in a module that returns the outputs of this task",
        )
    if row.task == "tensors" != task:
        notes = notes or (last_resort(other_tasks(returned, row.task)),)
        notes = tuple("; ".join([note, *proposals(returned, watch)]) for note in notes)
    if row.task == "depth" and getattr(model, "config", None) is None:
        notes = (*notes, INVERSE_ASSUMED)
    postprocess = evidence(row.task, returned, outputs, watch) or row.postprocess(model, specs)
    notes = (*notes, *filter(None, [postprocess.assumed if postprocess is not None else ""]))
    return module, family.Signature(row.task, image_size, channels, specs, postprocess, notes=notes, inputs=inputs)


def _expected(channels: int, inputs: Sequence[TensorSpec]) -> str:
    beside = f" and {', '.join(map(str, inputs))}" if inputs else " only"
    return f"a model that takes float32 [batch, {channels}, height, width]{beside}"


def _passings(
    model: nn.Module,
    bind: Sequence[str],
    what: str,
    image: tuple[int, int, int],
    task: Task | None,
    inputs: Sequence[TensorSpec],
) -> dict[str, bound.Passing]:
    """Choose how bound values are passed to the module, for images [channels, height, width]."""
    bind = constants(bind)
    if not bind:
        return {}
    images = torch.rand(bound.trial_batch(bind), *image, generator=torch.Generator().manual_seed(SEED))
    further = bound.example_inputs(inputs, len(images))

    def run(passings: bound.Passings) -> list[Tensor]:
        module = Adapted(model, None, task, passings, inputs).eval()
        with torch.no_grad():
            match = recognised(module.returned(images, *further), module.task)
        outputs = [tensor for _, tensor in match[1]] if match is not None else []
        for output in outputs:
            if len(output) != len(images):
                raise ValueError(f"an output has shape {list(output.shape)} for {len(images)} images")
        return outputs

    return bound.chosen_passings(model, bind, what, (image[1], image[2]), run)


def _fix(module: Adapted, size: tuple[int, int], channels: int) -> str:
    """Suggest a fix for a module that does not run, by trying other channels and image sizes."""
    other = 1 if channels == 3 else 3
    if runs(module, size, other):
        side, mean = f"[{size[0]}, {size[1]}]", f"[{', '.join(['0.5'] * other)}]"
        values = f"resize: {min(size)}, crop: {side}, mean: {mean}, std: {mean}"
        kind = "grey images" if other == 1 else "images with 3 channels"
        return f"preprocess: {{{values}}} in a recipe, with the values from training: the model runs on {kind}"
    near = " or ".join(f"{h}x{w}" for h, w in nearest_sizes(module, size, channels))
    if near:
        return f"--image-size {near}: the model runs at these sizes"
    return "--image-size HEIGHTxWIDTH, or wrap it in a module that takes only the image"


def _settle(module: Adapted, returned: Any, watch: OutputWatch, image_size: tuple[int, int]) -> tuple[str, ...]:
    """Set `task` and `probabilities` of the module, which shapes alone do not determine. Returns notes on assumptions
    and on deviations from the user's request."""
    requested, found = module.task, recognised(returned, module.task)
    if found is None or found[0].task == "tensors":
        return ()
    (row, outputs), note = found, ""
    task, tensor = row.task, outputs[0][1]
    if task in meanings.SCORES:
        name, layer = name_of(returned, tensor), watch.layers.get(tensor.data_ptr(), "")
        width, ending = tensor.shape[1] if tensor.ndim == 2 else 1, watch.ending(tensor)
        config = {"problem_type": getattr(getattr(module.model, "config", None), "problem_type", None)}
        classes, problem = _classes(module.model), meanings.of_problem(config)
        meaning = meanings.meaning_of(name, width, ending, layer, classes, problem=problem, asked=requested)
        if meaning.refusal:
            why, fix = str(requested), "omit the task"
            if requested is None:
                why, fix = f"of its config (problem_type {config['problem_type']})", "name another (--task)"
            raise CheckpointError(
                f"the module cannot be used for the task {why}",
                found=meaning.refusal,
                expected=meaning.expected,
                fix=f"{fix}, or wrap the module in one that returns its logits",
            )
        task, note = meaning.task, meaning.note
        module.probabilities, module.independent = meaning.scores, meaning.independent
    elif task == "features" != requested and isinstance(returned, Tensor):
        task, note = map_of(returned, image_size)
    # A library's own module returns one result, and its intermediate values.
    left = () if _is_library(module.model) else names_beside(returned, [tensor for _, tensor in outputs])
    own = [name for name in left if not meanings.of_training(name)]
    if own and task in meanings.FLAT and requested != task:
        module.probabilities = module.independent = False
        task, note, left = "tensors", meanings.all_kept(task, [name_of(returned, tensor)], own), ()
    if task != row.task:
        module.task = task
    return (*filter(None, [note]), *([meanings.left_out(left)] if left and task != "tensors" else []))


def _classes(model: nn.Module) -> int | None:
    """Return the number of classes that a module declares as timm or transformers do; else None."""
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
        return f"{type(result).__name__} of {', '.join(map(_short, result)) or 'no elements'}"
    return type(result).__name__


def _short(value: Any) -> str:
    return _described(value) if isinstance(value, Tensor) else type(value).__name__


# --- Detect how a module scales its pixels: run its forward pass up to the first layer, for a few images --------------
# The module's own code runs under a PyTorch mode that sees each operator. Operators that scale, shift and move values
# are followed from the image on; the pass stops at the first other operator that reads their result.


MOVES = (
    *("_reshape_alias", "_to_copy", "_unsafe_view", "alias", "cat", "clone", "detach", "expand", "flip", "index"),
    *("index_select", "lift_fresh", "permute", "select", "slice", "split", "split_with_sizes", "squeeze", "stack"),
    *("transpose", "unbind", "unsqueeze", "view"),
    # These keep values that are uniform or within the bounds, like those of the trial images.
    *("_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "clamp", "clamp_max", "clamp_min", "upsample_bicubic2d"),
    *("upsample_bilinear2d", "upsample_nearest2d"),
)
NORMS = ("_batch_norm_no_update", "_native_batch_norm_legit_no_training", "native_batch_norm")
# Sums: one operand or both may depend on the image; products: only one.
SUMS, PRODUCTS = ("add", "rsub", "sub"), ("div", "mul", "neg")


class _Reached(BaseException):
    """Raised when the first layer is reached; a BaseException, so that no module handles it as its own error."""


class _Following(TorchDispatchMode):
    """`values`: the values derived from the image that the first layer read."""

    def __init__(self, image: Tensor) -> None:
        super().__init__()
        self.followed = [image]
        self.values: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = list(_tensors((args, kwargs or {})))
        reads = [value for value in operands if any(value is image for image in self.followed)]
        if not reads:
            return func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::").rstrip("_")
        linear = name in (*MOVES, *SUMS) or (name in (*PRODUCTS, *NORMS) and reads == [args[0]])
        linear |= name == "mul" and len(reads) == 1
        if not linear:
            self.values = reads
            raise _Reached
        made = func(*args, **(kwargs or {}))
        self.followed += _tensors(made[:1] if name in NORMS else made)
        return made


def _tensors(values: Any) -> list[Tensor]:
    leaves, _ = torch.utils._pytree.tree_flatten(values)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def first_values(module: nn.Module, images: pixel_range.Floats) -> list[pixel_range.Floats]:
    """Return what the first layer of a module reads from images; [] if the module fails earlier."""
    image = torch.from_numpy(images.copy())  # the module may modify it
    following = _Following(image)
    try:
        with torch.no_grad(), following:
            further = bound.example_inputs(module.inputs if isinstance(module, Adapted) else (), len(image))
            module(image, *further)
    except _Reached:
        pass
    except Exception:  # a scripted module wraps the exception that stops it
        return [value.numpy() for value in following.values]
    return [value.numpy() for value in following.values]


def with_own_scaling(original: family.LoadedModel, assumed: str | None) -> family.LoadedModel:
    """Return the model with preprocessing that suits its own scaling, and notes; `assumed`: see `settled`."""
    signature, spec = original.signature, original.preprocess
    assert spec is not None
    scaling = pixel_range.scaling_of(
        lambda images: first_values(original.module, images), spec.channels, signature.image_size
    )
    spec, notes = pixel_range.settled(spec, scaling, assumed)
    return dataclasses.replace(original, preprocess=spec, notes=(*original.notes, *notes))


# --- Find the image sizes that a module accepts, by running it on meta tensors ----------------------------------------
# Every library has its own names for the patches, windows and strides that sizes must be multiples of.


# Units of the sizes of published models: patches and strides, with windows of 2 to 8 of them.
UNITS = (8, 12, 14, 16, 24, 28, 32, 48, 56, 64, 96, 112, 128, 224, 256)
# Maximum number of sizes to try.
TRIALS = 24


class _FewTokens(Exception):
    """A top-k exceeds the number of tokens. Arguments: the available and the requested number."""


class _QueriesTaken(TorchFunctionMode):
    """Mode in which a `torch.topk` of more elements than available raises `_FewTokens`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = {**dict(zip(("input", "k", "dim"), args, strict=False)), **(kwargs or {})}
        if func in (torch.topk, torch.Tensor.topk) and isinstance(options.get("k"), int):
            tokens = options["input"].shape[options.get("dim", -1)]
            if 0 < tokens < options["k"]:
                raise _FewTokens(tokens, options["k"])
        return func(*args, **(kwargs or {}))


Size = tuple[int, int]  # (height, width)


def _multiples(size: tuple[float, float], stride: int = 1) -> set[Size]:
    """Return sizes whose sides are multiples of one unit, next to `size`."""
    units = [(unit, up) for unit in UNITS if unit % stride == 0 for up in (0, 1)]
    sizes = {(int(size[0] // unit + up) * unit, int(size[1] // unit + up) * unit) for unit, up in units}
    return {candidate for candidate in sizes if min(candidate) > 0}


def smallest_size(module: Adapted, size: Size, channels: int, share: float) -> Size | None:
    """Return the smallest accepted size of about the same aspect ratio; it needs `share` times the tokens that it has
    at `size`."""
    sizes = _multiples((size[0] * share**0.5, size[1] * share**0.5))
    larger = sorted(
        (candidate for candidate in sizes if max(candidate) > max(size)),
        key=lambda candidate: (candidate[0] * candidate[1], candidate),
    )
    return next((candidate for candidate in larger if runs(module, candidate, channels)), None)


def nearest_sizes(module: Adapted, size: Size, channels: int) -> list[Size]:
    """Return the closest accepted sizes below and above `size`, if any, smallest first."""
    nearest: dict[bool, Size] = {}
    first = next((part for part in module.modules() if isinstance(part, nn.Conv2d)), None)
    stride = max(first.stride) if first is not None else 1  # pixels beyond a multiple of the patch would be cut off

    def distance(candidate: Size) -> tuple[int, Size]:
        return sum(abs(a - b) for a, b in zip(candidate, size, strict=True)), candidate

    for candidate in sorted(_multiples(size, int(stride)) - {size}, key=distance)[:TRIALS]:
        smaller = candidate < size
        if smaller not in nearest and runs(module, candidate, channels):
            nearest[smaller] = candidate
        if len(nearest) == 2:
            break
    return sorted(nearest.values())


def runs(module: Adapted, size: Size, channels: int) -> bool:
    """Whether the module runs on images of this size, tested without computing values."""
    logger = logging.getLogger(fake_tensor.__name__)
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # it logs every operator that rejects a shape
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            module.returned(torch.empty(2, channels, *size), *bound.example_inputs(module.inputs, 2))
    except Exception:
        return False
    finally:
        logger.setLevel(level)
    return True
