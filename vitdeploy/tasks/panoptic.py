"""Panoptic segmentation: agreement and quality of segments."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitdeploy.data import decoding, masks
from vitdeploy.data.classes import match_categories
from vitdeploy.errors import DataError
from vitdeploy.runtime.postprocess import label_of
from vitdeploy.runtime.tasks.detection import PostprocessSpec
from vitdeploy.runtime.tasks.panoptic import segment
from vitdeploy.tasks import adapter, detection, images
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.verification.changes import Changes, class_map, pixel_changes
from vitdeploy.verification.comparison import Comparison, Fields, resampled_accuracy, resampled_agreement
from vitdeploy.verification.intervals import Floats, draws
from vitdeploy.verification.records import Answers

# --- Panoptic quality: segments of two maps matched, counted, and added up over images --------------------------------


@dataclass(frozen=True)
class Quality:
    """Panoptic, segmentation and recognition quality in percent: means over the classes that occur.

    Kirillov et al., "Panoptic Segmentation", arXiv 1801.00868, equations 1 and 2: for a class, SQ is the mean IoU of
    its matched segments, RQ = TP / (TP + FP/2 + FN/2), PQ = SQ RQ.
    """

    pq: float
    sq: float
    rq: float


@dataclass(frozen=True)
class SegmentTally:
    """One map against another: float64 [classes, 4] (sum of IoU, TP, FP, FN); and whether each true segment is
    matched."""

    counts: Floats
    found: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Segments:
    """The segments of a map that have pixels, including NO_SEGMENT.

    area: pixels of each. classes: int64, -1 for NO_SEGMENT. crowd: bool. at: the index of each pixel's segment, flat.
    """

    area: npt.NDArray[np.int64]
    classes: npt.NDArray[np.int64]
    crowd: npt.NDArray[np.bool_]
    at: np.ndarray


def segments_of(cut: masks.PanopticMap, classes: int) -> Segments:
    """Return the segments of a map.

    Raises:
        ValueError: a segment without a class, or with one outside 0..classes-1.
    """
    ids, at, area = np.unique(cut.ids.ravel(), return_inverse=True, return_counts=True)
    kinds = [-1 if id == masks.NO_SEGMENT else cut.classes.get(id, classes) for id in ids.tolist()]
    if max(kinds) >= classes:
        raise ValueError(f"segments {ids.tolist()} have classes {kinds}, but there are only {classes}")
    return Segments(area, np.array(kinds, np.int64), np.isin(ids, list(cut.crowd)), at.ravel())


def tally(found: Segments, truth: Segments, classes: int, *, forgive: bool) -> SegmentTally:
    """Match the segments of one image: a pair of one class with IoU above 0.5, which is unique.

    With `forgive`, as in arXiv 1801.00868 (section 4.2) and COCO: pixels that are VOID in the truth do not count in
    unions; a segment with more than half of its pixels on VOID, or on crowds of its class, is not a false positive;
    crowds need not be matched. Without it, every segment of both maps counts.

    Raises:
        ValueError: maps of different sizes.
    """
    if found.at.shape != truth.at.shape:
        raise ValueError(f"a map with {found.at.size} pixels, labels with {truth.at.size}")
    shape = len(truth.area), len(found.area)
    common = np.bincount(truth.at * shape[1] + found.at, minlength=shape[0] * shape[1]).reshape(shape)
    same_class = truth.classes[:, None] == found.classes
    real, expected = found.classes >= 0, truth.classes >= 0
    on_void = np.zeros(shape[1], np.int64)
    excused = np.zeros(shape[1], np.bool_)
    if forgive:
        on_void = common[~expected].sum(axis=0)
        on_crowd = np.where(truth.crowd[:, None] & same_class, common, 0).sum(axis=0)
        excused = 2 * (on_void + on_crowd) > found.area
        expected = expected & ~truth.crowd
    union = truth.area[:, None] + found.area - common - on_void
    pairs = same_class & expected[:, None] & real & (2 * common > union)
    rows, columns = np.nonzero(pairs)
    wrong = real & ~pairs.any(axis=0) & ~excused
    missed = expected & ~pairs.any(axis=1)
    counts = np.zeros((classes, 4))
    np.add.at(counts[:, 0], found.classes[columns], common[rows, columns] / union[rows, columns])
    np.add.at(counts[:, 1], found.classes[columns], 1)
    np.add.at(counts[:, 2], found.classes[wrong], 1)
    np.add.at(counts[:, 3], truth.classes[missed], 1)
    return SegmentTally(counts, pairs.any(axis=1)[expected])


def panoptic_quality(counts: Floats, weights: Floats) -> Floats:
    """Return PQ in percent, mean over the classes that occur: float64 [draws]; NaN if none does.

    Args:
        counts: float64 [images, classes, 4], as in `SegmentTally`. weights: float64 [draws, images], how often each
            counts.
    """
    iou, right, wrong, missed = np.moveaxis(np.tensordot(weights, counts, axes=1), -1, 0)
    tried = right + wrong / 2 + missed / 2
    with np.errstate(invalid="ignore"):
        by_class = np.where(tried > 0, iou / np.where(tried > 0, tried, 1), 0)
        return np.asarray(100 * by_class.sum(axis=-1) / (tried > 0).sum(axis=-1))


def quality(counts: Floats, chosen: npt.NDArray[np.bool_]) -> Quality | None:
    """Return the quality over the `chosen` classes of counts [images, classes, 4], all images together; None if none
    occurs."""
    iou, right, wrong, missed = counts.sum(axis=0)[chosen].T
    tried = right + wrong / 2 + missed / 2
    iou, right, tried = iou[tried > 0], right[tried > 0], tried[tried > 0]
    if not len(tried):
        return None
    pq, sq, rq = iou / tried, iou / np.maximum(right, 1), right / tried
    return Quality(*(100 * float(each.mean()) for each in (pq, sq, rq)))


# --- Compares a panoptic model's segments with the original's, and both with the labels -------------------------------


@dataclass(frozen=True, kw_only=True)
class PanopticComparison(Comparison):
    """A panoptic model against the original. The metric is PQ, mean over the classes, in percent.

    agreement: PQ of the artifact's maps with the original's as the truth, without forgiving VOID; it is symmetric, and
        100 if both find nothing (`segments` is 0 then).
    segments: of the original. pixel_agreement: percent of the pixels with the same class (or none) on both sides. The
    qualities are over all classes, things and stuff, the artifact's and the original's; None without labels, or if no
    such class occurs.
    """

    segments: int
    pixel_agreement: float
    all: Quality | None = None
    things: Quality | None = None
    stuff: Quality | None = None
    reference_all: Quality | None = None
    reference_things: Quality | None = None
    reference_stuff: Quality | None = None


def compare_panoptic(
    artifact: Iterable[masks.PanopticMap],
    reference: Iterable[masks.PanopticMap],
    truth: Iterable[masks.PanopticMap] | None,
    *,
    classes: int,
    things: Collection[int],
    max_difference: float,
) -> PanopticComparison:
    """Compare the maps of the artifact and of the original of the same images, in the same order.

    Each iterable is read once, one image per step.

    Args:
        truth: the labelled maps with the models' class numbers, or None.
        classes: the models' number of classes. things: those with instances.
        max_difference: of the raw outputs, passed on.

    Raises:
        ValueError: iterables of different lengths, or no image; maps of different sizes, or with segments without a
            class.
        DataError: the labels contain no segment.
    """
    agreements, ours, theirs = [], [], []
    same = pixels = 0
    labels = () if truth is None else (truth,)
    for maps in zip(artifact, reference, *labels, strict=True):
        a, b, *labelled = (segments_of(each, classes) for each in maps)
        agreements.append(tally(a, b, classes, forgive=False))
        same, pixels = same + int((a.classes[a.at] == b.classes[b.at]).sum()), pixels + a.at.size
        for t in labelled:
            ours.append(tally(a, t, classes, forgive=True))
            theirs.append(tally(b, t, classes, forgive=True))
    if not agreements:
        raise ValueError("no image")
    n = len(agreements)
    weights = draws(n, 0)
    counts = np.stack([each.counts for each in agreements])
    segments = sum(len(each.found) for each in agreements)
    agreed = quality(counts, np.ones(classes, bool))
    agreement = agreed.pq if agreed else 100.0
    accuracy = _accuracy(ours, theirs, weights, np.isin(np.arange(classes), list(things))) if ours else {}
    return PanopticComparison(
        n=n,
        metric="PQ" if ours else None,
        **resampled_agreement(agreement, panoptic_quality(counts, weights), segments),
        agreement_of="panoptic quality with the original's maps as the truth",
        max_difference=max_difference,
        segments=segments,
        pixel_agreement=100 * same / pixels,
        **accuracy,
    )


def _accuracy(
    ours: list[SegmentTally], theirs: list[SegmentTally], weights: Floats, things: npt.NDArray[np.bool_]
) -> Fields:
    a, b = (np.stack([each.counts for each in side]) for side in (ours, theirs))
    found = [np.concatenate([each.found for each in side]) for side in (ours, theirs)]
    if not len(found[0]):
        raise DataError(
            "the labels contain no segment, so PQ is undefined",
            found=f"{len(ours)} images without segments",
            fix="check that the labels belong to these images, or verify without labels (data.labels: none)",
        )
    qualities = {
        f"{prefix}{name}": quality(counts, chosen)
        for prefix, counts in (("", a), ("reference_", b))
        for name, chosen in (("all", things | True), ("things", things), ("stuff", ~things))
    }
    best, reference_best = qualities["all"], qualities["reference_all"]
    assert best and reference_best, "there is a labelled segment, so its class occurs"
    spread = panoptic_quality(b, weights) - panoptic_quality(a, weights)
    return {**qualities, **resampled_accuracy((best.pq, reference_best.pq), spread, found)}


# --- Panoptic segmentation: every pixel a segment, panoptic quality, and whether images are cut the same way ----------


MAP, SEGMENTS = "map", "segments"


class PanopticAdapter(adapter.ImageAdapter):
    kinds = ("panoptic", "none")
    compared = PanopticComparison
    changed_when = "An answer has changed if more than 1 % of the pixels have a different class from the original’s."
    metrics = (Metric("PQ", "PQ is the panoptic quality, the mean over the classes.", words="panoptic quality"),)
    measures = (
        Measure("PQ of things, %", "things.pq", original=True),
        Measure("PQ of stuff, %", "stuff.pq", original=True),
        Measure("SQ, %", "all.sq", original=True),
        Measure("RQ, %", "all.rq", original=True),
        Measure("Segments of the original", "segments", 0),
        Measure("Pixels equal to the original, %", "pixel_agreement"),
    )
    counts = "segments"
    head: PostprocessSpec

    def find_annotated(
        self, choice: adapter.DataChoice, place: Path, skipped: decoding.Skipped | None
    ) -> images.FoundData:
        found = masks.read_panoptic(choice.path, place, skipped)
        used = {category for each in found.annotations.values() for category in each.segments.values()}
        mapping = match_categories(found.categories, used, self.setting.labels, self.setting.classes)
        truth = {path: (annotation, mapping.index) for path, annotation in found.annotations.items()}
        return images.FoundData(found.split(**choice.numbers), found, truth, mapping)

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Return the map and its segments as rows of (id, class); the masks themselves would fill the disk."""
        panoptic = segment(outputs, size, self.setting.images, self.head, None)
        rows = np.array([(each.id, each.index) for each in panoptic.segments], np.int64).reshape(-1, 2)
        return {"logits": outputs["logits"], "boxes": outputs["boxes"], MAP: panoptic.map, SEGMENTS: rows}

    def compare(self, ours: Answers, reference: Answers, data: adapter.Data) -> Comparison:
        assert self.setting.classes is not None
        known = data.truths()
        truth = None if known is None else (annotation.load(mapping) for annotation, mapping in known)
        return compare_panoptic(
            _maps(ours),
            _maps(reference),
            truth,
            classes=self.setting.classes,
            things=self.head.things,
            max_difference=adapter.worst_difference(ours, reference, ["logits", "boxes"]),
        )

    def moved(self, answers: Answers, order: Sequence[int], reference: Answers) -> Answers:
        return adapter.with_maps_of(super().moved(answers, order, reference), MAP, reference)

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        rows = answers.columns[SEGMENTS][index]
        return Said(detection.listed([label_of(int(c), labels) for _, c in rows]), None)

    def changes(self, ours: Answers, reference: Answers, data: adapter.Data) -> Changes:
        return pixel_changes(map(class_map, _maps(ours)), map(class_map, _maps(reference)))

    def truth_line(self, truth: images.OfTask, labels: Sequence[str] | None) -> str:
        annotation, mapping = truth
        return detection.listed([label_of(mapping[category], labels) for category in annotation.segments.values()])


def _maps(answers: Answers) -> Iterator[masks.PanopticMap]:
    for ids, rows in zip(answers.columns[MAP], answers.columns[SEGMENTS], strict=True):
        yield masks.PanopticMap(ids, {int(i): int(c) for i, c in rows})
