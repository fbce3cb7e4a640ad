"""Anomaly detection: agreement and AUROC of image scores and anomaly maps."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from vitdeploy.data import decoding, masks
from vitdeploy.progress import Progress
from vitdeploy.runtime.tasks.anomaly import (
    ANOMALY_MAP,
    DISTANCES,
    AnomalySpec,
    anomaly_map,
    draw_heat,
    heat_limits,
    image_score,
    plane_of,
    smoothed,
)
from vitdeploy.tasks import adapter, images
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.verification import comparison, intervals, ranking, records
from vitdeploy.verification.changes import Changes, judged

# --- Compares the anomaly scores of an artifact with the original's, and both with the labels -------------------------
# The pixel AUROC weights all pixels of all images equally, as in MVTec AD.


Bools = ranking.Bools
# Number of steps between the least and the largest pixel score; scores in the same step count as equal.
STEPS = 2048
# The comparison fields set by `_measured`.
IMAGE_FIELDS = ("value", "reference_value", "auroc_ci95", "reference_auroc_ci95", "drop", "drop_ci95")
PIXEL_FIELDS = (
    "pixel_auroc",
    "reference_pixel_auroc",
    "pixel_auroc_ci95",
    "reference_pixel_auroc_ci95",
    "pixel_drop",
    "pixel_drop_ci95",
)


@dataclass(frozen=True, kw_only=True)
class AnomalyComparison(comparison.Comparison):
    """An anomaly model against the original. The metric is the AUROC of images in percent.

    agreement: percent of the images that both call anomalous, or both normal. All AUROC intervals are bootstraps over
        the images, stratified by good and defective, and no narrower than that of a proportion with as many independent
        trials as there are images.
    auroc_ci95, reference_auroc_ci95: of `value` and `reference_value`.
    pixel_auroc ...: the same for pixels, in percent, with the drop in points. None without masks.
    score_difference_mean: mean |score - original's score| in percent of the original's.
    anomalous, reference_anomalous: images classified as anomalous.
    """

    auroc_ci95: tuple[float, float] | None = None
    reference_auroc_ci95: tuple[float, float] | None = None
    pixel_auroc: float | None = None
    pixel_auroc_ci95: tuple[float, float] | None = None
    reference_pixel_auroc: float | None = None
    reference_pixel_auroc_ci95: tuple[float, float] | None = None
    pixel_drop: float | None = None
    pixel_drop_ci95: tuple[float, float] | None = None
    score_difference_mean: float
    anomalous: int
    reference_anomalous: int


@dataclass(frozen=True)
class PixelCounts:
    """The number of pixels per image and score step: float64 [images, STEPS], for defects and for the rest."""

    defective: intervals.Floats
    good: intervals.Floats


def count_pixels(maps: Iterable[tuple[np.ndarray, Bools]], limits: tuple[float, float]) -> PixelCounts:
    """Count the scores of maps [height, width] in STEPS steps between these limits, separated by their masks. Pixels
    that the model does not see (NaN) count as the least score: an app treats them as normal."""
    low, high = limits
    factor = STEPS / ((high - low) or 1.0)
    rows: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for scores, mask in maps:
        steps = ((np.nan_to_num(scores, nan=low) - low) * factor).astype(np.int64).clip(0, STEPS - 1)
        for row, chosen in zip(rows, (mask, ~mask), strict=True):
            row.append(np.bincount(steps[chosen], minlength=STEPS).astype(np.uint32))
    defective, good = (np.stack(row).astype(np.float64) for row in rows)
    return PixelCounts(defective, good)


def compare_anomalies(
    artifact: intervals.Floats,
    reference: intervals.Floats,
    *,
    threshold: float,
    max_difference: float,
    defective: Bools | None = None,
    pixels: tuple[PixelCounts, PixelCounts] | None = None,
) -> AnomalyComparison:
    """Compare scores [n] of the same images, in the same order.

    Args:
        defective: the labels of the images, or None.
        pixels: counts for the artifact and the original.
        max_difference: of the raw outputs, passed on.
    """
    ours, theirs = artifact > threshold, reference > threshold
    n = len(reference)
    measured: comparison.Fields = {}
    if defective is not None:
        weights = ranking.stratified_draws(defective, 0)
        measured = _of_images(artifact, reference, defective, weights)
        measured |= {} if pixels is None else _of_pixels(*pixels, weights)
    return AnomalyComparison(
        n=n,
        metric=None if defective is None else "image AUROC",
        **comparison.counted_agreement(int((ours == theirs).sum()), n),
        agreement_of="images with the original's verdict (anomalous or normal)",
        max_difference=max_difference,
        score_difference_mean=100 * float((np.abs(artifact - reference) / np.maximum(reference, 1e-12)).mean()),
        anomalous=int(ours.sum()),
        reference_anomalous=int(theirs.sum()),
        **measured,
    )


def _of_images(
    ours: intervals.Floats, theirs: intervals.Floats, defective: Bools, weights: intervals.Floats
) -> comparison.Fields:
    values = [ranking.auroc(scores, defective) for scores in (ours, theirs)]
    drawn = [ranking.auroc_of_counts(*ranking.counted(each, defective, weights)) for each in (ours, theirs)]
    right = [_placed(scores, defective) for scores in (ours, theirs)]
    return dict(zip(IMAGE_FIELDS, _measured(values, drawn, right), strict=True))


def _of_pixels(ours: PixelCounts, theirs: PixelCounts, weights: intervals.Floats) -> comparison.Fields:
    sides = (ours, theirs)
    values = [float(ranking.auroc_of_counts(*(each.sum(0)[None] for each in (s.defective, s.good)))[0]) for s in sides]
    drawn = [ranking.auroc_of_counts(weights @ side.defective, weights @ side.good) for side in sides]
    every = np.ones(weights.shape[1], np.bool_)
    return dict(zip(PIXEL_FIELDS, _measured(values, drawn, (every, every)), strict=True))


def _measured(values: Sequence[float], drawn: Sequence[intervals.Floats], right: Sequence[Bools]) -> tuple[object, ...]:
    """Return both AUROCs in percent, their intervals, the drop in points and its interval; the artifact's first.
    `right`: for both sides, which images count as right."""
    n, drop = len(right[0]), 100 * (values[1] - values[0])
    shares = [
        intervals.percentile_interval(100 * value, 100 * each, intervals.least_of_share(value, n), (0.0, 100.0))
        for value, each in zip(values, drawn, strict=True)
    ]
    least = intervals.least_of_difference(right[1], right[0])
    spread = intervals.percentile_interval(drop, 100 * (drawn[1] - drawn[0]), least, (-100.0, 100.0))
    return 100 * values[0], 100 * values[1], *shares, drop, spread


def _placed(scores: intervals.Floats, defective: Bools) -> Bools:
    """Whether each image is ranked correctly against more than half of the images of the other kind."""
    good, bad = np.sort(scores[~defective]), np.sort(scores[defective])
    above_good = np.searchsorted(good, scores, "left") / len(good)
    below_bad = 1 - np.searchsorted(bad, scores, "right") / len(bad)
    return np.where(defective, above_good, below_bad) > 0.5


def anomaly_changes(
    artifact: intervals.Floats, reference: intervals.Floats, threshold: float, defective: Bools | None
) -> Changes:
    """Return the changed images: those that only one side classifies as anomalous; larger score changes are worse."""
    ours, theirs = artifact > threshold, reference > threshold
    moved = np.abs(artifact - reference) / max(threshold, 1e-12)
    if defective is None:
        return judged(ours != theirs, moved)
    return judged(ours != theirs, moved, ours == defective, theirs == defective)


# --- Anomalies --------------------------------------------------------------------------------------------------------
# scores per image and pixel, AUROC of both, and the share of images with the same verdict.


CHANCE = 50.0


class AnomalyAdapter(adapter.ImageAdapter):
    kinds = ("mvtec", "none")
    compared = AnomalyComparison
    metrics = (
        Metric(
            "image AUROC",
            "Image AUROC is the chance that a defective image has a higher score than a good one; 50 % is guessing.",
            words="image AUROC",
            title="Image AUROC",
        ),
    )
    measures = (
        Measure("Image AUROC, %", "value", interval="auroc_ci95"),
        Measure("of the original, %", "reference_value", interval="reference_auroc_ci95"),
        Measure("Pixel AUROC, %", "pixel_auroc", interval="pixel_auroc_ci95"),
        Measure("Pixel AUROC of the original, %", "reference_pixel_auroc", interval="reference_pixel_auroc_ci95"),
        Measure("Drop of pixel AUROC", "pixel_drop", interval="pixel_drop_ci95"),
        Measure("Classified as anomalous", "anomalous", 0, original=True),
        Measure("Score difference, %, mean", "score_difference_mean", None),
    )
    guard = 95.0
    score = "the score, with the threshold at 50 %"
    head: AnomalySpec

    def find(self, choice: adapter.DataChoice, skipped: decoding.Skipped | None = None) -> images.FoundData:
        if choice.labels == "none":
            return super().find(choice, skipped)
        normal, test = masks.read_mvtec(choice.path, skipped)
        return images.FoundData(masks.split_mvtec(choice.path, normal, test, **choice.numbers), test, test.annotations)

    def calibration(self, choice: adapter.DataChoice, *, skip_bad: bool, progress: Progress) -> adapter.Calibration:
        """Only the normal images of MVTec AD's folders: test images are for evaluation."""
        chosen = dataclasses.replace(choice, path=masks.normal_folder(choice.path))
        return super().calibration(chosen, skip_bad=skip_bad, progress=progress)

    def compare(self, ours: records.Answers, reference: records.Answers, data: adapter.Data) -> comparison.Comparison:
        counts = (self._counts(ours, data), self._counts(reference, data))
        return compare_anomalies(
            self._scores(ours),
            self._scores(reference),
            threshold=self.head.threshold,
            max_difference=adapter.worst_difference(ours, reference, [_plane(ours)]),
            defective=_defective(data),
            pixels=None if counts[0] is None or counts[1] is None else (counts[0], counts[1]),
        )

    def _scores(self, answers: records.Answers) -> np.ndarray:
        rows = range(len(answers))
        return np.array([image_score(answers.outputs(row)) for row in rows], np.float64)

    def _counts(self, answers: records.Answers, data: adapter.Data) -> PixelCounts | None:
        """Return the counts for all evaluation images; None without masks."""
        annotations = data.truths()
        if annotations is None or any(truth.defect is not None and truth.mask is None for truth in annotations):
            return None
        planes = answers.columns[_plane(answers)]
        limits = min(float(plane.min()) for plane in planes), max(float(each.max()) for each in planes)
        maps = ((self._map(answers, index), each.load()) for index, each in enumerate(annotations))
        return count_pixels(maps, limits)

    def _map(self, answers: records.Answers, index: int) -> np.ndarray:
        return anomaly_map(answers.outputs(index), answers.size(index), self.setting.images, self.head)

    def doubt(self, reference: records.Answers, data: adapter.Data, found: comparison.Comparison) -> str | None:
        assert isinstance(found, AnomalyComparison)
        interval = found.reference_auroc_ci95
        if interval is None or interval[1] >= CHANCE:
            return None
        return (
            f"the original's image AUROC is {found.reference_value:.1f} %, and chance is {CHANCE:g} %: it scores good "
            "parts higher than defective ones. Check that the folders below test are not swapped"
        )

    def changes(self, ours: records.Answers, reference: records.Answers, data: adapter.Data) -> Changes:
        return anomaly_changes(self._scores(ours), self._scores(reference), self.head.threshold, _defective(data))

    def certainty(self, answers: records.Answers) -> np.ndarray:
        """Return the distance of the score from the threshold, relative to the larger of the two."""
        scores = self._scores(answers)
        return np.asarray(np.abs(scores - self.head.threshold) / np.maximum(scores, self.head.threshold))

    def show(self, answers: records.Answers, index: int, labels: Sequence[str] | None) -> Said:
        """Return the verdict; the score is relative to twice the threshold."""
        score, threshold = image_score(answers.outputs(index)), self.head.threshold
        share = min(max(score / (2 * threshold), 0.0), 1.0) if threshold > 0 else None
        return Said("anomalous" if score > threshold else "normal", share)

    def truth_line(self, truth: images.OfTask, labels: Sequence[str] | None) -> str:
        return str(truth.defect or "good")

    def panels(self, data: adapter.Data, index: int, answers: Mapping[str, records.Answers]) -> adapter.Panels:
        """Yield the map of every artifact over the image as the model sees it, and the defect mask."""
        pixels = np.broadcast_to(self.pixels(data)[index][0], (*self.setting.images.crop, 3))
        image, limits = Image.fromarray(np.ascontiguousarray(pixels)), heat_limits(self.head.pixel_threshold)
        for name, each in answers.items():
            plane = smoothed(plane_of(each.outputs(index)), pixels.shape[:2], self.head.sigma)
            yield name, adapter.thumbnail(np.asarray(draw_heat(image, plane, limits)))
        mask = None if data.truth is None else data.truth_at(index).load()
        if mask is not None and mask.any():
            yield "label", adapter.thumbnail((255 * mask).astype(np.uint8)[..., None])


def _plane(answers: records.Answers) -> str:
    """Return the name of the output that is the map."""
    return DISTANCES if DISTANCES in answers.columns else ANOMALY_MAP


def _defective(data: adapter.Data) -> np.ndarray | None:
    """Whether each evaluation image shows a defect, bool [n]; None without labels."""
    known = data.truths()
    return None if known is None else np.array([annotation.defect is not None for annotation in known], np.bool_)
