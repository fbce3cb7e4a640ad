"""Panoptic segmentation: every pixel a segment, panoptic quality, and whether images are cut the same way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vitdeploy.data.classes import match_categories
from vitdeploy.data.panoptic import PanopticMap, read_panoptic
from vitdeploy.data.pixels import Skipped
from vitdeploy.document.answers import Said
from vitdeploy.runtime.panoptic import segment
from vitdeploy.runtime.postprocess import label_of
from vitdeploy.spec import PostprocessSpec
from vitdeploy.tasks.adapter import Data, DataChoice, Found, ImageKit, with_maps_of, worst_difference
from vitdeploy.tasks.detection import listed
from vitdeploy.verification.changes import Changes, map_changes
from vitdeploy.verification.collect import Answers
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.panoptic import compare_panoptic
from vitdeploy.verification.plausible import doubt_value

MAP, SEGMENTS = "map", "segments"


class PanopticKit(ImageKit):
    kinds = ("panoptic", "none")

    def find(self, choice: DataChoice, skipped: Skipped | None = None) -> Found:
        if choice.annotations is None or choice.labels == "none":
            return super().find(choice, skipped)
        found = read_panoptic(choice.path, choice.annotations, skipped)
        used = {category for each in found.annotations.values() for category in each.segments.values()}
        mapping = match_categories(found.categories, used, self.setting.labels, self.setting.classes)
        truth = {path: (annotation, mapping.index) for path, annotation in found.annotations.items()}
        return Found(found.split(**choice.numbers), found, truth, mapping)

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """The map and its segments as rows of (id, class); the masks themselves would fill the disk."""
        assert isinstance(self.setting.postprocess, PostprocessSpec)
        found = segment(outputs, size, self.setting.images, self.setting.postprocess, None)
        rows = np.array([(each.id, each.index) for each in found.segments], np.int64).reshape(-1, 2)
        return {"logits": outputs["logits"], "boxes": outputs["boxes"], MAP: found.map, SEGMENTS: rows}

    def compare(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        assert isinstance(self.setting.postprocess, PostprocessSpec) and self.setting.classes is not None
        known = data.truths()
        truth = None if known is None else (annotation.load(mapping) for annotation, mapping in known)
        return compare_panoptic(
            _maps(ours),
            _maps(reference),
            truth,
            classes=self.setting.classes,
            things=self.setting.postprocess.things,
            max_difference=worst_difference(ours, reference, ["logits", "boxes"]),
        )

    def moved(self, answers: Answers, order: Sequence[int], reference: Answers) -> Answers:
        return with_maps_of(super().moved(answers, order, reference), MAP, reference)

    def doubt(self, reference: Answers, data: Data, found: Comparison) -> str | None:
        return doubt_value(found.metric, found.reference_value)

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        rows = answers.columns[SEGMENTS][index]
        return Said(listed([label_of(int(c), labels) for _, c in rows]), None)

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        return map_changes(list(_maps(ours)), list(_maps(reference)))

    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        if data.truth is None:
            return None
        annotation, mapping = data.truth_at(index)
        return listed([label_of(mapping[category], labels) for category in annotation.segments.values()])


def _maps(answers: Answers) -> Iterator[PanopticMap]:
    for ids, rows in zip(answers.columns[MAP], answers.columns[SEGMENTS], strict=True):
        yield PanopticMap(ids, {int(i): int(c) for i, c in rows})
