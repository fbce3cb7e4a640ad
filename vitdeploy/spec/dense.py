"""What the outputs of the tasks with an answer for every pixel mean, and those of no task at all.

`spec.tasks` joins them into `Postprocess`. No two of these classes have the same fields, so
that JSON values say of which class they are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vitdeploy.spec.tensors import TensorSpec

# Segmentation: "logits" of every pixel, or masks of queries and the classes of these.
SegmentationMaps = Literal["logits", "queries"]
DepthValues = Literal["inverse", "metric"]
DepthResize = Literal["bilinear", "bicubic"]


# What is said where a graph or a module does not say it.
INVERSE_ASSUMED = "the depth is taken for relative inverse depth (postprocess: {values: metric} says otherwise)"
MASKS_ASSUMED = (
    "masks are not enlarged before their sigmoid, as Mask2Former's are to 384x384 (postprocess: {mask_size: ...})"
)


@dataclass(frozen=True)
class TensorsSpec:
    """Outputs of no task. `exact` are those that are no floats (indices, counts, masks of booleans): they are equal or
    not, and have no distance."""

    exact: tuple[str, ...] = ()

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Of these outputs those that can be compared number by number."""
        return [name for name in outputs if name not in self.exact]

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """None: nobody says what the numbers mean."""
        return None


@dataclass(frozen=True)
class SegmentationSpec:
    """From the outputs of a semantic segmentation model to the class of every pixel.

    `maps` "logits": "logits" [classes, height, width]. "queries": "class_logits" [queries, classes + 1], whose last
    column is "no object", and "masks" [queries, height, width], logits; the score of a class at a pixel is the sum over
    the queries of softmax times sigmoid (arXiv 2107.06278, section 3.4). `mask_size`: (height, width) to which the
    masks are enlarged before their sigmoid; None leaves them as they are.

    Of labelled maps: the value `ignore` has no class; with `reduce_labels` 0 has none either, and 1 is class 0.
    """

    maps: SegmentationMaps = "logits"
    mask_size: tuple[int, int] | None = None
    ignore: int = 255
    reduce_labels: bool = False

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """All of these outputs: they can be compared number by number."""
        return list(outputs)

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """How many classes there are, without "no object"; None if the outputs do not say."""
        shapes = {tensor.name: tensor.shape for tensor in outputs}
        if self.maps == "queries":
            size = shapes["class_logits"][-1] if "class_logits" in shapes else None
            return size - 1 if isinstance(size, int) else None
        size = shapes["logits"][-3] if len(shapes.get("logits", ())) >= 3 else None
        return size if isinstance(size, int) else None


@dataclass(frozen=True)
class DepthSpec:
    """From "depth" [height, width] of a model to a value for every pixel of the image.

    `values` "inverse": disparity, larger is nearer, known up to a scale and a shift (arXiv 1907.01341); "metric":
    metres. `resize`: how the library's own post-processing enlarges it, without antialiasing. `max_depth`: the largest
    depth that the model can say, in metres; None where it says none.
    """

    values: DepthValues = "inverse"
    resize: DepthResize = "bicubic"
    max_depth: float | None = None

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """All of these outputs: they can be compared number by number."""
        return list(outputs)

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """None: there are no classes."""
        return None
