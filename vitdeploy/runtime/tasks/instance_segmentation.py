"""Instance segmentation: objects with masks at the image's size, from a model's outputs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.drawing import colours, draw_label, over
from vitdeploy.runtime.masks import RunLengths, png_bytes
from vitdeploy.runtime.postprocess import label_of, shortened, sigmoid, softmax
from vitdeploy.runtime.tasks import detection, task
from vitdeploy.runtime.upsample import bands, enlarged, nearest
from vitdeploy.spec import SHARE, OutputSpec, PreprocessSpec, TensorSpec, last_axis, within

if TYPE_CHECKING:
    from PIL import Image

ClassScores = Literal["softmax", "sigmoid"]
Candidates = Literal["pairs", "queries"]
Enlarging = Literal["nearest", "bilinear"]
# Note for a graph or module that does not tell which variant it is.
PAIRS_ASSUMED = (
    "the outputs are read as Mask2Former's (for EoMT, set postprocess: {candidates: queries, enlarge: bilinear}), and "
    "masks are thresholded without enlarging (Mask2Former enlarges to 384x384; set postprocess: {mask_size: ...})"
)
# Note for queries that fit two tasks.
QUERIES_ASSUMED = (
    "queries with masks are read as semantic segmentation; for a model trained on instances, use "
    "--task instance-segmentation (source.task in a recipe)"
)


@dataclass(frozen=True)
class InstanceSpec(OutputSpec):
    """How "class_logits" [queries, classes] and "masks" [queries, height, width], logits, become instances.

    `class_scores` "softmax": "class_logits" has an extra last column for "no object", and the score of an instance is
    its class score times the mean sigmoid inside its mask, as in the code of Mask2Former (arXiv
    2112.01527). "sigmoid": classes are independent, and the score is the class score (RF-DETR). `candidates` "pairs":
    the best pairs of query and class, as many as queries; "queries": each query with its best class (EoMT).
    `mask_size`: (height, width) to which the masks are enlarged bilinearly before thresholding at 0; None does not
    enlarge. `enlarge`: how a mask then gets the size of the image: "nearest" after thresholding, "bilinear" before.
    `threshold`: the score from which an instance is returned.
    """

    class_scores: ClassScores = "softmax"
    candidates: Candidates = "pairs"
    mask_size: tuple[int, int] | None = field(default=None, metadata=within(ge=1))
    enlarge: Enlarging = "nearest"
    threshold: float = field(default=0.5, metadata=SHARE)
    in_recipes: ClassVar[tuple[str, ...] | None] = ("candidates",)

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """Return the number of classes, without "no object"; None if the outputs do not tell."""
        count = last_axis(outputs, "class_logits")
        return count - 1 if count is not None and self.class_scores == "softmax" else count


Array = npt.NDArray[Any]

# Makes the mean of an empty mask 0, as in transformers.
EMPTY = 1e-6


@dataclass(frozen=True, eq=False)
class Instance:
    """One object: its class and label, its score in 0..1, its mask as run lengths, and the mask's bounding box.

    `box` is (left, top, right, bottom) in pixels of the original image: pixel i covers i to i + 1.
    """

    index: int
    label: str
    score: float
    box: tuple[float, float, float, float]
    runs: RunLengths

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """The mask, bool [height, width], at the original image's size."""
        return self.runs.mask

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, with the mask as COCO's uncompressed run lengths."""
        found = {"index": self.index, "label": self.label, "score": self.score, "box": list(self.box)}
        return {**found, "area": self.runs.area, "segmentation": self.runs.to_dict()}


@dataclass(frozen=True, eq=False, repr=False)
class Instances:
    """The answer for one image of `size` (width, height): its instances, `objects`, best first. Masks may overlap.
    `labels` are the class names of the objects."""

    size: tuple[int, int]
    objects: tuple[Instance, ...]

    @property
    def masks(self) -> npt.NDArray[np.bool_]:
        """bool [instances, height, width]."""
        width, height = self.size
        return np.array([each.mask for each in self.objects], np.bool_).reshape(-1, height, width)

    @property
    def boxes(self) -> npt.NDArray[np.float64]:
        """float64 [instances, 4], left, top, right, bottom in pixels."""
        return np.array([each.box for each in self.objects], np.float64).reshape(-1, 4)

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(each.label for each in self.objects)

    @property
    def scores(self) -> npt.NDArray[np.float64]:
        """float64 [instances], 0..1."""
        return np.array([each.score for each in self.objects], np.float64)

    def to_dict(self) -> dict[str, Any]:
        width, height = self.size
        return {"width": width, "height": height, "objects": [found.to_dict() for found in self.objects]}

    def __str__(self) -> str:
        """One instance per line."""
        lines = (
            f"{o.label} {100 * o.score:.1f} % at {' '.join(f'{side:.0f}' for side in o.box)}, {o.runs.area} pixels"
            for o in self.objects
        )
        return "\n".join(lines) or "nothing above the threshold"

    def __repr__(self) -> str:
        return f"<Instances: {len(self.objects)} in {self.size[0]}x{self.size[1]}: {shortened(str(self))}>"


def candidates(
    outputs: Mapping[str, Array],
    size: tuple[int, int],
    preprocess: PreprocessSpec,
    postprocess: InstanceSpec,
    labels: Sequence[str] | None,
) -> Iterator[Instance]:
    """Yield the instances with a score of at least `postprocess.threshold` and a non-empty mask, by query, with only
    one full mask in memory.

    If the model's input shows the whole image, this equals `post_process_instance_segmentation` of transformers'
    processors of Mask2Former, MaskFormer, EoMT and RF-DETR. Arguments as `segment_instances`.
    """
    scores, classes, queries = _ranked(outputs["class_logits"], postprocess)
    threshold = postprocess.threshold
    kept = np.flatnonzero(scores >= threshold)  # the mean of a mask can only lower a score
    for query in np.unique(queries[kept]).tolist():
        mask, certainty = _mask(outputs["masks"][query], size, preprocess, postprocess)
        if not mask.any():
            continue
        for at in kept[queries[kept] == query].tolist():
            index = int(classes[at])
            score = float(scores[at]) * (certainty if postprocess.class_scores == "softmax" else 1.0)
            if score >= threshold:
                yield Instance(index, label_of(index, labels), score, _box(mask), RunLengths.of(mask))


def segment_instances(
    outputs: Mapping[str, Array],
    size: tuple[int, int],
    preprocess: PreprocessSpec,
    postprocess: InstanceSpec,
    labels: Sequence[str] | None,
    limit: int | None = None,
) -> Instances:
    """Return the best `limit` instances with a score of at least `postprocess.threshold`.

    Args:
        outputs: by name, without the batch axis, as in `InstanceSpec`.
        size: (width, height) of the original image, upright. Parts outside the model's input have no instances.
        labels: one name per class, or None.
    """
    ranked = sorted(candidates(outputs, size, preprocess, postprocess, labels), key=lambda each: -each.score)
    return Instances(size, tuple(ranked[:limit]))


def _ranked(logits: Array, postprocess: InstanceSpec) -> tuple[Array, Array, Array]:
    """Score, class and query of every candidate; the score without the factor of its mask."""
    if postprocess.class_scores == "sigmoid":
        shares: Array = sigmoid(logits.astype(np.float64))
    else:
        shares = softmax(logits)[:, :-1]
    queries, count = shares.shape
    if postprocess.candidates == "queries":
        return shares.max(axis=1), shares.argmax(axis=1), np.arange(queries)
    flat = shares.reshape(-1)
    best = np.argsort(-flat, kind="stable")[:queries]
    return flat[best], best % count, best // count


def _mask(
    plane: Array, size: tuple[int, int], preprocess: PreprocessSpec, postprocess: InstanceSpec
) -> tuple[npt.NDArray[np.bool_], float]:
    """A query's mask at the size of the image, and the mean sigmoid inside it."""
    mask = np.zeros((size[1], size[0]), np.bool_)
    if postprocess.mask_size is not None:
        plane = enlarged(plane[None], postprocess.mask_size)[0]
    if postprocess.enlarge == "nearest":
        inside = plane > 0
        rows, columns, y, x = nearest(size, preprocess, (plane.shape[0], plane.shape[1]))
        mask[rows, columns] = inside[y[:, None], x]
        total, count = float(sigmoid(plane[inside]).sum(dtype=np.float64)), int(inside.sum())
    else:
        total, count = 0.0, 0
        for rows, columns, band in bands(plane[None], size, preprocess):
            inside = band[0] > 0
            mask[rows, columns] = inside
            total += float(sigmoid(band[0][inside]).sum(dtype=np.float64))
            count += int(inside.sum())
    return mask, total / (count + EMPTY)


def _box(mask: npt.NDArray[np.bool_]) -> tuple[float, float, float, float]:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    return float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)


def overlaps(a: Sequence[RunLengths], b: Sequence[RunLengths]) -> npt.NDArray[np.float64]:
    """Return the IoU of each mask of `a` with each of `b`, all of one size: float64 [a, b]."""
    if not a or not b:
        return np.zeros((len(a), len(b)))
    ours, theirs = ([each.mask for each in side] for side in (a, b))
    common = np.array([[np.count_nonzero(one & other) for other in theirs] for one in ours], np.float64)
    areas = [np.array([each.area for each in side], np.float64) for side in (a, b)]
    return np.asarray(common / np.maximum(areas[0][:, None] + areas[1] - common, 1.0))


def _answer(outputs: task.Outputs, reading: task.OutputReading) -> Instances:
    return segment_instances(outputs, reading.size, reading.images, reading.head(InstanceSpec), reading.labels)


def _same(ours: task.Outputs, theirs: task.Outputs, reading: task.OutputReading) -> bool:
    a, b = (_answer(side, reading).objects for side in (ours, theirs))
    shared = overlaps([each.runs for each in a], [each.runs for each in b]).tolist()
    return detection.mostly_paired([each.index for each in a], [each.index for each in b], shared)


def instance_picture(masks: Array, classes: Array) -> Image.Image:
    """Return a picture of masks, bool [n, height, width], the first on top, in the colours of their classes with a
    white rim that separates objects of one class; black elsewhere."""
    from PIL import Image

    picture = np.zeros((*masks.shape[1:], 3), np.uint8)
    palette = colours(int(classes.max(initial=0)) + 1)
    for mask, index in zip(masks[::-1], classes[::-1], strict=True):
        picture[mask] = palette[index]
        picture[mask & ~_core(mask)] = 255
    return Image.fromarray(picture)


def _core(mask: Array) -> Array:
    """The pixels of a mask whose four neighbours are also in it; pixels outside the image count as inside."""
    padded = np.pad(mask, 1, constant_values=True)
    return np.asarray(mask & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:])


def _draw(image: Image.Image, result: Instances) -> task.Files:
    """Masks over the image, the highest score on top, with label and score at the upper left corner of each."""
    from PIL import ImageDraw

    masks, classes = result.masks, np.array([each.index for each in result.objects], np.int64)
    drawn = over(image, instance_picture(masks, classes), np.asarray(masks.any(axis=0)))
    palette = colours(int(classes.max(initial=0)) + 1)
    pen = ImageDraw.Draw(drawn)
    for each in reversed(result.objects):
        draw_label(pen, each.box[:2], f"{each.label} {100 * each.score:.0f} %", tuple(palette[each.index].tolist()))
    return {".png": png_bytes(drawn)}


INSTANCES = task.DeviceTask(_answer, _same, draw=_draw, postprocess=InstanceSpec)
