"""Semantic segmentation: the class of every pixel, from a model's outputs."""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime import drawing, upsample
from vitdeploy.runtime.masks import png_bytes
from vitdeploy.runtime.postprocess import label_of, shortened, sigmoid, softmax
from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.task import DeviceTask, Files, OutputReading, Outputs
from vitdeploy.spec import OutputSpec, PreprocessSpec, TensorSpec, within

if TYPE_CHECKING:
    from PIL import Image

# The outputs: "logits" of every pixel, or the masks and classes of queries.
SegmentationMaps = Literal["logits", "queries"]
MASKS_ASSUMED = (
    "masks are not enlarged before the sigmoid (Mask2Former enlarges to 384x384; set postprocess: {mask_size: ...})"
)


@dataclass(frozen=True)
class SegmentationSpec(OutputSpec):
    """How the outputs of a semantic segmentation model become the class of every pixel.

    `maps` "logits": "logits" [classes, height, width]. "queries": "class_logits" [queries, classes + 1], whose last
    column is "no object", and "masks" [queries, height, width], logits; the score of a class at a pixel is the sum over
    the queries of softmax times sigmoid (arXiv 2107.06278, section 3.4). `mask_size`: (height, width) to which the
    masks are enlarged before their sigmoid; None does not enlarge.

    In label maps, the value `ignore` has no class; with `reduce_labels` 0 has no class either, and 1 is class 0.
    """

    maps: SegmentationMaps = "logits"
    mask_size: tuple[int, int] | None = field(default=None, metadata=within(ge=1))
    ignore: int = field(default=255, metadata=within(ge=0, le=65535))
    reduce_labels: bool = False
    in_recipes: ClassVar[tuple[str, ...] | None] = ()

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """Return the number of classes, without "no object"; None if the outputs do not tell."""
        shapes = {tensor.name: tensor.shape for tensor in outputs}
        if self.maps == "queries":
            size = shapes["class_logits"][-1] if "class_logits" in shapes else None
            return size - 1 if isinstance(size, int) else None
        size = shapes["logits"][-3] if len(shapes.get("logits", ())) >= 3 else None
        return size if isinstance(size, int) else None


Array = npt.NDArray[Any]

# The class of pixels outside the model's input.
NONE = -1
# Two maps agree if at least this share of their pixels has the same class.
SAME_SHARE = 0.5


@dataclass(frozen=True)
class ClassArea:
    """One class of an image: its label, and its area in pixels and as a share of the image, 0..1."""

    index: int
    label: str
    area: int
    share: float

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True, eq=False, repr=False)
class Segmentation:
    """The answer for one image. map: int32 [height, width] of classes, NONE outside the model's input; `classes`: the
    classes in the map, largest area first."""

    map: npt.NDArray[np.int32]
    classes: tuple[ClassArea, ...]

    def png(self) -> bytes:
        """Return the map as a grey PNG of class indices, 8 bits, or 16 for indices from 255 on; the maximum value marks
        a pixel without a class."""
        from PIL import Image

        wide = bool((self.map >= 255).any())
        pixels = np.where(self.map == NONE, 65535 if wide else 255, self.map).astype(np.uint16 if wide else np.uint8)
        return png_bytes(Image.fromarray(pixels))

    def to_dict(self) -> dict[str, Any]:
        """Return the classes, and the map as a PNG (see `png`) in Base64."""
        height, width = self.map.shape
        return {
            "width": width,
            "height": height,
            "classes": [each.to_dict() for each in self.classes],
            "map_png": base64.b64encode(self.png()).decode("ascii"),
        }

    def __str__(self) -> str:
        """One class per line."""
        return "\n".join(f"{each.label} {100 * each.share:.1f} % of the image" for each in self.classes) or "nothing"

    def __repr__(self) -> str:
        height, width = self.map.shape
        return f"<Segmentation: {len(self.classes)} classes in {width}x{height}: {shortened(str(self))}>"


def classes_of(
    outputs: Mapping[str, Array], size: tuple[int, int], preprocess: PreprocessSpec, postprocess: SegmentationSpec
) -> npt.NDArray[np.int32]:
    """Return the class with the highest score at every pixel of the original image, int32 [height, width].

    If the model's input shows the whole image, this equals `post_process_semantic_segmentation` of transformers'
    processors.

    Args:
        outputs: by name, without the batch axis, as in `SegmentationSpec`.
        size: (width, height) of the original image, upright.
    """
    found = np.full((size[1], size[0]), NONE, np.int32)
    for rows, columns, band in upsample.bands(_scores(outputs, postprocess), size, preprocess):
        found[rows, columns] = band.argmax(axis=0)
    return found


def _scores(outputs: Mapping[str, Array], postprocess: SegmentationSpec) -> Array:
    """Class scores [classes, height, width] at the size of the model's maps."""
    if postprocess.maps == "logits":
        return outputs["logits"]
    masks = outputs["masks"]
    if postprocess.mask_size is not None:
        masks = upsample.enlarged(masks, postprocess.mask_size)
    weights = softmax(outputs["class_logits"])[:, :-1].astype(masks.dtype)
    return np.asarray(np.tensordot(weights.T, sigmoid(masks), axes=1))


def areas(found: npt.NDArray[np.int32], labels: Sequence[str] | None) -> tuple[ClassArea, ...]:
    """Return the classes of a map, largest area first."""
    counts = np.bincount(found[found != NONE].ravel())
    order = sorted(np.flatnonzero(counts).tolist(), key=lambda index: -int(counts[index]))
    return tuple(
        ClassArea(index, label_of(index, labels), int(counts[index]), float(counts[index] / found.size))
        for index in order
    )


def _answer(outputs: Outputs, reading: OutputReading) -> Segmentation:
    found = classes_of(outputs, reading.size, reading.images, reading.head(SegmentationSpec))
    return Segmentation(found, areas(found, reading.labels))


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    a, b = (_answer(side, reading).map for side in (ours, theirs))
    return bool((a == b).mean() >= SAME_SHARE)


def _draw(image: Image.Image, result: Segmentation) -> Files:
    """The classes over the image with a legend, and the map itself."""
    drawn = drawing.over(image, drawing.class_picture(result.map), result.map != NONE)
    palette = drawing.colours(max((each.index for each in result.classes), default=0) + 1)
    drawing.legend(drawn, [(each.label, tuple(palette[each.index].tolist())) for each in result.classes[:12]])
    return {".png": png_bytes(drawn), ".classes.png": result.png()}


def _form(outputs: Collection[str], spec: SegmentationSpec) -> forms.ClassMapForm:
    return forms.ClassMapForm(spec.maps, spec.mask_size)


SEGMENTATION = DeviceTask(_answer, _same, draw=_draw, postprocess=SegmentationSpec, form=_form)
