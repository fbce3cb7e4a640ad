"""Monocular depth: a value for every pixel, delta-1 and AbsRel, and the share of pixels that keep their value."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vitdeploy.data.depth import read_depth
from vitdeploy.data.pixels import Skipped
from vitdeploy.document.answers import Said
from vitdeploy.runtime.depth import Depth, depth_of
from vitdeploy.runtime.drawing import depth_picture
from vitdeploy.spec import DepthSpec
from vitdeploy.tasks.adapter import Data, DataChoice, Found, Panel, thumbnail
from vitdeploy.tasks.counted import CountedKit
from vitdeploy.verification.changes import Changes
from vitdeploy.verification.collect import SIZE, Answers
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.counts import Counts
from vitdeploy.verification.depth import DepthError, depth_changes, depth_comparison, depth_error, depth_records
from vitdeploy.verification.differences import differences, worst_of
from vitdeploy.verification.records import Records

PLANE = "depth"


class DepthKit(CountedKit):
    finer = 8
    kinds = ("depth", "none")

    def find(self, choice: DataChoice, skipped: Skipped | None = None) -> Found:
        if choice.annotations is None or choice.labels == "none":
            return super().find(choice, skipped)
        found = read_depth(choice.path, choice.annotations, skipped)
        return Found(found.split(**choice.numbers), found, found.annotations)

    @property
    def _head(self) -> DepthSpec:
        assert isinstance(self.setting.postprocess, DepthSpec)
        return self.setting.postprocess

    def kept(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """The map as the model gives it, and the size of the image."""
        return {PLANE: outputs[PLANE], SIZE: np.array(size, np.int64)}

    def count(self, ours: Answers, reference: Answers, data: Data) -> Counts:
        errors = None
        if data.truth is not None:
            errors = (self._errors(ours, reference, data, i) for i in range(len(data.evaluation)))
        records = depth_records(ours.columns[PLANE], reference.columns[PLANE], errors, self._head.values)
        return records.with_tables(outputs=differences(ours, reference, [PLANE]))

    def comparison(self, counts: Counts) -> Comparison:
        assert isinstance(counts, Records)
        return depth_comparison(counts, max_difference=worst_of(counts["outputs"]))

    def _errors(
        self, ours: Answers, reference: Answers, data: Data, index: int
    ) -> tuple[DepthError, DepthError] | None:
        truth = self._truth(data, index)
        a, b = (depth_error(self._map(each, index), truth, self._head.values) for each in (ours, reference))
        return None if a is None or b is None else (a, b)

    def _map(self, answers: Answers, index: int) -> np.ndarray:
        """The depth at the original image's size."""
        width, height = (int(side) for side in answers.columns[SIZE][index])
        outputs = {PLANE: answers.columns[PLANE][index]}
        return depth_of(outputs, (width, height), self.setting.images, self._head)

    def _truth(self, data: Data, index: int) -> np.ndarray:
        annotation = data.truth_at(index)
        return np.asarray(annotation.load(self._head.values == "metric"))

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        return depth_changes(ours.columns[PLANE], reference.columns[PLANE], self._head.values)

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        low, median, high = Depth(answers.columns[PLANE][index], self._head.values).range
        unit = " m" if self._head.values == "metric" else ""
        return Said(f"{low:.2g} to {high:.2g}{unit}, median {median:.2g}{unit}", None)

    def panels(self, data: Data, index: int, answers: Mapping[str, Answers]) -> Iterator[Panel]:
        """The map of every artifact in the range of the first, and the measured depth; light is near."""
        near = {name: Depth(self._map(each, index), self._head.values).nearness for name, each in answers.items()}
        first = next(iter(near.values()))
        limits = float(np.nanmin(first)), float(np.nanmax(first))
        for name, each in near.items():
            yield Panel(name, thumbnail(np.asarray(depth_picture(each, limits))))
        if data.truth is not None:
            yield Panel("label", thumbnail(np.asarray(depth_picture(1 / self._truth(data, index)))))
