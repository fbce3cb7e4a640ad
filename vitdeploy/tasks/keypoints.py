"""Key points: agreement and COCO's OKS."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitdeploy.data import decoding, folder, keypoints
from vitdeploy.runtime.tasks.keypoints import HEATMAPS, KeypointSpec, in_image, locate
from vitdeploy.tasks.adapter import Data, DataChoice, ImageAdapter, thumbnail
from vitdeploy.tasks.answers import Marks, Measure, Metric, Said
from vitdeploy.verification import average_precision, comparison, detection, intervals, records
from vitdeploy.verification.changes import Changes, judged

# --- Compares a model's key points with the original's, and both with the labelled ones -------------------------------


Bools = npt.NDArray[np.bool_]

# Relative to the longer side of an object's box: a labelled point counts as found within the first (Yang and Ramanan,
# 2013, "Articulated human detection with flexible mixtures of parts", for whole bodies), as the original's within the
# second.
ALPHA, NEAR = 0.1, 0.05
OKS_AP, PCK = "OKS AP", f"PCK@{ALPHA:g}"


@dataclass(frozen=True)
class Points:
    """Predictions for n objects with k points: places float64 [n, k, 2], x and y in pixels; scores [n, k]."""

    places: intervals.Floats
    scores: intervals.Floats


@dataclass(frozen=True)
class PosedObjects:
    """The n objects: longer float64 [n], the longer sides of their boxes in pixels; image int64 [n], the index of each
    object's image; labels: their labels, or None."""

    longer: intervals.Floats
    image: npt.NDArray[np.int64]
    labels: Sequence[keypoints.LabelledObject] | None = None


@dataclass(frozen=True, kw_only=True)
class KeypointComparison(comparison.Comparison):
    """Key points against the original's. The metric is COCO's AP over OKS .50:.05:.95, with labelled boxes, or PCK@0.1
    if the deviations of the points are unknown; in percent.

    agreement: 200 m / (a + b) for the a and b points that artifact and original show (score >= `threshold`), m of which
        are shown by both and no further apart than 5 % of the longer side of the object's box; 100 if neither shows any
        (`points` is 0 then).
    points: b. distance_mean: between points that both show, in percent of that side (None without any).
    pck: percent of the labelled points found within 10 % of that side.
    max_difference: of the scores, which are the largest values of the heat maps.
    """

    threshold: float
    points: int
    distance_mean: float | None
    pck: float | None = None
    reference_pck: float | None = None
    oks_ap50: float | None = None
    reference_oks_ap50: float | None = None
    oks_ap75: float | None = None
    reference_oks_ap75: float | None = None


def compare_keypoints(
    artifact: Points, reference: Points, objects: PosedObjects, *, threshold: float
) -> KeypointComparison:
    """Compare the points of the artifact and of the original of the same objects, in the same order.

    Intervals resample images, not objects (`bootstrap`).

    Raises:
        ValueError: different shapes, or no object.
        MissingPackageError: OKS needs pycocotools, which is not installed.
    """
    if artifact.places.shape != reference.places.shape or not len(reference.places):
        raise ValueError(f"points {artifact.places.shape} against {reference.places.shape}")
    images = int(objects.image.max()) + 1
    weights = intervals.draws(images, 0)
    shown, paired, distance = _pairs(artifact, reference, objects.longer, threshold)
    matched = _by_image(paired.sum(axis=1), objects.image, images)
    total = _by_image(sum(each.sum(axis=1) for each in shown), objects.image, images)
    agreement = float(detection.shared(np.ones(images), matched, total))
    both = shown[0] & shown[1]
    accuracy = _accuracy(artifact, reference, objects, weights) if objects.labels is not None else {}
    worst = float(np.abs(artifact.scores - reference.scores).max())
    return KeypointComparison(
        n=len(reference.places),
        **comparison.resampled_agreement(agreement, detection.shared(weights, matched, total), int(total.sum()) // 2),
        agreement_of=f"points of score {threshold:g} or more within {100 * NEAR:g} % of the box's longer side",
        max_difference=worst / max(float(np.abs(reference.scores).max()), 1e-300),
        threshold=threshold,
        points=int(shown[1].sum()),
        distance_mean=100 * float(distance[both].mean()) if both.any() else None,
        **{"metric": None, **accuracy},
    )


def _pairs(
    artifact: Points, reference: Points, longer: intervals.Floats, threshold: float
) -> tuple[list[Bools], Bools, intervals.Floats]:
    """Return the points each side shows, which of them are at the same place, and all distances relative to
    `longer`."""
    distance = np.linalg.norm(artifact.places - reference.places, axis=2) / longer[:, None]
    shown = [side.scores >= threshold for side in (artifact, reference)]
    return shown, shown[0] & shown[1] & (distance <= NEAR), distance


def unpaired(
    artifact: Points, reference: Points, longer: intervals.Floats, threshold: float
) -> tuple[list[Bools], Bools]:
    """Return the points each side shows, bool [n, k] each, and which of them are at the same place on both."""
    shown, paired, _ = _pairs(artifact, reference, longer, threshold)
    return shown, paired


def _by_image(counts: np.ndarray, image: npt.NDArray[np.int64], images: int) -> intervals.Floats:
    return np.bincount(image, weights=counts, minlength=images).astype(np.float64)


def _accuracy(
    artifact: Points, reference: Points, objects: PosedObjects, weights: intervals.Floats
) -> comparison.Fields:
    assert objects.labels is not None
    truth = np.array([label.points for label in objects.labels], np.float64)
    known = truth[:, :, 2] > 0
    right = [
        (np.linalg.norm(side.places - truth[:, :, :2], axis=2) <= ALPHA * objects.longer[:, None]) & known
        for side in (artifact, reference)
    ]
    images = weights.shape[1]
    tried = _by_image(known.sum(axis=1), objects.image, images)
    found = [_by_image(side.sum(axis=1), objects.image, images) for side in right]
    pck, reference_pck = (100 * float(side.sum() / tried.sum()) for side in found)
    shares = {"pck": pck, "reference_pck": reference_pck}
    if objects.labels[0].sigmas is not None:
        return {**shares, **_oks(artifact, reference, objects, images)}
    with np.errstate(invalid="ignore"):
        spread = 100 * (weights @ (found[1] - found[0])) / (weights @ tried)
    accuracy = comparison.resampled_accuracy((pck, reference_pck), spread, [side[known] for side in right])
    return {**shares, "metric": PCK, **accuracy}


def _oks(artifact: Points, reference: Points, objects: PosedObjects, images: int) -> comparison.Fields:
    """As for detections; the score of an object is the mean over its points."""
    assert objects.labels is not None
    labelled: list[list[dict[str, object]]] = [[] for _ in range(images)]
    for each, image in zip(objects.labels, objects.image.tolist(), strict=True):
        assert each.box is not None
        left, top, right, bottom = each.box
        entry = {"category_id": 1, "bbox": [left, top, right - left, bottom - top], "area": each.area, "iscrowd": 0}
        flat = [value for point in each.points for value in point]
        seen = sum(visible > 0 for _, _, visible in each.points)
        labelled[image].append({**entry, "keypoints": flat, "num_keypoints": seen})
    matches = []
    for side in (artifact, reference):
        detections: list[list[dict[str, object]]] = [[] for _ in range(images)]
        for places, scores, image in zip(side.places, side.scores, objects.image.tolist(), strict=True):
            (left, top), (right, bottom) = places.min(axis=0), places.max(axis=0)
            box = [float(value) for value in (left, top, right - left, bottom - top)]
            entry = {"category_id": 1, "bbox": box, "area": box[2] * box[3], "iscrowd": 0}
            flat = np.concatenate([places, scores[:, None]], axis=1).ravel().tolist()
            detections[image].append({**entry, "keypoints": flat, "score": float(scores.mean())})
        matched = average_precision.match_entries(
            [{}] * images, labelled, detections, "keypoints", objects.labels[0].sigmas
        )
        matches.append(average_precision.matches_of(matched, images))
    return {"metric": OKS_AP, **detection.precision_fields(matches[0], matches[1], images, 0, "oks_")}


# --- Key points of one object: labelled points, COCO's OKS or PCK, and whether the points are at the same places ------


PLACES, SCORES, GRID = "places", "scores", "grid"
# Half the side of a point's mark, relative to the picture's sides.
MARK = 0.012


class KeypointsAdapter(ImageAdapter):
    kinds = ("coco", "none")
    compared = KeypointComparison
    metrics = (
        Metric(
            OKS_AP,
            "OKS AP is COCO’s key point AP: the mean over OKS 0.50 to 0.95, with labelled boxes.",
        ),
        Metric(
            PCK, "PCK@0.1 is the share of labelled points found within 10 % of the longer side of the object’s box."
        ),
    )
    measures = (
        Measure("PCK@0.1, %", "pck", original=True),
        Measure("AP at OKS 0.50, %", "oks_ap50", original=True),
        Measure("AP at OKS 0.75, %", "oks_ap75", original=True),
        Measure("Points of the original", "points", 0),
        Measure("Distance, % of the box, mean", "distance_mean", 3),
    )
    counts = "points"
    score = "the mean score of the points"
    head: KeypointSpec
    calibrated_on = "coco"

    def annotated(self, choice: DataChoice, place: Path, skipped: decoding.Skipped | None) -> keypoints.KeypointSet:
        return keypoints.read_keypoints(choice.path, place, self.setting.labels, self.setting.classes, skipped)

    def labelled(
        self, choice: DataChoice, count: int | None, skipped: decoding.Skipped | None
    ) -> tuple[folder.Sample, ...]:
        assert choice.annotations is not None
        found = self.annotated(choice, choice.annotations, skipped)
        images = found.to_calibrate(count, choice.seed)
        return tuple(each for image in images for each in found.annotations[image.path].objects)

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Return the points in heat map pixels; the maps of all images would not fit into memory."""
        maps = outputs[HEATMAPS]
        places, scores = locate(maps, self.head)
        return {
            PLACES: places,
            SCORES: scores,
            GRID: np.array(maps.shape[:0:-1], np.int64),
            records.SIZE: np.array(size),
        }

    def compare(self, ours: records.Answers, reference: records.Answers, data: Data) -> comparison.Comparison:
        boxes = self._boxes(ours, data)
        paths = {path: number for number, path in enumerate(dict.fromkeys(s.path for s in data.evaluation))}
        labels = [each for each in data.evaluation if isinstance(each, keypoints.LabelledObject)]
        objects = PosedObjects(
            _longer(boxes),
            np.array([paths[s.path] for s in data.evaluation]),
            labels if data.truth is not None else None,
        )
        return compare_keypoints(
            self._points(ours, boxes), self._points(reference, boxes), objects, threshold=self.head.threshold
        )

    def _boxes(self, answers: records.Answers, data: Data) -> np.ndarray:
        """Return the box of each sample, float64 [n, 4]; the whole image if it has none."""
        sizes = answers.stacked(records.SIZE).tolist()
        return np.array([s.box or (0, 0, *size) for s, size in zip(data.evaluation, sizes, strict=True)], np.float64)

    def _points(self, answers: records.Answers, boxes: np.ndarray) -> Points:
        """Return the points in image pixels."""
        columns = (answers.columns[name] for name in (PLACES, GRID, records.SIZE))
        places = [
            in_image(each, (int(grid[0]), int(grid[1])), (int(size[0]), int(size[1])), self.setting.images, tuple(box))
            for each, grid, size, box in zip(*columns, boxes.tolist(), strict=True)
        ]
        return Points(np.stack(places), answers.stacked(SCORES))

    def changes(self, ours: records.Answers, reference: records.Answers, data: Data) -> Changes:
        """Return the changed objects: those with a shown point without the same point at its place on the other side;
        the more such points, the worse."""
        boxes = self._boxes(ours, data)
        shown, paired = unpaired(
            self._points(ours, boxes), self._points(reference, boxes), _longer(boxes), self.head.threshold
        )
        lonely = ((shown[0] | shown[1]) & ~paired).mean(axis=1)
        return judged(lonely > 0, lonely)

    def certainty(self, answers: records.Answers) -> np.ndarray:
        return np.asarray(np.clip(answers.stacked(SCORES).mean(axis=1), 0, 1))

    def show(self, answers: records.Answers, index: int, labels: Sequence[str] | None) -> Said:
        scores = answers.columns[SCORES][index]
        shown = int((scores >= self.head.threshold).sum())
        return Said(f"{shown} of {len(scores)} points", float(np.clip(scores.mean(), 0, 1)))

    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        sample = data.evaluation[index]
        if not isinstance(sample, keypoints.LabelledObject):
            return None
        return f"{sum(visible > 0 for _, _, visible in sample.points)} of {len(sample.points)} points"

    def picture(self, data: Data, index: int) -> bytes:
        """Return the picture, large enough to distinguish points."""
        return thumbnail(self.pixels(data)[index][0], 288)

    def marks(self, engine: str, ours: records.Answers, reference: records.Answers, index: int) -> Marks:
        """Return a small box at each shown point: one for both (the artifact's) if they are at the same place."""
        one = [
            Points(each.columns[PLACES][index][None], each.columns[SCORES][index][None]) for each in (ours, reference)
        ]
        grid = np.asarray(ours.columns[GRID][index], np.float64)
        shown, paired = unpaired(one[0], one[1], np.array([float(grid.max())]), self.head.threshold)

        def boxes(places: np.ndarray, chosen: np.ndarray) -> tuple[tuple[float, float, float, float], ...]:
            at = places[chosen] / (grid - 1)
            corners = np.concatenate([at - MARK, at + MARK], axis=1).clip(0, 1).round(4)
            return tuple((a, b, c, d) for a, b, c, d in corners.tolist())

        a, b = (each.places[0] for each in one)
        return Marks(engine, boxes(a, paired[0]), boxes(a, (shown[0] & ~paired)[0]), boxes(b, (shown[1] & ~paired)[0]))


def _longer(boxes: np.ndarray) -> np.ndarray:
    """Return the longer side of each box, float64 [n]."""
    return np.asarray((boxes[:, 2:] - boxes[:, :2]).max(axis=1))
