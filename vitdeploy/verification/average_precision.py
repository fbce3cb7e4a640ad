"""COCO's average precision for many draws of the same images at once.

pycocotools, COCO's own program, matches detections with objects. This module accumulates the matches into precision
over recall for all draws of a bootstrap together: an image that was drawn twice counts twice, as if it were in the list
twice, and a drawn list needs no second matching (`COCOeval.accumulate` does not support one: it reads `params.imgIds`
by position, and needs seconds for each).
"""

from __future__ import annotations

import contextlib
import importlib
import io
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from scipy import sparse

from vitdeploy.data.detection import Boxes
from vitdeploy.errors import MissingPackageError
from vitdeploy.verification.records import ImageRows

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]

# COCO's: IoU .50:.05:.95, recall 0:.01:1, 100 detections per class and image, all sizes of objects.
IOUS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0.0, 1.0, 101)
MAX_DETECTIONS = 100
ANY_AREA = [[0.0, 1e10]]
# The COCO annotations of each image, without ids.
Entries = Sequence[Sequence[dict[str, Any]]]


@dataclass(frozen=True)
class Objects:
    """Detections in one image: classes int64 [k], scores float [k], boxes float [k, 4] x0 y0 x1 y1, pixels."""

    classes: npt.NDArray[np.int64]
    scores: npt.NDArray[np.floating[Any]]
    boxes: npt.NDArray[np.floating[Any]]

    def above(self, threshold: float) -> Objects:
        """Return the detections with a score of at least `threshold`."""
        kept = self.scores >= threshold
        return Objects(self.classes[kept], self.scores[kept], self.boxes[kept])

    def overlaps(self, other: Objects) -> Floats:
        """Return the IoU with each of `other`: float64 [k, others]."""
        return iou(self.boxes, other.boxes)


def iou(a: npt.NDArray[np.floating[Any]], b: npt.NDArray[np.floating[Any]]) -> Floats:
    """Intersection over union of boxes [n, 4] and [m, 4] given as x0 y0 x1 y1: float64 [n, m]; empty equal boxes: 1."""
    a, b = np.asarray(a, np.float64).reshape(-1, 1, 4), np.asarray(b, np.float64).reshape(1, -1, 4)
    common = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    intersection = common.clip(0).prod(axis=-1)
    union = (a[..., 2:] - a[..., :2]).clip(0).prod(axis=-1) + (b[..., 2:] - b[..., :2]).clip(0).prod(axis=-1)
    union = union - intersection
    return np.asarray(np.where(union > 0, intersection / np.where(union > 0, union, 1), (a == b).all(axis=-1)))


@dataclass(frozen=True)
class Matches:
    """The detections of one class in all images, best score first, at T thresholds of IoU.

    image: int64 [d], the index of each detection's image. right: bool [T, d], it matches an object. counted: bool [T,
        d], it counts as right or wrong; others overlap an ignored region. positives: int64 [images], objects to find.
    found: bool [objects], which of these are matched at the lowest IoU by a detection of any score.
    """

    image: npt.NDArray[np.int64]
    right: Bools
    counted: Bools
    positives: npt.NDArray[np.int64]
    found: Bools


@dataclass(frozen=True)
class Matched:
    """The detections of some images and their labelled objects, by image, and in an image by `category`.

    detections: best `score` first; right, counted: uint16, as of `Matches`, a bit for each of `IOUS`. objects: which
    are `ignored`, as crowds are, and which `found`, as of `Matches`.
    """

    detections: ImageRows
    objects: ImageRows


def match_boxes(objects: Sequence[Objects], truth: Sequence[Boxes]) -> Matched:
    """Match detections with labelled objects image by image, for all classes detected or labelled.

    Raises:
        MissingPackageError: pycocotools is not installed.
    """
    labelled = []
    for known in truth:
        columns = (known.classes, known.crowd, known.area)
        rows = zip(_corner_and_size(known.boxes), *(each.tolist() for each in columns), strict=True)
        labelled.append(
            [{"category_id": c, "bbox": box, "area": area, "iscrowd": int(crowd)} for box, c, crowd, area in rows]
        )
    found = []
    for each in objects:
        rows = zip(_corner_and_size(each.boxes), each.classes.tolist(), each.scores.tolist(), strict=True)
        found.append(
            [{"category_id": c, "bbox": box, "area": box[2] * box[3], "score": score} for box, c, score in rows]
        )
    return match_entries([{}] * len(truth), labelled, found, "bbox")


def match_entries(
    images: Sequence[Mapping[str, Any]],
    labelled: Entries,
    found: Entries,
    kind: Literal["bbox", "segm", "keypoints"],
    sigmas: Sequence[float] | None = None,
) -> Matched:
    """Match detections with labels image by image, by IoU of boxes or masks, or by OKS. The rows of one image do not
    depend on other images, so rows of several calls can be joined.

    Args:
        images: the COCO annotations of each, without ids. sigmas: of the key points, None for COCO's own.

    Raises:
        MissingPackageError: pycocotools is not installed.
    """
    n, categories = len(images), sorted({each["category_id"] for each in itertools.chain(*labelled, *found)})
    # Ids start at 1, as 0 means "no match" to pycocotools.
    common = {
        "images": [{"id": i, **image} for i, image in enumerate(images, 1)],
        "categories": [{"id": category} for category in categories],
    }
    labels, detections = ({**common, "annotations": _numbered(entries)} for entries in (labelled, found))
    results = _evaluated(labels, detections, kind, sigmas)
    matches = [
        (i, category, each)
        for i in range(n)
        for category, each in zip(categories, results[i::n], strict=True)
        if each is not None
    ]
    none = np.zeros((len(IOUS), 0))
    matched = np.concatenate([none, *(each["dtMatches"] for *_, each in matches)], axis=1) > 0
    counted = ~np.concatenate([none, *(each["dtIgnore"] for *_, each in matches)], axis=1).astype(bool)
    ignored = np.concatenate([none[0], *(each["gtIgnore"] for *_, each in matches)]) != 0
    return Matched(
        _rows(
            [(i, category, len(each["dtScores"])) for i, category, each in matches],
            score=np.concatenate([none[0], *(each["dtScores"] for *_, each in matches)]),
            right=_bits(matched & counted),
            counted=_bits(counted),
        ),
        _rows(
            [(i, category, len(each["gtIgnore"])) for i, category, each in matches],
            ignored=ignored,
            found=np.concatenate([none[0], *(each["gtMatches"][0] for *_, each in matches)]) > 0,
        ),
    )


def _rows(counts: Sequence[tuple[int, int, int]], **columns: npt.NDArray[Any]) -> ImageRows:
    """Return a table with this many rows for each image and category."""
    image, category, rows = np.array(counts, np.int32).reshape(-1, 3).T
    return ImageRows(np.repeat(image, rows), {"category": np.repeat(category, rows), **columns})


def _bits(values: Bools) -> npt.NDArray[np.uint16]:
    """uint16 [d] of bool [T, d], a bit for each threshold."""
    return np.asarray(np.left_shift(values, np.arange(len(values))[:, None]).sum(axis=0), np.uint16)


def _flags(bits: npt.NDArray[np.uint16]) -> Bools:
    """The inverse of `_bits`."""
    return np.asarray((bits >> np.arange(len(IOUS), dtype=np.uint16)[:, None]) & 1, np.bool_)


def matches_of(matched: Matched, n: int) -> list[Matches]:
    """The rows of n images, joined, by class; one entry for each class that has labelled objects. Detections of other
    classes are ignored, as in COCO's mean over classes."""
    detections, objects = matched.detections, matched.objects
    order = np.argsort(detections["category"], kind="stable")
    sorted_categories = detections["category"][order]
    found = []
    for category in np.unique(objects["category"]):
        start, end = np.searchsorted(sorted_categories, [category, category + 1])
        own = order[start:end]
        own = own[np.argsort(-detections["score"][own], kind="mergesort")]
        labelled = (objects["category"] == category) & ~objects["ignored"]
        found.append(
            Matches(
                detections.image[own].astype(np.int64),
                _flags(detections["right"][own]),
                _flags(detections["counted"][own]),
                np.bincount(objects.image[labelled], minlength=n),
                objects["found"][labelled],
            )
        )
    return found


def _numbered(entries: Entries) -> list[dict[str, Any]]:
    """Return annotations with ids."""
    every = ((i, entry) for i, image in enumerate(entries, 1) for entry in image)
    return [{"id": number, "image_id": i, **entry} for number, (i, entry) in enumerate(every, 1)]


def _evaluated(
    labels: dict[str, Any],
    detections: dict[str, Any],
    kind: Literal["bbox", "segm", "keypoints"],
    sigmas: Sequence[float] | None,
) -> list[dict[str, Any] | None]:
    """Return pycocotools' result for each category and image: all images of a category, then the next category."""
    try:
        coco = importlib.import_module("pycocotools.coco").COCO
        evaluation = importlib.import_module("pycocotools.cocoeval").COCOeval
    except ImportError:
        raise MissingPackageError("pycocotools", "export", "mAP") from None
    if not labels["categories"]:
        return []
    with contextlib.redirect_stdout(io.StringIO()):  # it prints its progress to standard output
        labelled, detected = coco(), coco()
        labelled.dataset, detected.dataset = labels, detections
        labelled.createIndex()
        detected.createIndex()
        run = evaluation(labelled, detected, kind)
        run.params.areaRng, run.params.areaRngLbl = ANY_AREA, ["all"]
        run.params.maxDets, run.params.iouThrs = [MAX_DETECTIONS], IOUS
        if sigmas is not None:
            run.params.kpt_oks_sigmas = np.asarray(sigmas, np.float64)
        run.evaluate()
    return list(run.evalImgs)


def _corner_and_size(boxes: npt.NDArray[Any]) -> list[list[float]]:
    corners = np.asarray(boxes, np.float64).reshape(-1, 4)
    return np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], axis=1).tolist()  # type: ignore[no-any-return]


def average_precision(matches: Sequence[Matches], draws: Floats) -> Floats:
    """AP in 0..1 at each IoU, mean over the classes: float64 [draws, T]; NaN if a draw has no object.

    Args:
        draws: float64 [draws, images], how often each image counts; one row of ones is COCO's AP itself.
    """
    by_class = np.stack([_of_draws(each, draws) for each in matches])
    defined = np.isfinite(by_class)
    with np.errstate(invalid="ignore"):
        return np.asarray(np.where(defined, by_class, 0).sum(axis=0) / defined.sum(axis=0))


def _of_draws(matches: Matches, draws: Floats) -> Floats:
    """AP of one class, float64 [draws, T]; NaN if a draw has none of its objects.

    Only right detections change recall, and precision peaks at these, so only they matter. COCO's AP is the mean over
    101 recalls r of the best precision at any recall of at least r (0 if r is not reached).
    """
    positives = draws @ matches.positives
    result = np.full((len(draws), len(matches.right)), np.nan)
    for t, (right, counted) in enumerate(zip(matches.right, matches.counted, strict=True)):
        at = np.flatnonzero(right)
        shape = (len(at) + 1, draws.shape[1])
        # Row j: number of counted detections per image after right detection j - 1, up to and including j.
        between = sparse.csr_matrix(
            (counted.astype(np.float64), (np.searchsorted(at, np.arange(len(right))), matches.image)), shape
        )
        seen = np.cumsum(between @ draws.T, axis=0)[:-1]
        hits = np.cumsum(draws.T[matches.image[at]], axis=0)
        with np.errstate(invalid="ignore"):
            recall = hits / positives
        precision = hits / (seen + np.spacing(1))
        best = np.maximum.accumulate(precision[::-1], axis=0)[::-1]
        reached = np.searchsorted(RECALLS, recall, side="right")
        result[:, t] = (best * np.diff(reached, axis=0, prepend=0)).sum(axis=0) / len(RECALLS)
    result[positives == 0] = np.nan
    return result
