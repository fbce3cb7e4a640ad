"""Semantic segmentation: the class of every pixel, mIoU, and the share of pixels that keep their class."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vitdeploy.data.masks import read_masks, understood
from vitdeploy.data.pixels import Skipped
from vitdeploy.document.answers import Said
from vitdeploy.runtime.drawing import class_picture
from vitdeploy.runtime.postprocess import label_of
from vitdeploy.runtime.segmentation import NONE, areas, classes_of
from vitdeploy.spec import SegmentationSpec
from vitdeploy.tasks.adapter import Data, DataChoice, Found, Panel, thumbnail, with_maps_of
from vitdeploy.tasks.counted import CountedKit
from vitdeploy.tasks.drawn import drawn
from vitdeploy.verification.changes import Changes
from vitdeploy.verification.collect import Answers
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.counts import Counts
from vitdeploy.verification.differences import differences, worst_of
from vitdeploy.verification.records import Records
from vitdeploy.verification.segmentation import segmentation_changes, segmentation_comparison, segmentation_records

MAP = "map"
# Numbers of each raw output that are kept, for the largest difference.
KEPT = 1 << 12
SHOWN_CLASSES = 4


class SegmentationKit(CountedKit):
    finer = 8
    kinds = ("masks", "none")

    def find(self, choice: DataChoice, skipped: Skipped | None = None) -> Found:
        if choice.annotations is None or choice.labels == "none":
            return super().find(choice, skipped)
        assert self.setting.classes is not None
        labels, head = self.setting.labels, self._head
        found = read_masks(choice.path, choice.annotations, skipped)
        found = understood(found, labels, self.setting.classes, head.ignore, head.reduce_labels)
        return Found(found.split(**choice.numbers), found, found.annotations)

    @property
    def _head(self) -> SegmentationSpec:
        assert isinstance(self.setting.postprocess, SegmentationSpec)
        return self.setting.postprocess

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """The map, in the smallest type that holds it, and some of the raw numbers."""
        found = classes_of(outputs, size, self.setting.images, self._head)
        few = {name: drawn(output, KEPT) for name, output in outputs.items()}
        return {**few, MAP: found.astype(np.int16 if (self.setting.classes or 0) > 127 else np.int8)}

    def count(self, ours: Answers, reference: Answers, data: Data) -> Counts:
        assert self.setting.classes is not None
        truth = None if data.truth is None else (self._truth(data, i) for i in range(len(data.evaluation)))
        maps = ours.columns[MAP], reference.columns[MAP]
        outputs = differences(ours, reference, [name for name in ours.columns if name != MAP])
        return segmentation_records(*maps, truth, classes=self.setting.classes).with_tables(outputs=outputs)

    def comparison(self, counts: Counts) -> Comparison:
        assert isinstance(counts, Records) and self.setting.classes is not None
        worst = worst_of(counts["outputs"])
        return segmentation_comparison(counts, classes=self.setting.classes, max_difference=worst)

    def moved(self, answers: Answers, order: Sequence[int], reference: Answers) -> Answers:
        return with_maps_of(super().moved(answers, order, reference), MAP, reference)

    def _truth(self, data: Data, index: int) -> np.ndarray:
        assert self.setting.classes is not None
        annotation = data.truth_at(index)
        return np.asarray(annotation.load(self.setting.classes, self._head.ignore, self._head.reduce_labels))

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        return segmentation_changes(ours.columns[MAP], reference.columns[MAP])

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        found = areas(answers.columns[MAP][index].astype(np.int32), labels)
        more = [f"and {len(found) - SHOWN_CLASSES} more"] if len(found) > SHOWN_CLASSES else []
        return Said(
            ", ".join([*(f"{each.label} {100 * each.share:.0f} %" for each in found[:SHOWN_CLASSES]), *more]), None
        )

    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        if data.truth is None:
            return None
        known = np.unique(self._truth(data, index))
        return ", ".join(label_of(int(each), labels) for each in known[known != NONE][:8])

    def panels(self, data: Data, index: int, answers: Mapping[str, Answers]) -> Iterator[Panel]:
        """The image, the map of every artifact and the labelled one, in the same colours."""
        maps = {name: found.columns[MAP][index] for name, found in answers.items()}
        if data.truth is not None:
            maps["label"] = self._truth(data, index)
        for name, found in maps.items():
            yield Panel(name, thumbnail(np.asarray(class_picture(found.astype(np.int32)))))
