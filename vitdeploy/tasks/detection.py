"""Object detection: labelled boxes, COCO's mAP, and agreement on the objects."""

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np

from vitdeploy.data import annotations, classes, decoding, detection
from vitdeploy.runtime import geometry, postprocess
from vitdeploy.runtime.tasks.detection import Detections, PostprocessSpec, detect
from vitdeploy.tasks import adapter, counted
from vitdeploy.tasks.answers import Marks, Measure, Metric, Said
from vitdeploy.tasks.images import FoundData, OfTask
from vitdeploy.verification.average_precision import Matched, Objects, match_boxes
from vitdeploy.verification.changes import Changes, Counts, object_changes
from vitdeploy.verification.comparison import Comparison, differences, worst_of
from vitdeploy.verification.detection import DetectionComparison, object_records, partners
from vitdeploy.verification.records import SIZE, Answers, Records

SHOWN_OBJECTS = 4
# The most boxes of each kind drawn on one picture.
MARKED = 24
PRECISIONS = (
    Measure("AP at IoU 0.50, %", "ap50", original=True),
    Measure("AP at IoU 0.75, %", "ap75", original=True),
)
SCORE_DIFFERENCE = Measure("Score difference, mean", "score_difference_mean", None)


class ObjectAdapter(counted.CountedAdapter):
    """The base class of tasks that find objects, with boxes or with masks."""

    compared: ClassVar[type[DetectionComparison]]
    head: OfTask  # has a threshold
    counts = "objects"

    @abstractmethod
    def read(
        self, choice: adapter.DataChoice, place: Path, skipped: decoding.Skipped | None
    ) -> annotations.AnnotatedSet[OfTask]:
        """Return the labelled objects of the images; arguments as for `find_annotated`."""

    @abstractmethod
    def match(self, objects: Sequence[OfTask], truth: Sequence[OfTask]) -> Matched:
        """Match the objects of images with the labelled ones."""

    @abstractmethod
    def objects(self, answers: Answers, threshold: float = 0.0) -> list[OfTask]:
        """Return a model's detections in each image, of any score, since mAP covers the whole ranking."""

    @abstractmethod
    def raw(self, answers: Answers) -> Sequence[str]:
        """Return the columns that can be compared number by number."""

    def find_annotated(self, choice: adapter.DataChoice, place: Path, skipped: decoding.Skipped | None) -> FoundData:
        found = self.read(choice, place, skipped)
        used = {int(c) for annotation in found.annotations.values() for c in annotation.classes}
        mapping = classes.match_categories(found.categories, used, self.setting.labels, self.setting.classes)
        truth = {path: each.renumbered(mapping.index) for path, each in found.annotations.items()}
        return FoundData(found.split(**choice.numbers), found, truth, mapping)

    def count(self, ours: Answers, reference: Answers, data: adapter.Data) -> Counts:
        theirs = self.objects(reference)
        artifact = theirs if ours is reference else self.objects(ours)
        records = object_records(artifact, theirs, data.truths(), self.match, threshold=self.head.threshold)
        return records.with_tables(outputs=differences(ours, reference, self.raw(ours)))

    def comparison(self, counts: Records) -> Comparison:
        worst = worst_of(counts["outputs"])
        return self.compared.of(counts, threshold=self.head.threshold, max_difference=worst)

    def changes(self, ours: Answers, reference: Answers, data: adapter.Data) -> Changes:
        """Return the changes among visible objects."""
        return object_changes(*(self.objects(each, self.head.threshold) for each in (ours, reference)))

    def truth_line(self, truth: OfTask, labels: Sequence[str] | None) -> str:
        return listed([postprocess.label_of(int(c), labels) for c in truth.classes])


class DetectionAdapter(ObjectAdapter):
    kinds = ("yolo", "coco", "none")
    compared = DetectionComparison
    changed_when = "An answer has changed if an object has no match of its class among the original’s, or vice versa."
    metrics = (Metric("mAP", "mAP is COCO’s: the mean over IoU 0.50 to 0.95 and over the classes."),)
    measures = (
        *PRECISIONS,
        Measure("Objects of the original", "objects", 0),
        Measure("IoU of matched pairs, mean", "iou_mean", 4),
        SCORE_DIFFERENCE,
    )
    score = "the highest object score"
    head: PostprocessSpec

    def read(
        self, choice: adapter.DataChoice, place: Path, skipped: decoding.Skipped | None
    ) -> annotations.AnnotatedSet[OfTask]:
        return detection.read_detection(choice.path, place, "yolo" if choice.labels == "yolo" else "coco", skipped)

    def match(self, objects: Sequence[OfTask], truth: Sequence[OfTask]) -> Matched:
        return match_boxes(objects, truth)

    def objects(self, answers: Answers, threshold: float = 0.0) -> list[Objects]:
        return [_to_objects(self.detect(answers, i, threshold, None)) for i in range(len(answers))]

    def raw(self, answers: Answers) -> list[str]:
        return self.head.comparable(name for name in answers.columns if name != SIZE)

    def detect(self, answers: Answers, index: int, threshold: float, labels: Sequence[str] | None) -> Detections:
        """Return the detections in the outputs for one image."""
        head = dataclasses.replace(self.head, threshold=threshold)
        return detect(answers.outputs(index), answers.size(index), self.setting.images, head, labels)

    def marks(self, engine: str, ours: Answers, reference: Answers, index: int) -> Marks:
        """Return the boxes that both find (the artifact's), and those that only one of the two finds."""
        threshold = self.head.threshold
        a, b = (_to_objects(self.detect(each, index, threshold, None)) for each in (ours, reference))
        both = partners(a, b)
        boxes = {
            "both": a.boxes[both[:, 0]],
            "artifact": np.delete(a.boxes, both[:, 0], axis=0),
            "original": np.delete(b.boxes, both[:, 1], axis=0),
        }
        window = geometry.input_window(ours.size(index), self.setting.images)
        start = np.array([window.left, window.top] * 2)
        extent = np.array([window.right - window.left, window.bottom - window.top] * 2)
        shares = {name: np.clip((found - start) / extent, 0, 1) for name, found in boxes.items()}
        marked = {name: tuple(map(tuple, found[:MARKED].round(4).tolist())) for name, found in shares.items()}
        return Marks(engine, **marked)

    def picture(self, data: adapter.Data, index: int) -> bytes:
        """Return the picture, large enough to distinguish boxes."""
        return adapter.thumbnail(self.pixels(data)[index][0], 288)

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        objects = self.detect(answers, index, self.head.threshold, labels).objects
        return Said(listed([found.label for found in objects]), objects[0].score if objects else None)


def _to_objects(found: Detections) -> Objects:
    return Objects(
        np.array([each.index for each in found.objects], np.int64),
        np.array([each.score for each in found.objects], np.float64),
        np.array([each.box for each in found.objects], np.float64).reshape(-1, 4),
    )


def listed(labels: Sequence[str]) -> str:
    """Return the classes with their counts, most frequent first: "3× person, 1× dog"."""
    counts = {label: labels.count(label) for label in dict.fromkeys(labels)}
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    more = f" and {len(ordered) - SHOWN_OBJECTS} more" if len(ordered) > SHOWN_OBJECTS else ""
    return ", ".join(f"{count}× {label}" for label, count in ordered[:SHOWN_OBJECTS]) + more or "nothing"
