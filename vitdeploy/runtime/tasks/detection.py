"""Object detection: objects with boxes in pixels of the original image, from a model's outputs."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime import drawing, geometry, masks
from vitdeploy.runtime.postprocess import label_of, shortened, sigmoid, softmax
from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.task import DeviceTask, Files, OutputReading, Outputs
from vitdeploy.spec import SHARE, SPARSE, OutputSpec, PreprocessSpec, TensorSpec, last_axis, within

if TYPE_CHECKING:
    from PIL import Image

Scores = Literal["softmax", "sigmoid", "given"]
Boxes = Literal["cxcywh", "xyxy"]


@dataclass(frozen=True)
class PostprocessSpec(OutputSpec):
    """How the outputs of a detector become objects.

    `scores` "softmax": "logits" [queries, classes + 1], whose last column is "no object"; "sigmoid": "logits"
    [queries, classes], independent; "given": the graph has the outputs "scores" and "labels" [queries].
    `boxes`: the format of "boxes" [queries, 4], relative to the model's input: 0..1 in x and in y.
    `threshold`: the score above which an object is returned. `top_k`, for "sigmoid": the number of best pairs of query
    and class that are candidates; None for the number of queries. Panoptic: `things` are the classes with instances
    (all others are stuff), `mask_threshold` and `overlap` as in DETR's panoptic post-processing (arXiv 2005.12872,
    section 4.4).
    """

    scores: Scores = "softmax"
    boxes: Boxes = "cxcywh"
    threshold: float = field(default=0.5, metadata=SHARE)
    things: tuple[int, ...] = field(default=(), metadata=within(ge=0))
    mask_threshold: float = field(default=0.5, metadata=SHARE)
    overlap: float = field(default=0.8, metadata=SHARE)
    top_k: int | None = field(default=None, metadata={**SPARSE, **within(gt=0)})
    in_recipes: ClassVar[tuple[str, ...] | None] = ()

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Return the outputs that can be compared element by element. If the graph ranks its objects, two with nearly
        equal scores may swap places, with their labels and boxes: then only the scores."""
        return [name for name in outputs if self.scores != "given" or name == "scores"]

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """Return the number of classes in "logits", without "no object"; None if the outputs do not tell."""
        count = last_axis(outputs, "logits")
        return count - 1 if count is not None and self.scores == "softmax" else count


Array = npt.NDArray[Any]

# Two models agree on a sample if at least MATCHED_SHARE of the objects of both have a partner of the same class whose
# box has at least this IoU.
OVERLAP = 0.5
MATCHED_SHARE = 0.5


@dataclass(frozen=True)
class Detection:
    """One object: its class and label, its score in 0..1, and its box in pixels of the original image.

    `box` is (left, top, right, bottom) in continuous coordinates: pixel i covers i to i + 1.
    """

    index: int
    label: str
    score: float
    box: tuple[float, float, float, float]

    def to_dict(self) -> dict[str, Any]:
        return {"index": self.index, "label": self.label, "score": self.score, "box": list(self.box)}


@dataclass(frozen=True, repr=False)
class Detections:
    """The answer for one image of `size` (width, height): its objects, best first."""

    size: tuple[int, int]
    objects: tuple[Detection, ...]

    def to_dict(self) -> dict[str, Any]:
        width, height = self.size
        return {"width": width, "height": height, "objects": [found.to_dict() for found in self.objects]}

    def __str__(self) -> str:
        """One object per line."""
        lines = (
            f"{o.label} {100 * o.score:.1f} % at {' '.join(f'{side:.0f}' for side in o.box)}" for o in self.objects
        )
        return "\n".join(lines) or "nothing above the threshold"

    def __repr__(self) -> str:
        return f"<Detections: {len(self.objects)} in {self.size[0]}x{self.size[1]}: {shortened(str(self))}>"


def detect(
    outputs: Mapping[str, Array],
    size: tuple[int, int],
    preprocess: PreprocessSpec,
    postprocess: PostprocessSpec,
    labels: Sequence[str] | None,
) -> Detections:
    """Return the objects with a score above `postprocess.threshold`.

    Args:
        outputs: by name, without the batch axis, as in `PostprocessSpec`: "boxes" [queries, 4] and either "logits" or
            "scores" and "labels".
        size: (width, height) of the original image, upright. Boxes are clipped to it.
        labels: one name per class, or None.
    """
    scores, classes, queries = _scores(outputs, postprocess)
    kept = np.flatnonzero(scores > postprocess.threshold)
    kept = kept[np.argsort(-scores[kept], kind="stable")]
    boxes = to_pixels(outputs["boxes"][queries[kept]], size, preprocess, postprocess)
    found = zip(classes[kept].tolist(), scores[kept].tolist(), boxes.tolist(), strict=True)
    return Detections(
        size, tuple(Detection(index, label_of(index, labels), score, tuple(box)) for index, score, box in found)
    )


def _scores(outputs: Mapping[str, Array], postprocess: PostprocessSpec) -> tuple[Array, Array, Array]:
    """Score, class and query of every candidate.

    "softmax": one candidate per query, its best class (arXiv 2005.12872). "sigmoid": the best pairs of query and class,
    `top_k` or the number of queries (arXiv 2010.04159 and 2304.08069 in their released code).
    """
    if postprocess.scores == "given":
        scores = outputs["scores"].astype(np.float64)
        return scores, outputs["labels"].astype(np.int64), np.arange(len(scores))
    logits = outputs["logits"]
    if postprocess.scores == "softmax":
        probabilities = softmax(logits)[:, :-1]
        classes = probabilities.argmax(axis=1)
        return probabilities.max(axis=1), classes, np.arange(len(logits))
    queries, count = logits.shape
    probabilities = sigmoid(logits.astype(np.float64)).reshape(-1)
    best = np.argsort(-probabilities, kind="stable")[: postprocess.top_k or queries]
    return probabilities[best], best % count, best // count


def to_pixels(
    boxes: Array, size: tuple[int, int], preprocess: PreprocessSpec, postprocess: PostprocessSpec
) -> npt.NDArray[np.float64]:
    """Return boxes relative to the model's input as float64 [n, 4]: left, top, right, bottom in the original image."""
    corners = boxes.astype(np.float64).reshape(-1, 4)
    if postprocess.boxes == "cxcywh":
        centre, half = corners[:, :2], corners[:, 2:] / 2
        corners = np.concatenate([centre - half, centre + half], axis=1)
    window = geometry.input_window(size, preprocess)
    start = np.array([window.left, window.top] * 2)
    extent = np.array([window.right - window.left, window.bottom - window.top] * 2)
    width, height = size
    return np.asarray(np.clip(start + corners * extent, 0.0, np.array([width, height] * 2, np.float64)))


def _answer(outputs: Outputs, reading: OutputReading) -> Detections:
    return detect(outputs, reading.size, reading.images, reading.head(PostprocessSpec), reading.labels)


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    a, b = (_answer(side, reading).objects for side in (ours, theirs))
    shared = [[_iou(other.box, each.box) for other in b] for each in a]
    return mostly_paired([each.index for each in a], [each.index for each in b], shared)


def mostly_paired(ours: Sequence[int], theirs: Sequence[int], overlaps: Sequence[Sequence[float]]) -> bool:
    """Return whether most objects of both sides have a partner of the same class at the same place. `ours` and `theirs`
    are the classes, `overlaps` the IoU of each of ours with each of theirs."""
    left, pairs = list(range(len(theirs))), 0
    for index, row in zip(ours, overlaps, strict=True):
        partner = next((j for j in left if theirs[j] == index and row[j] >= OVERLAP), None)
        if partner is not None:
            left.remove(partner)
            pairs += 1
    return 2 * pairs >= MATCHED_SHARE * (len(ours) + len(theirs))


def _iou(a: tuple[float, ...], b: tuple[float, ...]) -> float:
    width, height = min(a[2], b[2]) - max(a[0], b[0]), min(a[3], b[3]) - max(a[1], b[1])
    common = max(0.0, width) * max(0.0, height)
    areas = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1])
    return common / max(areas - common, 1e-300)


def draw_boxes(image: Image.Image, result: Detections) -> Files:
    """Draw boxes with label and score, the highest score on top."""
    from PIL import ImageDraw

    drawn, palette = image.copy(), drawing.colours(max((each.index for each in result.objects), default=0) + 1)
    pen = ImageDraw.Draw(drawn)
    for each in reversed(result.objects):
        colour = tuple(palette[each.index].tolist())
        pen.rectangle(each.box, outline=colour, width=max(2, min(image.size) // 200))
        drawing.draw_label(pen, each.box[:2], f"{each.label} {100 * each.score:.0f} %", colour)
    return {".png": masks.png_bytes(drawn)}


def _form(outputs: Collection[str], spec: PostprocessSpec) -> forms.BoxesForm:
    return forms.BoxesForm(spec.scores, spec.boxes, spec.threshold, spec.top_k)


DETECTION = DeviceTask(_answer, _same, draw=draw_boxes, postprocess=PostprocessSpec, form=_form)
