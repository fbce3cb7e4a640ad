"""Detectors that are modules of transformers, of checkpoints that their original repositories saved: what does not
depend on the family. What transformers saved comes as a folder instead (`hf:`), with its config.json."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from torch import Tensor, nn

from vitdeploy.errors import CapabilityError, CheckpointError
from vitdeploy.models.checkpoints.mismatch import listed, patterns
from vitdeploy.models.family import Signature, refuse_few_tokens
from vitdeploy.models.source import cannot_import, last_line, library
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.spec import TensorSpec

Kind: TypeAlias = Literal["rt_detr", "rt_detr_v2", "d_fine", "rf_detr"]
# The classes of transformers, and a module that they have under the names of today, and not under earlier ones.
LIBRARY: dict[Kind, tuple[str, str]] = {
    "rt_detr": ("RTDetr", "model.encoder.aifi"),
    "rt_detr_v2": ("RTDetrV2", "model.encoder.aifi"),
    "d_fine": ("DFine", "model.encoder.aifi"),
    "rf_detr": ("RfDetr", "model.backbone.projector.projector_layer"),
}
_NEEDED = "5.23"  # whose names of tensors the tables of keys have


# A frozen dataclass with `kind`, `queries`, `num_classes`, `image_size`, `multiple` (of which both sides of an image
# are multiples), `tokens` (how many an image (height, width) has, of which the queries are taken) and `settings`
# (what a config.json of transformers says of it).
DetectorConfig: TypeAlias = Any


class LibraryDetector(nn.Module):
    """Takes float32 [batch, 3, height, width]; returns class logits [batch, queries, classes], for a sigmoid, and boxes
    [batch, queries, 4] as cxcywh in shares of the image.

    Raises:
        MissingPackageError: transformers is not installed.
        CapabilityError: it cannot be imported, is too old, or builds no such model.
    """

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _detector(*LIBRARY[config.kind], config.settings())
        if config.kind != "rf_detr" and hasattr(self.model, "class_embed"):
            # The decoder's own: one module stays one where tensors are replaced.
            self.model.class_embed = self.model.model.decoder.class_embed
            self.model.bbox_embed = self.model.model.decoder.bbox_embed

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.model(image)
        return outputs.logits, outputs.pred_boxes


def _detector(name: str, part: str, settings: Mapping[str, Any]) -> Any:
    """transformers' `<name>ForObjectDetection`, with first weights; it has a module `part`."""
    why = f"{name}, whose module is transformers' own,"
    transformers = library("transformers", why)
    try:  # its classes are imported when they are looked up
        config = getattr(transformers, f"{name}Config", None)
        detector = getattr(transformers, f"{name}ForObjectDetection", None)
    except Exception as error:
        raise cannot_import("transformers", why, error) from None
    try:
        model = None if config is None or detector is None else detector(config(**settings))
    except (ValueError, TypeError) as error:
        raise CapabilityError(
            f"transformers {transformers.__version__} cannot build this {name}",
            found=last_line(error),
            fix="export it where it was trained, and bring the ONNX file",
        ) from None
    if model is None or part not in dict(model.named_modules()):
        raise CapabilityError(
            f"transformers here is too old for checkpoints of {name}'s original repository",
            found=f"transformers {transformers.__version__}",
            expected=f"a version that names the layers of {name} as {_NEEDED} does",
            fix="pip install --upgrade transformers",
        )
    return model


def describe(config: DetectorConfig) -> Signature:
    """Outputs, and how they are read: all queries by the best classes of a sigmoid, as the repositories do."""
    outputs = (
        TensorSpec("logits", "float32", ("batch", config.queries, config.num_classes)),
        TensorSpec("boxes", "float32", ("batch", config.queries, 4)),
    )
    return Signature("detection", config.image_size, 3, outputs, PostprocessSpec(scores="sigmoid"))


def resize(
    names: tuple[str, str], config: DetectorConfig, state: Mapping[str, Tensor], image_size: tuple[int, int]
) -> tuple[DetectorConfig, dict[str, Tensor]]:
    """The same weights at another image size; `names` of the models, as many and as one.

    Raises:
        CheckpointError: what both sides are multiples of does not divide them, or there are fewer tokens than queries.
    """
    unit = config.multiple
    if refused := _indivisible(image_size, unit):
        near = "x".join(str(max(1, round(side / unit)) * unit) for side in image_size)
        raise CheckpointError(
            f"{names[0]} this image size",
            found=refused,
            expected=f"a height and a width that are multiples of {unit}",
            fix=f"--image-size {near}",
        )
    refuse_few_tokens(names[1], image_size, config.queries, config.tokens, unit)
    return replace(config, image_size=image_size), dict(state)


def _indivisible(size: tuple[int, int], unit: int) -> str:
    """A size that is no multiple of the unit, in words; "" for one that is."""
    whole = all(side > 0 and side % unit == 0 for side in size)
    return "" if whole else f"an image of {size[0]}x{size[1]}, of which {unit} does not divide both sides"


def checked(what: str, make: Callable[[], DetectorConfig], published: str) -> DetectorConfig:
    """The config that a state dict makes; raises CheckpointError where it makes none."""
    try:
        config = make()
        if refused := _indivisible(config.image_size, config.multiple):
            raise ValueError(refused)
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"the state dict is that of an {what} which vitdeploy cannot build",
            found=f"no tensor {error}" if isinstance(error, KeyError) else str(error),
            expected=f"every tensor of a published variant{published}, with any number of classes",
            fix="save the whole state dict",
        ) from None
    return config


def told_unknown(keys: Sequence[str], state: Mapping[str, Tensor]) -> str:
    return f"{len(keys)} unknown: {listed(patterns(keys, state))}"
