"""Detection: labelled boxes, COCO's mAP, and whether the same objects are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitdeploy.data.classes import match_categories
from vitdeploy.data.decoding import Skipped
from vitdeploy.data.detection import read_detection
from vitdeploy.runtime.detection import Detections, detect
from vitdeploy.runtime.geometry import input_window
from vitdeploy.runtime.postprocess import label_of
from vitdeploy.spec import PostprocessSpec
from vitdeploy.tasks.adapter import Data, DataChoice, Found, thumbnail
from vitdeploy.tasks.answers import Marks, Said
from vitdeploy.tasks.counted import CountedKit
from vitdeploy.verification.average_precision import Objects
from vitdeploy.verification.changes import Changes, Counts, object_changes
from vitdeploy.verification.comparison import Comparison, differences, worst_of
from vitdeploy.verification.detection import detection_comparison, detection_records, partners
from vitdeploy.verification.records import Answers, Records

SHOWN_OBJECTS = 4
# Boxes of a kind that are drawn on one picture.
MARKED = 24


class DetectionKit(CountedKit):
    kinds = ("yolo", "coco", "none")

    def find(self, choice: DataChoice, skipped: Skipped | None = None) -> Found:
        if choice.annotations is None or choice.labels == "none":
            return super().find(choice, skipped)
        kind: Any = choice.labels
        found = read_detection(choice.path, choice.annotations, kind, skipped)
        used = {int(c) for boxes in found.annotations.values() for c in boxes.classes}
        mapping = match_categories(found.categories, used, self.setting.labels, self.setting.classes)
        truth = {path: boxes.renumbered(mapping.index) for path, boxes in found.annotations.items()}
        return Found(found.split(**choice.numbers), found, truth, mapping)

    @property
    def _head(self) -> PostprocessSpec:
        assert isinstance(self.setting.postprocess, PostprocessSpec)
        return self.setting.postprocess

    def count(self, ours: Answers, reference: Answers, data: Data) -> Counts:
        truth = data.truths()
        names = self._head.comparable(name for name in ours.columns if name != "size")
        theirs = self._objects(reference)
        artifact = theirs if ours is reference else self._objects(ours)
        records = detection_records(artifact, theirs, truth, threshold=self._head.threshold)
        return records.with_tables(outputs=differences(ours, reference, names))

    def comparison(self, counts: Counts) -> Comparison:
        assert isinstance(counts, Records)
        worst = worst_of(counts["outputs"])
        return detection_comparison(counts, threshold=self._head.threshold, max_difference=worst)

    def _objects(self, answers: Answers) -> list[Objects]:
        """All that a model finds, whatever its score: mAP is of the whole ranking."""
        return [_to_objects(self._detect(answers, i, 0.0, None)) for i in range(len(answers))]

    def _detect(self, answers: Answers, index: int, threshold: float, labels: Sequence[str] | None) -> Detections:
        outputs = {name: column[index] for name, column in answers.columns.items() if name != "size"}
        width, height = (int(side) for side in answers.columns["size"][index])
        head = dataclasses.replace(self._head, threshold=threshold)
        return detect(outputs, (width, height), self.setting.images, head, labels)

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        return object_changes(self._seen(ours), self._seen(reference))

    def _seen(self, answers: Answers) -> list[Objects]:
        """What a user sees."""
        return [_to_objects(self._detect(answers, i, self._head.threshold, None)) for i in range(len(answers))]

    def marks(self, engine: str, ours: Answers, reference: Answers, index: int) -> Marks:
        """Boxes that both find, as the artifact has them, and those that one of the two finds alone."""
        threshold = self._head.threshold
        a, b = (_to_objects(self._detect(each, index, threshold, None)) for each in (ours, reference))
        both = partners(a, b)
        boxes = {
            "both": a.boxes[both[:, 0]],
            "artifact": np.delete(a.boxes, both[:, 0], axis=0),
            "original": np.delete(b.boxes, both[:, 1], axis=0),
        }
        width, height = (int(side) for side in ours.columns["size"][index])
        window = input_window((width, height), self.setting.images)
        start = np.array([window.left, window.top] * 2)
        extent = np.array([window.right - window.left, window.bottom - window.top] * 2)
        shares = {name: np.clip((found - start) / extent, 0, 1) for name, found in boxes.items()}
        marked = {name: tuple(map(tuple, found[:MARKED].round(4).tolist())) for name, found in shares.items()}
        return Marks(engine, **marked)

    def picture(self, data: Data, index: int) -> bytes:
        """The picture, large enough to distinguish boxes."""
        return thumbnail(self.pixels(data)[index][0], 288)

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        objects = self._detect(answers, index, self._head.threshold, labels).objects
        return Said(listed([found.label for found in objects]), objects[0].score if objects else None)

    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        if data.truth is None:
            return None
        return listed([label_of(int(c), labels) for c in data.truth_at(index).classes])


def _to_objects(found: Detections) -> Objects:
    return Objects(
        np.array([each.index for each in found.objects], np.int64),
        np.array([each.score for each in found.objects], np.float64),
        np.array([each.box for each in found.objects], np.float64).reshape(-1, 4),
    )


def listed(labels: Sequence[str]) -> str:
    """The classes with their counts, most frequent first: "3× person, 1× dog"."""
    counts = {label: labels.count(label) for label in dict.fromkeys(labels)}
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    more = f" and {len(ordered) - SHOWN_OBJECTS} more" if len(ordered) > SHOWN_OBJECTS else ""
    return ", ".join(f"{count}× {label}" for label, count in ordered[:SHOWN_OBJECTS]) + more or "nothing"
