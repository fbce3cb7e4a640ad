"""Key points of one object: labelled points, COCO's OKS or PCK, and whether the points are at the same places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from vitdeploy.data.folder import Sample
from vitdeploy.data.keypoints import LabelledObject, read_keypoints
from vitdeploy.data.pixels import Skipped
from vitdeploy.document.answers import Marks, Said
from vitdeploy.runtime.keypoints import in_image, locate
from vitdeploy.spec import HEATMAPS, KeypointSpec
from vitdeploy.tasks.adapter import Data, DataChoice, Found, ImageKit, thumbnail
from vitdeploy.verification.changes import Changes, judged
from vitdeploy.verification.collect import SIZE, Answers
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.keypoints import Objects, Points, compare_keypoints, unpaired
from vitdeploy.verification.plausible import doubt_value

PLACES, SCORES, GRID = "places", "scores", "grid"
# Half a side of the mark of a point, in shares of the picture's sides.
MARK = 0.012


class KeypointsKit(ImageKit):
    kinds = ("coco", "none")
    calibrated_on = "coco"

    def find(self, choice: DataChoice, skipped: Skipped | None = None) -> Found:
        if choice.annotations is None or choice.labels == "none":
            return super().find(choice, skipped)
        found = read_keypoints(choice.path, choice.annotations, self.setting.labels, self.setting.classes, skipped)
        return Found(found.split(**choice.numbers), found.images, found.images.annotations)

    def labelled(self, choice: DataChoice, count: int | None, skipped: Skipped | None) -> tuple[Sample, ...]:
        assert choice.annotations is not None
        setting = self.setting
        found = read_keypoints(choice.path, choice.annotations, setting.labels, setting.classes, skipped).images
        images = found.to_calibrate(count, choice.seed)
        return tuple(each for image in images for each in found.annotations[image.path].objects)

    @property
    def _head(self) -> KeypointSpec:
        assert isinstance(self.setting.postprocess, KeypointSpec)
        return self.setting.postprocess

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """The points in pixels of the heat maps; the maps of all images would not fit into memory."""
        maps = outputs[HEATMAPS]
        places, scores = locate(maps, self._head)
        return {PLACES: places, SCORES: scores, GRID: np.array(maps.shape[:0:-1], np.int64), SIZE: np.array(size)}

    def compare(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        boxes = self._boxes(ours, data)
        paths = {path: number for number, path in enumerate(dict.fromkeys(s.path for s in data.evaluation))}
        labels = [each for each in data.evaluation if isinstance(each, LabelledObject)]
        objects = Objects(
            _longer(boxes),
            np.array([paths[s.path] for s in data.evaluation]),
            labels if data.truth is not None else None,
        )
        return compare_keypoints(
            self._points(ours, boxes), self._points(reference, boxes), objects, threshold=self._head.threshold
        )

    def _boxes(self, answers: Answers, data: Data) -> np.ndarray:
        """float64 [n, 4]: of each sample, all of its image where it has none."""
        sizes = answers.stacked(SIZE).tolist()
        return np.array([s.box or (0, 0, *size) for s, size in zip(data.evaluation, sizes, strict=True)], np.float64)

    def _points(self, answers: Answers, boxes: np.ndarray) -> Points:
        """The points in pixels of the images."""
        columns = (answers.columns[name] for name in (PLACES, GRID, SIZE))
        places = [
            in_image(each, (int(grid[0]), int(grid[1])), (int(size[0]), int(size[1])), self.setting.images, tuple(box))
            for each, grid, size, box in zip(*columns, boxes.tolist(), strict=True)
        ]
        return Points(np.stack(places), answers.stacked(SCORES))

    def doubt(self, reference: Answers, data: Data, found: Comparison) -> str | None:
        return doubt_value(found.metric, found.reference_value)

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        """Changed objects: those with a shown point that has none of its name at its place on the other side; the more
        of the points, the worse."""
        boxes = self._boxes(ours, data)
        shown, paired = unpaired(
            self._points(ours, boxes), self._points(reference, boxes), _longer(boxes), self._head.threshold
        )
        lonely = ((shown[0] | shown[1]) & ~paired).mean(axis=1)
        return judged(lonely > 0, lonely)

    def certainty(self, answers: Answers) -> np.ndarray:
        return np.asarray(np.clip(answers.stacked(SCORES).mean(axis=1), 0, 1))

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        scores = answers.columns[SCORES][index]
        shown = int((scores >= self._head.threshold).sum())
        return Said(f"{shown} of {len(scores)} points", float(np.clip(scores.mean(), 0, 1)))

    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        sample = data.evaluation[index]
        if not isinstance(sample, LabelledObject):
            return None
        return f"{sum(visible > 0 for _, _, visible in sample.points)} of {len(sample.points)} points"

    def picture(self, data: Data, index: int) -> bytes:
        """The picture, large enough to distinguish points."""
        return thumbnail(self.pixels(data)[index][0], 288)

    def marks(self, engine: str, ours: Answers, reference: Answers, index: int) -> Marks:
        """A small box at each shown point: one for both where they are at the same place, the artifact's."""
        one = [
            Points(each.columns[PLACES][index][None], each.columns[SCORES][index][None]) for each in (ours, reference)
        ]
        grid = np.asarray(ours.columns[GRID][index], np.float64)
        shown, paired = unpaired(one[0], one[1], np.array([float(grid.max())]), self._head.threshold)

        def boxes(places: np.ndarray, chosen: np.ndarray) -> tuple[tuple[float, float, float, float], ...]:
            at = places[chosen] / (grid - 1)
            corners = np.concatenate([at - MARK, at + MARK], axis=1).clip(0, 1).round(4)
            return tuple((a, b, c, d) for a, b, c, d in corners.tolist())

        a, b = (each.places[0] for each in one)
        return Marks(engine, boxes(a, paired[0]), boxes(a, (shown[0] & ~paired)[0]), boxes(b, (shown[1] & ~paired)[0]))


def _longer(boxes: np.ndarray) -> np.ndarray:
    """float64 [n]: the longer side of each box."""
    return np.asarray((boxes[:, 2:] - boxes[:, :2]).max(axis=1))
