"""Instance segmentation: masks, their agreement and average precision."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.data.classes import match_categories
from vitdeploy.data.decoding import Skipped
from vitdeploy.data.instances import Outlines, read_instances
from vitdeploy.runtime.drawing import instance_picture
from vitdeploy.runtime.instances import overlaps, segment_instances
from vitdeploy.runtime.masks import RunLengths
from vitdeploy.runtime.postprocess import label_of
from vitdeploy.spec import InstanceSpec
from vitdeploy.tasks.adapter import Data, DataChoice, Found, Panel, thumbnail
from vitdeploy.tasks.answers import Said
from vitdeploy.tasks.counted import CountedKit
from vitdeploy.tasks.detection import listed
from vitdeploy.tasks.drawn import drawn
from vitdeploy.verification.average_precision import Matched, match_rows
from vitdeploy.verification.changes import Changes, Counts, judged
from vitdeploy.verification.comparison import Comparison, differences, worst_of
from vitdeploy.verification.detection import (
    MATCH_IOU,
    accuracy_of,
    distinct,
    object_records,
    paired,
    require_together,
    shared_objects,
)
from vitdeploy.verification.records import SIZE, Answers, Records

# --- Compares a model's instances with the original's, by their masks, and both with labelled ones --------------------


@dataclass(frozen=True)
class Masks:
    """What a model found in one image: classes int64 [k], scores float64 [k], and a mask for each."""

    classes: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    runs: tuple[RunLengths, ...]

    def above(self, threshold: float) -> Masks:
        """Those with a score of at least `threshold`."""
        kept = np.flatnonzero(self.scores >= threshold)
        return Masks(self.classes[kept], self.scores[kept], tuple(self.runs[i] for i in kept))


@dataclass(frozen=True, kw_only=True)
class InstanceComparison(Comparison):
    """Instances against the original's. The metric is COCO's mAP of masks (mean over IoU .50:.05:.95 and classes), in
    percent.

    agreement: 200 m / (a + b) for the a and b instances that artifact and original show (score >= `threshold`), m of
        which form pairs of one class whose masks have an IoU of at least 0.5; 100 if neither shows any.
    instances: b. mask_iou_mean, score_difference_mean: over the pairs (None without any).
    """

    threshold: float
    instances: int
    mask_iou_mean: float | None
    score_difference_mean: float | None
    ap50: float | None = None
    reference_ap50: float | None = None
    ap75: float | None = None
    reference_ap75: float | None = None


def compare_instances(
    artifact: Sequence[Masks],
    reference: Sequence[Masks],
    truth: Sequence[Outlines] | None,
    *,
    threshold: float,
    max_difference: float,
    seed: int = 0,
) -> InstanceComparison:
    """Compare what the artifact and the original found in the same images, in the same order.

    Args:
        artifact, reference: all that they found, whatever its score: mAP is of the whole ranking.
        truth: the labelled objects with the models' class numbers (`Outlines.renumbered`), or None.
        threshold: the score from which a user sees an instance.
        max_difference: of the raw outputs, passed on.

    Raises:
        ValueError: lists of different lengths, or no image.
        DataError: not one labelled object in all images.
        MissingPackageError: there are labels, and pycocotools is not installed.
    """
    records = instance_records(artifact, reference, truth, threshold=threshold)
    return instance_comparison(records, threshold=threshold, max_difference=max_difference, seed=seed)


def instance_records(
    artifact: Sequence[Masks], reference: Sequence[Masks], truth: Sequence[Outlines] | None, *, threshold: float
) -> Records:
    """What `instance_comparison` needs of each image; arguments and errors as of `compare_instances`, but for
    DataError. For the tables see `detection.object_records`."""
    require_together(artifact, reference, truth)
    shown = [[each.above(threshold) for each in side] for side in (artifact, reference)]
    pairs = [_paired(a, b)[1] for a, b in zip(*shown, strict=True)]
    matched = None if truth is None else [_matched(each, truth) for each in distinct(artifact, reference)]
    return object_records(pairs, [[len(each.scores) for each in side] for side in shown], matched)


def instance_comparison(
    records: Records, *, threshold: float, max_difference: float, seed: int = 0
) -> InstanceComparison:
    """The comparison that the records of all images are of; arguments and errors as of `compare_instances`."""
    pairs = records["pairs"]
    return InstanceComparison(
        n=records.n,
        metric="mask mAP" if "objects" in records else None,
        **shared_objects(records, seed),
        agreement_of=f"instances of score {threshold:g} or more with the same class and mask IoU {MATCH_IOU:g} or more",
        max_difference=max_difference,
        threshold=threshold,
        instances=int(records["images"]["shown"][:, 1].sum()),
        mask_iou_mean=float(pairs["iou"].mean()) if len(pairs) else None,
        score_difference_mean=float(pairs["apart"].mean()) if len(pairs) else None,
        **(accuracy_of(records, seed, "mAP of masks") if "objects" in records else {}),
    )


def instance_changes(artifact: Sequence[Masks], reference: Sequence[Masks]) -> Changes:
    """Changed images: those with a visible instance that has no partner on the other side; more such instances, and
    higher scores, are worse."""
    lonely = np.zeros(len(reference))
    for i, (a, b) in enumerate(zip(artifact, reference, strict=True)):
        both = _paired(a, b)[0]
        lonely[i] = np.delete(a.scores, both[:, 0]).sum() + np.delete(b.scores, both[:, 1]).sum()
    return judged(lonely > 0, lonely / (1 + lonely))


def _paired(a: Masks, b: Masks) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    return paired(a, b, overlaps(a.runs, b.runs))


def _matched(found: Sequence[Masks], truth: Sequence[Outlines]) -> Matched:
    """Matches by IoU of masks, of all classes that are found or labelled. Ids start at 1: 0 is "no match"."""
    labelled = {int(c) for known in truth for c in known.classes}
    classes = sorted(labelled | {int(c) for masks in found for c in masks.classes})
    images = [{"id": i, "width": each.size[0], "height": each.size[1]} for i, each in enumerate(truth, 1)]
    common: dict[str, Any] = {"images": images, "categories": [{"id": c} for c in classes]}
    labels: list[dict[str, Any]] = []
    detections: list[dict[str, Any]] = []
    for i, (known, masks) in enumerate(zip(truth, found, strict=True), 1):
        for c, outline, crowd in zip(known.classes.tolist(), known.outlines, known.crowd.tolist(), strict=True):
            entry = {"image_id": i, "category_id": c, "segmentation": outline, "area": 0.0, "iscrowd": int(crowd)}
            labels.append({"id": len(labels) + 1, **entry})
        for c, score, runs in zip(masks.classes.tolist(), masks.scores.tolist(), masks.runs, strict=True):
            entry = {"image_id": i, "category_id": c, "segmentation": runs.to_dict(), "area": runs.area, "iscrowd": 0}
            detections.append({"id": len(detections) + 1, **entry, "score": score})
    return match_rows({**common, "annotations": labels}, {**common, "annotations": detections}, "segm")


# --- Instance segmentation: objects with masks, COCO's mAP of masks, and whether the same objects are found -----------


CLASSES, SCORES, COUNTS, LENGTHS = "classes", "scores", "counts", "lengths"
RAW = ("class_logits", "masks")
# Of an image the best instances are kept, as COCO counts no more of a class, and only those of such a score: masks of
# all queries take seconds, and what is below changes no mAP that a person would see.
KEPT, LEAST_SCORE = 100, 0.01
# Numbers of each raw output that are kept, for the largest difference.
NUMBERS = 1 << 12


class InstanceSegmentationKit(CountedKit):
    finer = 8
    kinds = ("coco", "none")

    def find(self, choice: DataChoice, skipped: Skipped | None = None) -> Found:
        if choice.annotations is None or choice.labels == "none":
            return super().find(choice, skipped)
        found = read_instances(choice.path, choice.annotations, skipped)
        used = {int(c) for each in found.annotations.values() for c in each.classes}
        mapping = match_categories(found.categories, used, self.setting.labels, self.setting.classes)
        truth = {path: each.renumbered(mapping.index) for path, each in found.annotations.items()}
        return Found(found.split(**choice.numbers), found, truth, mapping)

    @property
    def _head(self) -> InstanceSpec:
        assert isinstance(self.setting.postprocess, InstanceSpec)
        return self.setting.postprocess

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """The instances with their masks as run lengths, joined, and some of the raw numbers."""
        head = dataclasses.replace(self._head, threshold=min(self._head.threshold, LEAST_SCORE))
        objects = segment_instances(outputs, size, self.setting.images, head, None, KEPT).objects
        counts = [each.runs.counts for each in objects]
        return {
            **{name: drawn(outputs[name], NUMBERS) for name in RAW},
            CLASSES: np.array([each.index for each in objects], np.int64),
            SCORES: np.array([each.score for each in objects], np.float64),
            **_joined(counts),
            SIZE: np.array(size, np.int64),
        }

    def _found(self, answers: Answers, threshold: float = 0.0) -> list[Masks]:
        return [self._masks(answers, i).above(threshold) for i in range(len(answers))]

    def _masks(self, answers: Answers, index: int) -> Masks:
        column = {name: answers.columns[name][index] for name in (CLASSES, SCORES, COUNTS, LENGTHS, SIZE)}
        width, height = (int(side) for side in column[SIZE])
        ends = np.cumsum(column[LENGTHS])[:-1]
        parts = np.split(column[COUNTS], ends) if len(column[LENGTHS]) else []
        return Masks(column[CLASSES], column[SCORES], tuple(RunLengths((width, height), part) for part in parts))

    def moved(self, answers: Answers, order: Sequence[int], reference: Answers) -> Answers:
        found = super().moved(answers, order, reference)
        sizes = [tuple(size) for size in np.stack(answers.columns[SIZE]).tolist()]
        if len(set(sizes)) == 1:
            return found
        counts = [
            [each.resized(size).counts for each in self._masks(answers, index).runs]
            for index, size in zip(order, sizes, strict=True)
        ]
        runs = [_joined(each) for each in counts]
        return Answers({**found.columns, **{name: [each[name] for each in runs] for name in (COUNTS, LENGTHS)}})

    def count(self, ours: Answers, reference: Answers, data: Data) -> Counts:
        truth = data.truths()
        theirs = self._found(reference)
        artifact = theirs if ours is reference else self._found(ours)
        records = instance_records(artifact, theirs, truth, threshold=self._head.threshold)
        return records.with_tables(outputs=differences(ours, reference, RAW))

    def comparison(self, counts: Counts) -> Comparison:
        assert isinstance(counts, Records)
        worst = worst_of(counts["outputs"])
        return instance_comparison(counts, threshold=self._head.threshold, max_difference=worst)

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        return instance_changes(*(self._found(each, self._head.threshold) for each in (ours, reference)))

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        found = self._masks(answers, index).above(self._head.threshold)
        score = float(found.scores[0]) if len(found.scores) else None
        return Said(listed([label_of(int(c), labels) for c in found.classes]), score)

    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        if data.truth is None:
            return None
        return listed([label_of(int(c), labels) for c in data.truth_at(index).classes])

    def panels(self, data: Data, index: int, answers: Mapping[str, Answers]) -> Iterator[Panel]:
        """The masks of every artifact and the labelled ones, in the same colours."""
        for name, each in answers.items():
            found = self._masks(each, index).above(self._head.threshold)
            width, height = (int(side) for side in each.columns[SIZE][index])
            masks = np.array([runs.mask for runs in found.runs], np.bool_).reshape(-1, height, width)
            yield Panel(name, _picture(masks, found.classes))
        if data.truth is not None:
            known: Outlines = data.truth_at(index)
            yield Panel("label", _picture(known.masks(), known.classes))


def _joined(counts: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """The run lengths of all masks of an image in a row, and how many each has."""
    return {
        COUNTS: np.concatenate([np.zeros(0, np.int32), *counts]),
        LENGTHS: np.array([len(each) for each in counts], np.int64),
    }


def _picture(masks: np.ndarray, classes: np.ndarray) -> bytes:
    return thumbnail(np.asarray(instance_picture(masks, classes)))
