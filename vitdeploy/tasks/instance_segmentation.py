"""Instance segmentation: objects with masks, COCO's mask mAP, and agreement on the objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitdeploy.data import decoding, detection
from vitdeploy.data.annotations import AnnotatedSet
from vitdeploy.runtime.masks import RunLengths
from vitdeploy.runtime.postprocess import label_of
from vitdeploy.runtime.tasks.instance_segmentation import InstanceSpec, instance_picture, overlaps, segment_instances
from vitdeploy.tasks.adapter import Data, DataChoice, Panels, thumbnail
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.tasks.detection import PRECISIONS, SCORE_DIFFERENCE, ObjectAdapter, listed
from vitdeploy.tasks.images import OfTask, drawn
from vitdeploy.verification.average_precision import Matched, match_entries
from vitdeploy.verification.detection import DetectionComparison
from vitdeploy.verification.records import SIZE, Answers


@dataclass(frozen=True)
class Masks:
    """Detected instances of one image: classes int64 [k], scores float64 [k], and a mask for each."""

    classes: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    runs: tuple[RunLengths, ...]

    def above(self, threshold: float) -> Masks:
        """Return the instances with a score of at least `threshold`."""
        kept = np.flatnonzero(self.scores >= threshold)
        return Masks(self.classes[kept], self.scores[kept], tuple(self.runs[i] for i in kept))

    def overlaps(self, other: Masks) -> npt.NDArray[np.float64]:
        """Return the IoU with each of `other`: float64 [k, others]."""
        return overlaps(self.runs, other.runs)


@dataclass(frozen=True, kw_only=True)
class InstanceComparison(DetectionComparison):
    """Instances against the original's: as detections, with the IoU of masks instead of boxes. The metric is COCO's mAP
    of masks."""

    objects: int = field(metadata={"alias": "instances"})
    iou_mean: float | None = field(metadata={"alias": "mask_iou_mean"})
    WORDS = ("mask mAP", "mAP of masks", "instances", "mask IoU")


def match_masks(predicted: Sequence[Masks], truth: Sequence[detection.Outlines]) -> Matched:
    """Return matches by IoU of masks, for all classes detected or labelled."""
    images = [{"width": outlines.size[0], "height": outlines.size[1]} for outlines in truth]
    labelled = [
        [
            {"category_id": c, "segmentation": outline, "area": 0.0, "iscrowd": int(crowd)}
            for c, outline, crowd in zip(known.classes.tolist(), known.outlines, known.crowd.tolist(), strict=True)
        ]
        for known in truth
    ]
    detections = [
        [
            {"category_id": c, "segmentation": runs.to_dict(), "area": runs.area, "iscrowd": 0, "score": score}
            for c, score, runs in zip(masks.classes.tolist(), masks.scores.tolist(), masks.runs, strict=True)
        ]
        for masks in predicted
    ]
    return match_entries(images, labelled, detections, "segm")


CLASSES, SCORES, COUNTS, LENGTHS = "classes", "scores", "counts", "lengths"
RAW = ("class_logits", "masks")
# The most instances kept per image (COCO counts no more per class), and their least score: masks of all queries take
# seconds, and lower scores hardly change mAP.
KEPT, LEAST_SCORE = 100, 0.01
# Numbers kept from each raw output, for the largest difference.
NUMBERS = 1 << 12


class InstanceSegmentationAdapter(ObjectAdapter):
    finer = 8
    kinds = ("coco", "none")
    compared = InstanceComparison
    changed_when = (
        "An answer has changed if an instance has no match among the original’s with its class and a mask IoU of 0.5 "
        "or more, or vice versa."
    )
    metrics = (
        Metric(
            "mask mAP",
            "Mask mAP is COCO’s: the mean over IoU 0.50 to 0.95 and over the classes, for the best 100 instances per "
            "image with a score of 0.01 or more.",
            title="Mask mAP",
        ),
    )
    measures = (
        *PRECISIONS,
        Measure("Instances of the original", "objects", 0),
        Measure("Mask IoU of matched pairs, mean", "iou_mean", 4),
        SCORE_DIFFERENCE,
    )
    score = "the highest instance score"
    head: InstanceSpec

    def read(self, choice: DataChoice, place: Path, skipped: decoding.Skipped | None) -> AnnotatedSet[OfTask]:
        return detection.read_instances(choice.path, place, skipped)

    def match(self, objects: Sequence[OfTask], truth: Sequence[OfTask]) -> Matched:
        return match_masks(objects, truth)

    def raw(self, answers: Answers) -> Sequence[str]:
        return RAW

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Return the instances with their masks as joined run lengths, and some of the raw numbers."""
        head = dataclasses.replace(self.head, threshold=min(self.head.threshold, LEAST_SCORE))
        objects = segment_instances(outputs, size, self.setting.images, head, None, KEPT).objects
        counts = [each.runs.counts for each in objects]
        return {
            **{name: drawn(outputs[name], NUMBERS) for name in RAW},
            CLASSES: np.array([each.index for each in objects], np.int64),
            SCORES: np.array([each.score for each in objects], np.float64),
            **_joined(counts),
            SIZE: np.array(size, np.int64),
        }

    def objects(self, answers: Answers, threshold: float = 0.0) -> list[Masks]:
        return [self._masks(answers, i).above(threshold) for i in range(len(answers))]

    def _masks(self, answers: Answers, index: int) -> Masks:
        column, size = answers.outputs(index), answers.size(index)
        ends = np.cumsum(column[LENGTHS])[:-1]
        parts = np.split(column[COUNTS], ends) if len(column[LENGTHS]) else []
        return Masks(column[CLASSES], column[SCORES], tuple(RunLengths(size, part) for part in parts))

    def moved(self, answers: Answers, order: Sequence[int], reference: Answers) -> Answers:
        found = super().moved(answers, order, reference)
        sizes = [tuple(size) for size in np.stack(answers.columns[SIZE]).tolist()]
        if len(set(sizes)) == 1:
            return found
        counts = [
            [each.resized(size).counts for each in self._masks(answers, index).runs]
            for index, size in zip(order, sizes, strict=True)
        ]
        runs = [_joined(count) for count in counts]
        return Answers({**found.columns, **{name: [each[name] for each in runs] for name in (COUNTS, LENGTHS)}})

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        found = self._masks(answers, index).above(self.head.threshold)
        score = float(found.scores[0]) if len(found.scores) else None
        return Said(listed([label_of(int(c), labels) for c in found.classes]), score)

    def panels(self, data: Data, index: int, answers: Mapping[str, Answers]) -> Panels:
        """Yield the masks of every artifact and the labelled ones, in the same colours."""
        for name, each in answers.items():
            found = self._masks(each, index).above(self.head.threshold)
            width, height = each.size(index)
            masks = np.array([runs.mask for runs in found.runs], np.bool_).reshape(-1, height, width)
            yield name, _picture(masks, found.classes)
        if data.truth is not None:
            known: detection.Outlines = data.truth_at(index)
            yield "label", _picture(known.masks(), known.classes)


def _joined(counts: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    """Return the concatenated run lengths of all masks of an image, and the number per mask."""
    return {
        COUNTS: np.concatenate([np.zeros(0, np.int32), *counts]),
        LENGTHS: np.array([len(count) for count in counts], np.int64),
    }


def _picture(masks: np.ndarray, classes: np.ndarray) -> bytes:
    return thumbnail(np.asarray(instance_picture(masks, classes)))
