"""Instance segmentation: objects with masks, COCO's mAP of masks, and whether the same objects are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vitdeploy.data.classes import match_categories
from vitdeploy.data.instances import Outlines, read_instances
from vitdeploy.data.pixels import Skipped
from vitdeploy.document.answers import Said
from vitdeploy.runtime.drawing import instance_picture
from vitdeploy.runtime.instances import segment_instances
from vitdeploy.runtime.postprocess import label_of
from vitdeploy.runtime.run_lengths import RunLengths
from vitdeploy.spec import InstanceSpec
from vitdeploy.tasks.adapter import Data, DataChoice, Found, Panel, thumbnail
from vitdeploy.tasks.counted import CountedKit
from vitdeploy.tasks.detection import listed
from vitdeploy.tasks.drawn import drawn
from vitdeploy.verification.changes import Changes
from vitdeploy.verification.collect import SIZE, Answers
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.counts import Counts
from vitdeploy.verification.differences import differences, worst_of
from vitdeploy.verification.instances import Masks, instance_changes, instance_comparison, instance_records
from vitdeploy.verification.records import Records

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
