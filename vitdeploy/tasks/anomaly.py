"""Anomalies: a score for each image and each pixel, AUROC of both, and the share of images that keep their verdict."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vitdeploy.data.mvtec import normal_folder, read_mvtec, split_mvtec
from vitdeploy.data.pixels import Skipped
from vitdeploy.document.answers import Said
from vitdeploy.progress import Progress
from vitdeploy.runtime.anomaly import anomaly_map, image_score, plane_of, smoothed
from vitdeploy.runtime.drawing import draw_heat, heat_limits
from vitdeploy.spec import AnomalySpec
from vitdeploy.spec.anomaly import ANOMALY_MAP, DISTANCES
from vitdeploy.tasks.adapter import (
    Calibration,
    Data,
    DataChoice,
    Found,
    ImageKit,
    Panel,
    thumbnail,
    worst_difference,
)
from vitdeploy.verification.anomaly import (
    AnomalyComparison,
    PixelCounts,
    anomaly_changes,
    compare_anomalies,
    count_pixels,
)
from vitdeploy.verification.changes import Changes
from vitdeploy.verification.collect import SIZE, Answers
from vitdeploy.verification.comparison import Comparison

CHANCE = 50.0


class AnomalyKit(ImageKit):
    kinds = ("mvtec", "none")

    def find(self, choice: DataChoice, skipped: Skipped | None = None) -> Found:
        if choice.labels == "none":
            return super().find(choice, skipped)
        normal, test = read_mvtec(choice.path, skipped)
        return Found(split_mvtec(choice.path, normal, test, **choice.numbers), test, test.annotations)

    def calibration(self, choice: DataChoice, *, skip_bad: bool, progress: Progress) -> Calibration:
        """Of MVTec AD's folders the normal images alone: those of test are to judge by."""
        chosen = dataclasses.replace(choice, path=normal_folder(choice.path))
        return super().calibration(chosen, skip_bad=skip_bad, progress=progress)

    @property
    def _head(self) -> AnomalySpec:
        assert isinstance(self.setting.postprocess, AnomalySpec)
        return self.setting.postprocess

    def compare(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        counts = (self._counts(ours, data), self._counts(reference, data))
        return compare_anomalies(
            self._scores(ours),
            self._scores(reference),
            threshold=self._head.threshold,
            max_difference=worst_difference(ours, reference, [_plane(ours)]),
            defective=_defective(data),
            pixels=None if counts[0] is None or counts[1] is None else (counts[0], counts[1]),
        )

    def _scores(self, answers: Answers) -> np.ndarray:
        rows = range(len(answers))
        return np.array([image_score(self._outputs(answers, row)) for row in rows], np.float64)

    def _outputs(self, answers: Answers, index: int) -> dict[str, np.ndarray]:
        return {name: column[index] for name, column in answers.columns.items() if name != SIZE}

    def _counts(self, answers: Answers, data: Data) -> PixelCounts | None:
        """Of all evaluation images; None without masks."""
        annotations = data.truths()
        if annotations is None or any(each.defect is not None and each.mask is None for each in annotations):
            return None
        planes = answers.columns[_plane(answers)]
        limits = min(float(each.min()) for each in planes), max(float(each.max()) for each in planes)
        maps = ((self._map(answers, index), each.load()) for index, each in enumerate(annotations))
        return count_pixels(maps, limits)

    def _map(self, answers: Answers, index: int) -> np.ndarray:
        width, height = (int(side) for side in answers.columns[SIZE][index])
        return anomaly_map(self._outputs(answers, index), (width, height), self.setting.images, self._head)

    def doubt(self, reference: Answers, data: Data, found: Comparison) -> str | None:
        assert isinstance(found, AnomalyComparison)
        interval = found.reference_auroc_ci95
        if interval is None or interval[1] >= CHANCE:
            return None
        return (
            f"the original's image AUROC is {found.reference_value:.1f} %, and chance is {CHANCE:g} %: good parts look "
            "stranger to it than defective ones. Are the folders of test the right way round?"
        )

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        return anomaly_changes(self._scores(ours), self._scores(reference), self._head.threshold, _defective(data))

    def certainty(self, answers: Answers) -> np.ndarray:
        """How far the score is from the threshold, as a share of the larger of both."""
        scores = self._scores(answers)
        return np.asarray(np.abs(scores - self._head.threshold) / np.maximum(scores, self._head.threshold))

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        """The verdict; the score as a share of twice the threshold."""
        score, threshold = image_score(self._outputs(answers, index)), self._head.threshold
        share = min(max(score / (2 * threshold), 0.0), 1.0) if threshold > 0 else None
        return Said("anomalous" if score > threshold else "normal", share)

    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        if data.truth is None:
            return None
        return str(data.truth_at(index).defect or "good")

    def panels(self, data: Data, index: int, answers: Mapping[str, Answers]) -> Iterator[Panel]:
        """The map of every artifact over the image as the model sees it, and the mask of the defect."""
        from PIL import Image

        pixels = np.broadcast_to(self.pixels(data)[index][0], (*self.setting.images.crop, 3))
        image, limits = Image.fromarray(np.ascontiguousarray(pixels)), heat_limits(self._head.pixel_threshold)
        for name, each in answers.items():
            plane = smoothed(plane_of(self._outputs(each, index)), pixels.shape[:2], self._head.sigma)
            yield Panel(name, thumbnail(np.asarray(draw_heat(image, plane, limits))))
        mask = None if data.truth is None else data.truth_at(index).load()
        if mask is not None and mask.any():
            yield Panel("label", thumbnail((255 * mask).astype(np.uint8)[..., None]))


def _plane(answers: Answers) -> str:
    """The output that is the map."""
    return DISTANCES if DISTANCES in answers.columns else ANOMALY_MAP


def _defective(data: Data) -> np.ndarray | None:
    """Whether each evaluation image shows a defect, bool [n]; None without labels."""
    known = data.truths()
    return None if known is None else np.array([each.defect is not None for each in known], np.bool_)
