"""Panoptic segmentation: a map of segments at the original image's size, from a model's outputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime import drawing, upsample
from vitdeploy.runtime.masks import png_bytes
from vitdeploy.runtime.postprocess import label_of, shortened, sigmoid, softmax
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.tasks.task import DeviceTask, Files, OutputReading, Outputs
from vitdeploy.spec import PreprocessSpec

if TYPE_CHECKING:
    from PIL import Image

Array = npt.NDArray[Any]

# Two maps agree if at least this share of their pixels has the same class.
SAME_SHARE = 0.5


@dataclass(frozen=True)
class Segment:
    """One segment: its id in the map, its class and label, its score in 0..1, its area in pixels of the map.

    `isthing`: an instance of a countable class; otherwise the image's whole area of that stuff class.
    """

    id: int
    index: int
    label: str
    score: float
    area: int
    isthing: bool

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True, eq=False, repr=False)
class Panoptic:
    """The answer for one image. map: int32 [height, width] of the ids of `segments`, 0 for no segment."""

    map: npt.NDArray[np.int32]
    segments: tuple[Segment, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except the pixels of the map."""
        height, width = self.map.shape
        return {"width": width, "height": height, "segments": [segment.to_dict() for segment in self.segments]}

    def __str__(self) -> str:
        """One segment per line."""
        lines = (f"{s.label} {100 * s.area / self.map.size:.1f} % of the image" for s in self.segments)
        return "\n".join(lines) or "nothing above the threshold"

    def __repr__(self) -> str:
        height, width = self.map.shape
        return f"<Panoptic: {len(self.segments)} segments in {width}x{height}: {shortened(str(self))}>"


def segment(
    outputs: Mapping[str, Array],
    size: tuple[int, int],
    preprocess: PreprocessSpec,
    postprocess: PostprocessSpec,
    labels: Sequence[str] | None,
) -> Panoptic:
    """Assign every pixel to the query with the largest mask value there, weighted by its score.

    A query counts if its best class is not "no object" and has a score above `threshold`. It is dropped if the pixels
    it wins are fewer than `overlap` times those where its weighted mask reaches `mask_threshold`. Segments of one stuff
    class are fused; the fused segment has their highest score.

    Equals `post_process_panoptic_segmentation` of transformers' DetrImageProcessor, except that ids stay unique after a
    fusion and a fused segment is listed once.

    Args:
        outputs: by name, without the batch axis: "logits" [queries, classes + 1] and "masks" [queries, height, width],
            logits of masks relative to the model's input.
        size: (width, height) of the original image, upright. Parts outside the model's input have no segment.
        labels: one name per class, or None.
    """
    probabilities = softmax(outputs["logits"])
    classes, scores = probabilities.argmax(axis=1), probabilities.max(axis=1)
    kept = np.flatnonzero((classes != probabilities.shape[1] - 1) & (scores > postprocess.threshold))
    classes, scores = classes[kept], scores[kept]
    winners = np.full((size[1], size[0]), -1, np.int32)
    if not len(kept):
        return Panoptic(winners + 1, ())
    areas, reached = np.zeros(len(kept), np.int64), np.zeros(len(kept), np.int64)
    masks = sigmoid(outputs["masks"][kept])
    for rows, columns, band in upsample.bands(masks, size, preprocess):
        band *= scores[:, None, None].astype(band.dtype)
        best = band.argmax(axis=0)
        winners[rows, columns] = best
        areas += np.bincount(best.reshape(-1), minlength=len(kept))
        reached += (band >= postprocess.mask_threshold).sum(axis=(1, 2))
    shown = (areas > 0) & (reached > 0) & (areas / np.maximum(reached, 1) >= postprocess.overlap)
    segments: list[Segment] = []
    ids = np.zeros(len(kept) + 1, np.int32)  # by kept query; the last entry is for pixels without a query (winner -1)
    fused: dict[int, int] = {}
    for query in np.flatnonzero(shown).tolist():
        index, score, area = int(classes[query]), float(scores[query]), int(areas[query])
        isthing = index in postprocess.things
        if index in fused:
            old = segments[fused[index] - 1]
            segments[old.id - 1] = replace(old, score=max(old.score, score), area=old.area + area)
            ids[query] = old.id
            continue
        ids[query] = len(segments) + 1
        segments.append(Segment(len(segments) + 1, index, label_of(index, labels), score, area, isthing))
        if not isthing:
            fused[index] = len(segments)
    return Panoptic(ids[winners], tuple(segments))


def _answer(outputs: Outputs, reading: OutputReading) -> Panoptic:
    return segment(outputs, reading.size, reading.images, reading.head(PostprocessSpec), reading.labels)


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    a, b = (_classes(_answer(side, reading)) for side in (ours, theirs))
    return bool((a == b).mean() >= SAME_SHARE)


def _classes(panoptic: Panoptic) -> Array:
    """[height, width]: the class of each pixel, -1 for none."""
    table = np.full(max((each.id for each in panoptic.segments), default=0) + 1, -1, np.int64)
    for each in panoptic.segments:
        table[each.id] = each.index
    return np.asarray(table[panoptic.map])


def _draw(image: Image.Image, result: Panoptic) -> Files:
    """Each segment in its own colour, with a legend."""
    drawn = drawing.over(image, drawing.class_picture(result.map - 1), result.map > 0)
    palette = drawing.colours(max((each.id for each in result.segments), default=0))
    largest = sorted(result.segments, key=lambda each: -each.area)[:12]
    drawing.legend(drawn, [(each.label, tuple(palette[each.id - 1].tolist())) for each in largest])
    return {".png": png_bytes(drawn)}


PANOPTIC = DeviceTask(_answer, _same, draw=_draw, postprocess=PostprocessSpec)
