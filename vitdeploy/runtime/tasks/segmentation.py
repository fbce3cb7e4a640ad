"""From the outputs of a semantic segmentation model for one image to the class of every pixel."""

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

# Segmentation: "logits" of every pixel, or masks of queries and the classes of these.
SegmentationMaps = Literal["logits", "queries"]
MASKS_ASSUMED = (
    "masks are not enlarged before their sigmoid, as Mask2Former's are to 384x384 (postprocess: {mask_size: ...})"
)


@dataclass(frozen=True)
class SegmentationSpec(OutputSpec):
    """From the outputs of a semantic segmentation model to the class of every pixel.

    `maps` "logits": "logits" [classes, height, width]. "queries": "class_logits" [queries, classes + 1], whose last
    column is "no object", and "masks" [queries, height, width], logits; the score of a class at a pixel is the sum over
    the queries of softmax times sigmoid (arXiv 2107.06278, section 3.4). `mask_size`: (height, width) to which the
    masks are enlarged before their sigmoid; None leaves them as they are.

    Of labelled maps: the value `ignore` has no class; with `reduce_labels` 0 has none either, and 1 is class 0.
    """

    maps: SegmentationMaps = "logits"
    mask_size: tuple[int, int] | None = field(default=None, metadata=within(ge=1))
    ignore: int = field(default=255, metadata=within(ge=0, le=65535))
    reduce_labels: bool = False
    in_recipes: ClassVar[tuple[str, ...] | None] = ()

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """How many classes there are, without "no object"; None if the outputs do not say."""
        shapes = {tensor.name: tensor.shape for tensor in outputs}
        if self.maps == "queries":
            size = shapes["class_logits"][-1] if "class_logits" in shapes else None
            return size - 1 if isinstance(size, int) else None
        size = shapes["logits"][-3] if len(shapes.get("logits", ())) >= 3 else None
        return size if isinstance(size, int) else None


Array = npt.NDArray[Any]

# A pixel that the model's input does not show has no class.
NONE = -1
# Two maps agree if so large a share of their pixels has one class.
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
    """The answer for one image. map: int32 [height, width] of classes, NONE where the model's input does not reach;
    `classes` are those that occur, the largest area first."""

    map: npt.NDArray[np.int32]
    classes: tuple[ClassArea, ...]

    def png(self) -> bytes:
        """The map as a grey PNG of class indices, of 8 bits, or 16 where there are more classes than 255; the largest
        value of these is a pixel without a class."""
        from PIL import Image

        wide = bool((self.map >= 255).any())
        pixels = np.where(self.map == NONE, 65535 if wide else 255, self.map).astype(np.uint16 if wide else np.uint8)
        return png_bytes(Image.fromarray(pixels))

    def to_dict(self) -> dict[str, Any]:
        """The classes, and the map as a PNG (see `png`) in Base64."""
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
    """int32 [height, width], the class with the highest score at every pixel of the original image.

    The same function as `post_process_semantic_segmentation` of transformers' processors, where the model's input
    shows the whole image.

    Args:
        outputs: by name, without the batch axis, as `SegmentationSpec` says.
        size: (width, height) of the original image, upright.
    """
    found = np.full((size[1], size[0]), NONE, np.int32)
    for rows, columns, band in upsample.bands(_scores(outputs, postprocess), size, preprocess):
        found[rows, columns] = band.argmax(axis=0)
    return found


def _scores(outputs: Mapping[str, Array], postprocess: SegmentationSpec) -> Array:
    """[classes, height, width] at the size of the model's maps."""
    if postprocess.maps == "logits":
        return outputs["logits"]
    masks = outputs["masks"]
    if postprocess.mask_size is not None:
        masks = upsample.enlarged(masks, postprocess.mask_size)
    weights = softmax(outputs["class_logits"])[:, :-1].astype(masks.dtype)
    return np.asarray(np.tensordot(weights.T, sigmoid(masks), axes=1))


def areas(found: npt.NDArray[np.int32], labels: Sequence[str] | None) -> tuple[ClassArea, ...]:
    """The classes of a map, the largest area first."""
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
