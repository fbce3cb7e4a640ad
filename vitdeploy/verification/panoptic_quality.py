"""Panoptic quality: segments of two maps matched, counted, and added up over images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.data.panoptic import VOID, PanopticMap

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Quality:
    """Panoptic, segmentation and recognition quality in percent: means over the classes that occur.

    Kirillov et al., "Panoptic Segmentation", arXiv 1801.00868, equations 1 and 2: of a class, SQ is the mean IoU of its
    matched segments, RQ = TP / (TP + FP/2 + FN/2), PQ = SQ RQ.
    """

    pq: float
    sq: float
    rq: float


@dataclass(frozen=True)
class Tally:
    """One map against another: float64 [classes, 4] (sum of IoU, TP, FP, FN); and the true segments, found or not."""

    counts: Floats
    found: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Segments:
    """A map by its segments, those that have pixels, VOID among them.

    area: pixels of each. classes: int64, -1 for VOID. crowd: bool. at: the index of each pixel's segment, flat.
    """

    area: npt.NDArray[np.int64]
    classes: npt.NDArray[np.int64]
    crowd: npt.NDArray[np.bool_]
    at: npt.NDArray[Any]


def segments_of(cut: PanopticMap, classes: int) -> Segments:
    """The segments of a map.

    Raises:
        ValueError: a segment without a class, or with one outside of 0..classes-1.
    """
    ids, at, area = np.unique(cut.ids.ravel(), return_inverse=True, return_counts=True)
    kinds = [-1 if id == VOID else cut.classes.get(id, classes) for id in ids.tolist()]
    if max(kinds) >= classes:
        raise ValueError(f"segments {ids.tolist()} are of classes {kinds}; there are {classes}")
    return Segments(area, np.array(kinds, np.int64), np.isin(ids, list(cut.crowd)), at.ravel())


def tally(found: Segments, truth: Segments, classes: int, *, forgive: bool) -> Tally:
    """Match the segments of one image: a pair of one class with IoU above 0.5, of which there can be only one.

    With `forgive`, as arXiv 1801.00868 (section 4.2) and COCO have it: pixels that are VOID in the truth count for no
    union; a segment of which more than half lies on VOID, or on crowds of its class, is no false positive; crowds are
    not to be found. Without, every segment of both maps counts.

    Raises:
        ValueError: maps of other sizes.
    """
    if found.at.shape != truth.at.shape:
        raise ValueError(f"a map of {found.at.size} pixels against one of {truth.at.size}")
    shape = len(truth.area), len(found.area)
    common = np.bincount(truth.at * shape[1] + found.at, minlength=shape[0] * shape[1]).reshape(shape)
    same_class = truth.classes[:, None] == found.classes
    real, wanted = found.classes >= 0, truth.classes >= 0
    on_void = np.zeros(shape[1], np.int64)
    excused = np.zeros(shape[1], np.bool_)
    if forgive:
        on_void = common[~wanted].sum(axis=0)
        on_crowd = np.where(truth.crowd[:, None] & same_class, common, 0).sum(axis=0)
        excused = 2 * (on_void + on_crowd) > found.area
        wanted = wanted & ~truth.crowd
    union = truth.area[:, None] + found.area - common - on_void
    pairs = same_class & wanted[:, None] & real & (2 * common > union)
    rows, columns = np.nonzero(pairs)
    wrong = real & ~pairs.any(axis=0) & ~excused
    missed = wanted & ~pairs.any(axis=1)
    counts = np.zeros((classes, 4))
    np.add.at(counts[:, 0], found.classes[columns], common[rows, columns] / union[rows, columns])
    np.add.at(counts[:, 1], found.classes[columns], 1)
    np.add.at(counts[:, 2], found.classes[wrong], 1)
    np.add.at(counts[:, 3], truth.classes[missed], 1)
    return Tally(counts, pairs.any(axis=1)[wanted])


def panoptic_quality(counts: Floats, weights: Floats) -> Floats:
    """PQ in percent, mean over the classes that occur: float64 [draws]; NaN if none does.

    Args:
        counts: float64 [images, classes, 4], as in `Tally`. weights: float64 [draws, images], how often each counts.
    """
    iou, right, wrong, missed = np.moveaxis(np.tensordot(weights, counts, axes=1), -1, 0)
    tried = right + wrong / 2 + missed / 2
    with np.errstate(invalid="ignore"):
        by_class = np.where(tried > 0, iou / np.where(tried > 0, tried, 1), 0)
        return np.asarray(100 * by_class.sum(axis=-1) / (tried > 0).sum(axis=-1))


def quality(counts: Floats, chosen: npt.NDArray[np.bool_]) -> Quality | None:
    """Over the `chosen` classes of counts [images, classes, 4], all images together; None if none occurs."""
    iou, right, wrong, missed = counts.sum(axis=0)[chosen].T
    tried = right + wrong / 2 + missed / 2
    iou, right, tried = iou[tried > 0], right[tried > 0], tried[tried > 0]
    if not len(tried):
        return None
    pq, sq, rq = iou / tried, iou / np.maximum(right, 1), right / tried
    return Quality(*(100 * float(each.mean()) for each in (pq, sq, rq)))
