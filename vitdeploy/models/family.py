"""What every architecture family says of itself: one row of the catalog.

A family is plain data and functions. `catalog.FAMILIES` lists the rows; no family registers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from vitdeploy.spec import PostprocessSpec, PreprocessSpec, SequenceSpec, Task, TensorSpec


@dataclass(frozen=True)
class Signature:
    """What a model takes and gives.

    `image_size` is (height, width) in pixels. The module's forward takes float32 [batch, channels, height, width],
    normalised, and returns the tensors of `outputs` in that order (one tensor alone where there is one), by task:

        classification   "logits" [batch, classes]
        features         "features" [batch, width] (pooled) and, where there are any, "patch_features" [batch, n, width]
        detection        "logits" [batch, queries, classes] and "boxes" [batch, queries, 4], read as `postprocess` says
        panoptic         detection's, and "masks" [batch, queries, height, width], logits

    A model of sequences takes tokens instead (`models.transformer`): no channels, and an image size of 0.
    """

    task: Task
    image_size: tuple[int, int]
    channels: int
    outputs: tuple[TensorSpec, ...]
    postprocess: PostprocessSpec | None = None
    sequence: SequenceSpec | None = None


@dataclass(frozen=True)
class Hints:
    """What a bare state dict cannot say: from the user's flags, or from the config file beside the checkpoint.

    `config` is that file's content: timm's or transformers' `config.json`.
    """

    heads: int | None = None
    image_size: tuple[int, int] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Recognised:
    """A state dict that a family understands.

    `config` is the family's frozen config dataclass, `state` has the module's own key names and loads strictly.
    `style` is who wrote the keys: "timm", "transformers", "torchvision", "jax", "original", or "vitdeploy". `notes`:
    what was inferred, converted or left out, one per line, for the user.
    """

    family: str
    style: str
    config: Any
    state: dict[str, Tensor]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """One architecture family.

    names: built-in names and their configs, in the order in which they are listed.
    parse: the config of a name that follows the family's pattern, None where it is not the family's; raises
        UnknownModelError where the name is the family's but its sizes contradict each other.
    build: the module of a config, with seeded-random initial weights as the paper's code draws them.
    recognise: by keys and shapes alone, None where the state dict is not the family's; raises CheckpointError where it
        is, but something needed cannot be known (says which hint would tell).
    resize: config and state for another image size, exactly as timm, transformers or torchvision resize (position
        embeddings, relative position bias tables); raises CheckpointError with the sizes that would do.
    preprocess: what such models were trained with where no checkpoint says otherwise; None where they take no images.
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
