"""The description of an architecture family: one row of the catalog.

A family is plain data and functions. `catalog.FAMILIES` lists the rows; no family registers itself.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from vitdeploy.errors import CheckpointError
from vitdeploy.spec import Postprocess, PreprocessSpec, SequenceSpec, Task, TensorSpec


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a model.

    `image_size` is (height, width) in pixels. The module's forward takes float32 [batch, channels, height, width],
    normalised, and returns the tensors of `outputs` in that order (a single output as a bare tensor), by task:

        classification   "logits" [batch, classes]
        features         "features" [batch, width] (pooled) and, where there are any, "patch_features" [batch, n, width]
        detection        "logits" [batch, queries, classes] and "boxes" [batch, queries, 4], read as `postprocess` says
        panoptic         detection's, and "masks" [batch, queries, height, width], logits
        segmentation     "logits" [batch, classes, height, width]; or "class_logits" [batch, queries, classes + 1] and
                         "masks" [batch, queries, height, width], logits
        depth            "depth" [batch, height, width]
        foreground       "foreground" [batch, 1, height, width], or without the axis of 1
        anomaly          "distances" [batch, rows, columns] and "neighbours" [batch, k]; read as `postprocess` says
        zero-shot        "image_features" [batch, width], and "text_features" [texts, width] of the module's second
                         argument, int64 [texts, length]; read as `postprocess` says
        open-vocabulary-detection
                         "class_features" [batch, boxes, width], "shift" and "scale" [batch, boxes], "boxes" [batch,
                         boxes, 4], and "text_features" [texts, width] of the module's second argument, int64 [texts,
                         length]; read as `postprocess` says
        promptable-segmentation
                         "masks" [batch, 4, height, width], logits, and "iou_scores" [batch, 4] of the module's further
                         arguments, points float32 [batch, slots, 2] and their kinds int64 [batch, slots]; read as
                         `postprocess` says
        tensors          any outputs [batch, ...], by the module's own names

    `inputs` are the module's further inputs after the image, in order, each [batch, ...]; only user modules have any.

    A sequence model takes tokens instead (`architectures.transformer`): no channels, and an image size of 0. `notes`
    say how the outputs were interpreted, one per line.
    """

    task: Task
    image_size: tuple[int, int]
    channels: int
    outputs: tuple[TensorSpec, ...]
    postprocess: Postprocess | None = None
    sequence: SequenceSpec | None = None
    notes: tuple[str, ...] = ()
    inputs: tuple[TensorSpec, ...] = ()


@dataclass(frozen=True)
class Hints:
    """Facts that a bare state dict lacks, from the user's flags or from the config file next to the checkpoint.

    `config` is that file's content: timm's or transformers' `config.json`.
    """

    heads: int | None = None
    image_size: tuple[int, int] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recognised:
    """A state dict that a family understands.

    `config` is the family's frozen config dataclass, `state` has the module's own key names and loads strictly.
    `style` is the naming scheme of the keys: "timm", "transformers", "torchvision", "jax", "original" or "vitdeploy".
    `notes` for the user say what was inferred, converted or dropped, one per line.
    """

    family: str
    style: str
    config: Any
    state: dict[str, Tensor]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadedModel:
    """A PyTorch module in evaluation mode and float32, with its signature, preprocessing, labels and notes.

    `family` is a row of the catalog, or "timm", "transformers", "function", "module" (in memory) for an external
    module. `preprocess` is None if it takes no images. `labels` are the checkpoint's own class names, if it has any.
    `notes` say what was inferred, converted or dropped, one per line.
    """

    name: str
    family: str
    module: nn.Module
    signature: Signature
    preprocess: PreprocessSpec | None
    labels: tuple[str, ...] = ()
    notes: tuple[str, ...] = field(default=())

    @property
    def parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    @property
    def classes(self) -> int | None:
        """The number of classes of a classifier; None for any other task."""
        size = self.signature.outputs[0].shape[-1]
        return size if self.signature.task == "classification" and isinstance(size, int) else None


def refuse_channels(channels: int, *, grey: bool = True) -> None:
    """Raise CheckpointError if no image has this number of channels."""
    if channels not in ((1, 3) if grey else (3,)):
        raise CheckpointError(
            "the model does not take images",
            found=f"{channels} input channels",
            expected="1 channel (grey) or 3 (RGB)" if grey else "3 channels (RGB)",
        )


def few_tokens(
    what: str, size: tuple[int, int], tokens: int, queries: int, smallest: tuple[int, int] | None
) -> CheckpointError:
    """Return the error for an image `size` (height, width) that gives fewer tokens than the model selects queries."""
    larger = f"--image-size {smallest[0]}x{smallest[1]}" if smallest else "a larger --image-size"
    return CheckpointError(
        f"{what} has fewer tokens than queries at {size[0]}x{size[1]}",
        found=f"{tokens} tokens for {queries} queries",
        expected=f"an image size with at least {queries} tokens",
        fix=f"{larger} (in a recipe: source.image_size, or the crop)",
    )


def refuse_few_tokens(
    what: str, size: tuple[int, int], queries: int, tokens: Callable[[tuple[int, int]], int], unit: int
) -> None:
    """Raise CheckpointError if there are too few tokens; it names the next sufficient size in steps of `unit`."""
    larger = size
    while tokens(larger) < queries:
        larger = larger[0] + unit, larger[1] + unit
    if larger != size:
        raise few_tokens(what, size, tokens(size), queries, larger)


@dataclass(frozen=True)
class Family:
    """One architecture family. Each family defines its own frozen config dataclass.

    names: built-in names and their configs, in the order in which they are listed.
    parse: the config of a name that follows the family's pattern, None for other names; raises UnknownModelError if
        the name follows it but its sizes contradict each other.
    build: the module of a config, with seeded-random initial weights as the paper's code draws them.
    recognise: by keys and shapes alone, None if the state dict is not from this family; raises CheckpointError if it
        is but leaves something open (the message names the missing hint).
    resize: config and state for another image size, exactly as timm, transformers or torchvision resize (position
        embeddings, relative position bias tables); raises CheckpointError that names valid sizes.
    preprocess: the default preprocessing if the checkpoint specifies none; None if the models take no images.

    For a checkpoint loaded under one of the family's names:

    hints: takes a name and its config; returns facts that tensors cannot show.
    free: config fields that always come from the checkpoint, keyed by display name; a config may lack them. The image
        size is free, too.
    architecture: attributes in which a checkpoint's config must equal the name's, keyed by display name; by
        default all fields but the free ones and `image_size`.
    sized: entries of `architecture` that change with the image size.
    settle: takes the checkpoint's config and the name's; returns the config to build, and a description of what came
        from the name.

    For a config.json next to the weights, which must belong to the same model:

    model_types: transformers' "model_type" of the models that `recognise` reads.
    transformers_keys: takes that file (its image part) and a config; returns the model's values by key.
    timm_arguments: arguments of timm's class and the config fields that they correspond to.
    tells_size: whether a tensor determines the image size of a config, as a position table does.

    repeated: the field that counts equal blocks; two blocks give the number of parameters of all.
    parameters: the count for each name, for modules of another library: listing the names then needs no modules.
    """

    name: str
    paper: str
    names: Mapping[str, Any]
    parse: Callable[[str], Any | None]
    build: Callable[[Any], nn.Module]
    describe: Callable[[Any], Signature]
    recognise: Callable[[Mapping[str, Tensor], Hints], Recognised | None]
    resize: Callable[[Any, Mapping[str, Tensor], tuple[int, int]], tuple[Any, dict[str, Tensor]]]
    preprocess: Callable[[Any], PreprocessSpec | None]
    hints: Callable[[str, Any], Hints] = lambda name, config: Hints()
    free: Mapping[str, str] = field(default_factory=lambda: {"num_classes": "classes", "in_channels": "channels"})
    architecture: Mapping[str, str] = field(default_factory=dict)
    sized: frozenset[str] = frozenset()
    settle: Callable[[Any, Any], tuple[Any, list[str]]] = lambda own, named: (own, [])
    model_types: frozenset[str] = frozenset()
    transformers_keys: Callable[[Mapping[str, Any], Any], Mapping[str, Any]] = lambda values, config: {}
    timm_arguments: Mapping[str, str] = field(default_factory=dict)
    tells_size: Callable[[Any], bool] = lambda config: False
    repeated: str | None = None
    parameters: Mapping[str, int] = field(default_factory=dict)

    def image_size(self, config: Any) -> tuple[int, int] | None:
        """(height, width) in pixels; None if the model takes no images."""
        size = self.describe(config).image_size
        return size if all(size) else None

    def empty(self, config: Any) -> nn.Module:
        """Return the module of a config on the CPU, with weights still to be loaded: initialisation is skipped where
        loading replaces every value."""
        try:
            with torch.device("meta"):
                module = self.build(config)
        except (NotImplementedError, RuntimeError):  # its constructor reads tensor values
            return self.build(config)
        stored = module.state_dict()
        computed = any(name not in stored for name, _ in module.named_buffers()) or any(
            isinstance(value, Tensor) and value.is_meta for part in module.modules() for value in vars(part).values()
        )
        return self.build(config) if computed else module.to_empty(device="cpu")

    def num_classes(self, config: Any) -> int | None:
        """0 for a feature extractor; None if its configs have no classes."""
        return getattr(config, "num_classes", None)

    def differences(self, own: Any, expected: Any) -> list[str]:
        """Describe how a config's architecture differs from the expected one; [] if it does not."""
        fields = [f.name for f in dataclasses.fields(expected) if f.name not in (*self.free, "image_size")]
        changes = []
        for word, attribute in (self.architecture or {name.replace("_", " "): name for name in fields}).items():
            found, required = attrgetter(attribute)(own), attrgetter(attribute)(expected)
            if found != required and not (word in self.sized and self.image_size(own) != self.image_size(expected)):
                changes.append(f"{word} {found} instead of {required}")
        return changes
