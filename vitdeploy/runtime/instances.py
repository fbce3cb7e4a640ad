"""From the outputs of an instance segmentation model for one image to objects with masks at the image's size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.masks import RunLengths
from vitdeploy.runtime.postprocess import label_of, shortened, sigmoid, softmax
from vitdeploy.runtime.task import Outputs, Reading, RuntimeTask
from vitdeploy.runtime.upsample import bands, enlarged, nearest
from vitdeploy.spec import InstanceSpec, PreprocessSpec

Array = npt.NDArray[Any]

# Two models agree on a sample if so large a share of the instances of both has a partner: of the same class, and with a
# mask of at least this IoU.
OVERLAP = 0.5
MATCHED_SHARE = 0.5
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


@dataclass(frozen=True, eq=False)
class Candidate:
    """What one query shows: the class, the score, and the mask, bool [height, width] of the original image."""

    query: int
    index: int
    score: float
    mask: npt.NDArray[np.bool_]


def candidates(
    outputs: Mapping[str, Array],
    size: tuple[int, int],
    preprocess: PreprocessSpec,
    postprocess: InstanceSpec,
    threshold: float,
) -> Iterator[Candidate]:
    """What has a score of at least `threshold` and a mask with a pixel, by query; masks are made one after the other.

    The same as `post_process_instance_segmentation` of transformers' processors of Mask2Former, MaskFormer, EoMT and
    RF-DETR, where the model's input shows the whole image; arguments as `segment_instances`.
    """
    scores, classes, queries = _ranked(outputs["class_logits"], postprocess)
    kept = np.flatnonzero(scores >= threshold)  # what the mean of a mask does to a score makes it no larger
    for query in np.unique(queries[kept]).tolist():
        mask, certainty = _mask(outputs["masks"][query], size, preprocess, postprocess)
        if not mask.any():
            continue
        for at in kept[queries[kept] == query].tolist():
            score = float(scores[at]) * (certainty if postprocess.class_scores == "softmax" else 1.0)
            if score >= threshold:
                yield Candidate(query, int(classes[at]), score, mask)


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
    found = [
        (each.score, each.index, _box(each.mask), RunLengths.of(each.mask))
        for each in candidates(outputs, size, preprocess, postprocess, postprocess.threshold)
    ]
    found.sort(key=lambda row: -row[0])
    best = (Instance(index, label_of(index, labels), score, box, runs) for score, index, box, runs in found[:limit])
    return Instances(size, tuple(best))


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


def head_of(reading: Reading) -> InstanceSpec:
    """What the outputs of an instance segmentation model mean."""
    assert isinstance(reading.postprocess, InstanceSpec), "a manifest without it is refused when it is read"
    return reading.postprocess


def _answer(outputs: Outputs, reading: Reading) -> Instances:
    return segment_instances(outputs, reading.size, reading.preprocess, head_of(reading), reading.labels)


def _same(ours: Outputs, theirs: Outputs, reading: Reading) -> bool:
    """Whether most instances of both sides have a partner: of the same class, and at the same place."""
    found, wanted = (_answer(side, reading).objects for side in (ours, theirs))
    shared = overlaps([each.runs for each in found], [each.runs for each in wanted])
    left, pairs = list(range(len(wanted))), 0
    for i, each in enumerate(found):
        partner = next((j for j in left if wanted[j].index == each.index and shared[i, j] >= OVERLAP), None)
        if partner is not None:
            left.remove(partner)
            pairs += 1
    return 2 * pairs >= MATCHED_SHARE * (len(found) + len(wanted))


INSTANCES = RuntimeTask(_answer, _same)
