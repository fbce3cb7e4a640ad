"""From the outputs of an instance segmentation model for one image to objects with masks at the image's size."""

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
# What is said where a graph or a module does not say it.
PAIRS_ASSUMED = (
    "instances are read as Mask2Former's are (postprocess: {candidates: queries, enlarge: bilinear} are EoMT's), and "
    "masks are not enlarged before they are cut at 0, as Mask2Former's are to 384x384 (postprocess: {mask_size: ...})"
)
# And where the same queries may be read in two ways.
QUERIES_ASSUMED = (
    "queries with masks are read as semantic segmentation; of a model that was trained for instances "
    "--task instance-segmentation (source.task in a recipe) reads objects"
)


@dataclass(frozen=True)
class InstanceSpec(OutputSpec):
    """From "class_logits" [queries, classes] and "masks" [queries, height, width], logits, to instances.

    `class_scores` "softmax": "class_logits" have one more column, the last, for "no object", and the score of an
    instance is that of its class times the mean of the sigmoids inside its mask, as in the code of Mask2Former (arXiv
    2112.01527). "sigmoid": classes are independent, and the score is that of the class alone (RF-DETR).
    `candidates` "pairs": of all pairs of query and class the best, as many as there are queries; "queries": each query
    with its best class (EoMT).
    `mask_size`: (height, width) to which the masks are enlarged, bilinear, before they are cut at 0; None leaves them
    as they are. `enlarge`: how a mask then gets the size of the image: "nearest" after it was cut, "bilinear" before.
    `threshold`: the score from which an instance is shown.
    """

    class_scores: ClassScores = "softmax"
    candidates: Candidates = "pairs"
    mask_size: tuple[int, int] | None = field(default=None, metadata=within(ge=1))
    enlarge: Enlarging = "nearest"
    threshold: float = field(default=0.5, metadata=SHARE)
    in_recipes: ClassVar[tuple[str, ...] | None] = ("candidates",)

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """How many classes there are, without "no object"; None if the outputs do not say."""
        count = last_axis(outputs, "class_logits")
        return count - 1 if count is not None and self.class_scores == "softmax" else count


Array = npt.NDArray[Any]

# Where a mask has no pixel its mean is 0, as in transformers.
EMPTY = 1e-6


@dataclass(frozen=True, eq=False)
class Instance:
    """One object: its class and label, its score in 0..1, its mask as run lengths, and the box around that.

    `box` is (left, top, right, bottom) in pixels of the original image: pixel i covers i to i + 1.
    """

    index: int
    label: str
    score: float
    box: tuple[float, float, float, float]
    runs: RunLengths

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """bool [height, width] of the original image."""
        return self.runs.mask

    def to_dict(self) -> dict[str, Any]:
        """With the mask as COCO's uncompressed run lengths."""
        found = {"index": self.index, "label": self.label, "score": self.score, "box": list(self.box)}
        return {**found, "area": self.runs.area, "segmentation": self.runs.to_dict()}


@dataclass(frozen=True, eq=False, repr=False)
class Instances:
    """The answer for one image of `size` (width, height): its instances, best first. Masks may overlap."""

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
    """What has a score of at least `postprocess.threshold` and a mask with a pixel, by query; masks are made one after
    the other.

    The same as `post_process_instance_segmentation` of transformers' processors of Mask2Former, MaskFormer, EoMT and
    RF-DETR, where the model's input shows the whole image; arguments as `segment_instances`.
    """
    scores, classes, queries = _ranked(outputs["class_logits"], postprocess)
    threshold = postprocess.threshold
    kept = np.flatnonzero(scores >= threshold)  # what the mean of a mask does to a score makes it no larger
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
    """The instances with a score of at least `postprocess.threshold`, the best `limit` of them.

    Args:
        outputs: by name, without the batch axis, as `InstanceSpec` says.
        size: (width, height) of the original image, upright. What the model's input does not show has no instance.
        labels: one name per class, or None.
    """
    ranked = sorted(candidates(outputs, size, preprocess, postprocess, labels), key=lambda each: -each.score)
    return Instances(size, tuple(ranked[:limit]))


def _ranked(logits: Array, postprocess: InstanceSpec) -> tuple[Array, Array, Array]:
    """Score, class and query of every candidate, without what its mask adds to the score."""
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
    """A query's mask at the size of the image, and the mean of the sigmoids inside of it."""
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
    """Intersection over union of each mask of `a` with each of `b`, all of one size: float64 [a, b]."""
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
    """Masks, bool [n, height, width], the first on top, in the colours of their classes with a white rim, which tells
    two objects of a class from each other; black where there is none."""
    from PIL import Image

    picture = np.zeros((*masks.shape[1:], 3), np.uint8)
    palette = colours(int(classes.max(initial=0)) + 1)
    for mask, index in zip(masks[::-1], classes[::-1], strict=True):
        picture[mask] = palette[index]
        picture[mask & ~_core(mask)] = 255
    return Image.fromarray(picture)


def _core(mask: Array) -> Array:
    """The pixels of a mask whose four neighbours are in it too; beyond the image everything is."""
    padded = np.pad(mask, 1, constant_values=True)
    return np.asarray(mask & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:])


def _draw(image: Image.Image, result: Instances) -> task.Files:
    """Masks over the image, the surest on top, with label and score at the upper left corner of each."""
    from PIL import ImageDraw

    masks, classes = result.masks, np.array([each.index for each in result.objects], np.int64)
    drawn = over(image, instance_picture(masks, classes), np.asarray(masks.any(axis=0)))
    palette = colours(int(classes.max(initial=0)) + 1)
    pen = ImageDraw.Draw(drawn)
    for each in reversed(result.objects):
        draw_label(pen, each.box[:2], f"{each.label} {100 * each.score:.0f} %", tuple(palette[each.index].tolist()))
    return {".png": png_bytes(drawn)}


INSTANCES = task.DeviceTask(_answer, _same, draw=_draw, postprocess=InstanceSpec)
