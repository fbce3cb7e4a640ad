"""Shared code of detectors that are transformers modules with checkpoints from their original repositories. Checkpoints
saved by transformers come as a folder (`hf:`) with config.json instead."""

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
# The transformers classes, and a module name that only supported versions have.
LIBRARY: dict[Kind, tuple[str, str]] = {
    "rt_detr": ("RTDetr", "model.encoder.aifi"),
    "rt_detr_v2": ("RTDetrV2", "model.encoder.aifi"),
    "d_fine": ("DFine", "model.encoder.aifi"),
    "rf_detr": ("RfDetr", "model.backbone.projector.projector_layer"),
}
_NEEDED = "5.23"  # the version whose tensor names the key tables use


# A frozen dataclass with `kind`, `queries`, `num_classes`, `image_size`, `multiple` (both image sides must be multiples
# of it), `tokens` (the number of tokens of an image (height, width), from which queries are selected) and `settings`
# (the values of a transformers config.json).
DetectorConfig: TypeAlias = Any


class LibraryDetector(nn.Module):
    """float32 [batch, 3, height, width] -> class logits [batch, queries, classes], for a sigmoid, and boxes [batch,
    queries, 4] as cxcywh relative to the image.

    Raises:
        MissingPackageError: transformers is not installed.
        CapabilityError: it cannot be imported, is too old, or cannot build the model.
    """

    def __init__(self, config: DetectorConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _detector(*LIBRARY[config.kind], config.settings())
        if config.kind != "rf_detr" and hasattr(self.model, "class_embed"):
            # Share the decoder's module, so that it stays one module when tensors are replaced.
            self.model.class_embed = self.model.model.decoder.class_embed
            self.model.bbox_embed = self.model.model.decoder.bbox_embed

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        outputs = self.model(image)
        return outputs.logits, outputs.pred_boxes


def _detector(name: str, part: str, settings: Mapping[str, Any]) -> Any:
    """Build transformers' `<name>ForObjectDetection` with initial weights; it has a module `part`."""
    why = f"{name}, a transformers module,"
    transformers = library("transformers", why)
    try:  # classes are imported on access
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
            fix="export it to ONNX where it was trained, and use the ONNX file",
        ) from None
    if model is None or part not in dict(model.named_modules()):
        raise CapabilityError(
            f"the installed transformers is too old for checkpoints from {name}'s original repository",
            found=f"transformers {transformers.__version__}",
            expected=f"a version with the layer names of {_NEEDED}",
            fix="pip install --upgrade transformers",
        )
    return model


def describe(config: DetectorConfig) -> Signature:
    """Return the outputs and their decoding: the best classes over all queries by sigmoid, as in the repositories."""
    outputs = (
        TensorSpec("logits", "float32", ("batch", config.queries, config.num_classes)),
        TensorSpec("boxes", "float32", ("batch", config.queries, 4)),
    )
    return Signature("detection", config.image_size, 3, outputs, PostprocessSpec(scores="sigmoid"))


def resize(
    names: tuple[str, str], config: DetectorConfig, state: Mapping[str, Tensor], image_size: tuple[int, int]
) -> tuple[DetectorConfig, dict[str, Tensor]]:
    """Return config and state for another image size. `names`: the start of the error message, and the model's name.

    Raises:
        CheckpointError: a side is not a multiple of `multiple`, or there are fewer tokens than queries.
    """
    unit = config.multiple
    if refused := _indivisible(image_size, unit):
        near = "x".join(str(max(1, round(side / unit)) * unit) for side in image_size)
        raise CheckpointError(
            f"{names[0]} this image size",
            found=refused,
            expected=f"height and width that are multiples of {unit}",
            fix=f"--image-size {near}",
        )
    refuse_few_tokens(names[1], image_size, config.queries, config.tokens, unit)
    return replace(config, image_size=image_size), dict(state)


def _indivisible(size: tuple[int, int], unit: int) -> str:
    """Describe a size that is not a multiple of the unit; "" if it is."""
    whole = all(side > 0 and side % unit == 0 for side in size)
    return "" if whole else f"image size {size[0]}x{size[1]}, not a multiple of {unit} on both sides"


def checked(what: str, make: Callable[[], DetectorConfig], published: str) -> DetectorConfig:
    """Return the config of a state dict; raises CheckpointError if it is invalid."""
    try:
        config = make()
        if refused := _indivisible(config.image_size, config.multiple):
            raise ValueError(refused)
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"vitdeploy cannot build the {what} in the state dict",
            found=f"no tensor {error}" if isinstance(error, KeyError) else str(error),
            expected=f"every tensor of a published variant{published}, with any number of classes",
            fix="save the complete state dict",
        ) from None
    return config


def told_unknown(keys: Sequence[str], state: Mapping[str, Tensor]) -> str:
    return f"{len(keys)} unknown: {listed(patterns(keys, state))}"
