"""Semantic segmentation: agreement and IoU of label maps."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import sparse

from vitdeploy.data import decoding, masks
from vitdeploy.errors import DataError
from vitdeploy.runtime import drawing, postprocess
from vitdeploy.runtime.tasks.segmentation import NONE, SegmentationSpec, areas, classes_of
from vitdeploy.tasks import adapter, counted
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.tasks.images import OfTask, drawn
from vitdeploy.verification.changes import Changes, Counts, pixel_changes
from vitdeploy.verification.comparison import (
    Comparison,
    Fields,
    differences,
    resampled_accuracy,
    resampled_agreement,
    worst_of,
)
from vitdeploy.verification.intervals import Floats, replicates
from vitdeploy.verification.records import Answers, ImageRows, Records

# --- Compares the class maps of a semantic segmentation model with the original's, and both with labelled maps --------


# int [height, width] of classes; negative for no class.
ClassMap = np.ndarray
# A class of an image counts as found from this IoU on.
FOUND = 0.5


@dataclass(frozen=True, kw_only=True)
class SegmentationComparison(Comparison):
    """A segmentation model against the original. The metric is mIoU in percent: the IoU of each class over the pixels
    of all images, and the mean over the classes that occur in the labels or the answers (PASCAL VOC, 2012).

    agreement: percent of all pixels with the original's class. Both intervals are bootstraps over the images.
    regions: pairs of an image and a class in the original's maps. pixel_accuracy: percent of the labelled pixels with
        the right class, the artifact's and the original's; None without labels.
    """

    regions: int
    pixel_accuracy: float | None = None
    reference_pixel_accuracy: float | None = None


def segmentation_records(
    artifact: Iterable[ClassMap], reference: Iterable[ClassMap], truth: Iterable[ClassMap] | None, *, classes: int
) -> Records:
    """Return the records for `segmentation_comparison`, from maps of the same images in the same order. Each iterable
    is read once, one image per step.

    Tables: images, with the number of `same` pixels out of all `pixels`, and the `regions` of the original's map; with
        labels, classes: a row for each class `index` that occurs in an image on any side, with its pixels in both and
        in the answer, `ours` and `theirs` int32 [rows, 2], and its `labelled` pixels.

    Args:
        truth: the labelled maps, negative where a pixel has no class, or None.
        classes: the models' number of classes.

    Raises:
        ValueError: iterables of different lengths, or no image; maps of different sizes.
    """
    images: list[tuple[int, int, int]] = []
    rows: list[dict[str, np.ndarray]] = []
    labels = () if truth is None else (truth,)
    for a, b, *labelled in zip(artifact, reference, *labels, strict=True):
        images.append((int((a == b).sum()), b.size, len(np.unique(b[b >= 0]))))
        for t in labelled:
            ours, theirs = (tally(each, t, classes).astype(np.int32) for each in (a, b))
            index = np.flatnonzero((ours + theirs).any(axis=0)).astype(np.int32)
            sides = {"ours": ours[:2, index].T, "theirs": theirs[:2, index].T}
            rows.append({"index": index, **sides, "labelled": ours[2, index]})
    if not images:
        raise ValueError("no image")
    same, pixels, regions = np.array(images, np.int64).T
    tables = {"images": ImageRows.each(same=same, pixels=pixels, regions=regions)}
    return Records(len(images), {**tables, **({} if truth is None else {"classes": ImageRows.of(rows)})})


def segmentation_comparison(records: Records, *, classes: int, max_difference: float) -> SegmentationComparison:
    """Return the comparison for the records of all images. Raises DataError: the labels contain no pixel with a
    class."""
    images, n = records["images"], records.n
    equal, pixels = images["same"].astype(np.float64), images["pixels"].astype(np.float64)
    regions, agreement = int(images["regions"].sum()), 100 * float(equal.sum() / pixels.sum())
    drawn = replicates(n, 0, lambda weights: 100 * (weights @ equal) / (weights @ pixels))
    labelled = "classes" in records
    return SegmentationComparison(
        n=n,
        metric="mIoU" if labelled else None,
        **resampled_agreement(agreement, drawn, regions),
        agreement_of="pixels with the original's class",
        max_difference=max_difference,
        regions=regions,
        **(_accuracy(records["classes"], n, classes) if labelled else {}),
    )


def tally(found: ClassMap, truth: ClassMap, classes: int) -> npt.NDArray[np.int64]:
    """Return int64 [3, classes], labelled pixels by class: in both, in the answer, in the truth.

    Raises:
        ValueError: maps of different sizes.
    """
    if found.shape != truth.shape:
        raise ValueError(f"a map of {found.shape} and labels of {truth.shape}")
    known = truth >= 0
    a, t = found[known], truth[known]
    answered = a[a >= 0]
    return np.stack([np.bincount(each, minlength=classes)[:classes] for each in (t[a == t], answered, t)]).astype(
        np.int64
    )


def mean_iou(counts: Floats) -> Floats:
    """Return mIoU in percent of tallies [..., 3, classes], over the classes that occur; NaN if none does."""
    both, answered, labelled = np.moveaxis(counts, -2, 0)
    union = answered + labelled - both
    present = union > 0
    shares = np.where(present, both / np.maximum(union, 1), 0.0)
    with np.errstate(invalid="ignore"):
        return np.asarray(100 * shares.sum(axis=-1) / present.sum(axis=-1), np.float64)


def _accuracy(rows: ImageRows, n: int, classes: int) -> Fields:
    if not rows["labelled"].sum():
        raise DataError(
            "the labels contain no pixel with a class, so mIoU is undefined",
            found=f"{n} maps without classes",
            fix="check postprocess.ignore and postprocess.reduce_labels, or verify without labels (data.labels: none)",
        )
    sides = [_by_image(rows, side, n, classes) for side in ("ours", "theirs")]
    counts = [np.asarray(each.sum(axis=0)).reshape(3, classes) for each in sides]
    values = [float(mean_iou(count)) for count in counts]

    def drawn_drop(weights: Floats) -> Floats:
        # Integers: their sums are exact in any order.
        drawn = (np.ascontiguousarray((side.T @ weights.T).T).reshape(-1, 3, classes) for side in sides)
        ours, theirs = (mean_iou(each) for each in drawn)
        return theirs - ours

    labelled = rows["labelled"] > 0
    found = []
    for each in (rows["ours"], rows["theirs"]):
        both, answered = each.astype(np.int64).T
        found.append((both / np.maximum(answered + rows["labelled"] - both, 1) >= FOUND)[labelled])
    right = [100 * float(each[0].sum() / each[2].sum()) for each in counts]
    return {
        **resampled_accuracy(values, replicates(n, 0, drawn_drop), found),
        "pixel_accuracy": right[0],
        "reference_pixel_accuracy": right[1],
    }


def _by_image(rows: ImageRows, side: str, n: int, classes: int) -> sparse.csr_matrix:
    """Return the tallies of each image, float64 [n, 3 * classes]: most images contain few of the classes."""
    counts = np.concatenate([rows[side].T.ravel(), rows["labelled"]]).astype(np.float64)
    columns = np.concatenate([rows["index"] + kind * classes for kind in range(3)])
    return sparse.csr_matrix((counts, (np.tile(rows.image, 3), columns)), (n, 3 * classes))


# --- Semantic segmentation: the class of every pixel, mIoU, and the share of pixels that keep their class -------------


MAP = "map"
# Numbers kept from each raw output, for the largest difference.
KEPT = 1 << 12
SHOWN_CLASSES = 4


class SegmentationAdapter(counted.CountedAdapter):
    finer = 8
    kinds = ("masks", "none")
    compared = SegmentationComparison
    changed_when = "An answer has changed if more than 1 % of the pixels have a different class from the original’s."
    metrics = (
        Metric("mIoU", "mIoU is the intersection over union over the pixels of all images, averaged over the classes."),
    )
    measures = (
        Measure("Correct pixels, %", "pixel_accuracy", original=True),
        Measure("Classes per image, summed, of the original", "regions", 0),
    )
    head: SegmentationSpec

    def annotated(self, choice: adapter.DataChoice, place: Path, skipped: decoding.Skipped | None) -> masks.MaskSet:
        assert self.setting.classes is not None
        labels, head = self.setting.labels, self.head
        found = masks.read_masks(choice.path, place, skipped)
        return masks.understood(found, labels, self.setting.classes, head.ignore, head.reduce_labels)

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Return the map, in the smallest type that fits, and some of the raw numbers."""
        found = classes_of(outputs, size, self.setting.images, self.head)
        few = {name: drawn(output, KEPT) for name, output in outputs.items()}
        return {**few, MAP: found.astype(np.int16 if (self.setting.classes or 0) > 127 else np.int8)}

    def count(self, ours: Answers, reference: Answers, data: adapter.Data) -> Counts:
        assert self.setting.classes is not None
        known = data.truths()
        truth = None if known is None else (self._load(task) for task in known)
        maps = ours.columns[MAP], reference.columns[MAP]
        outputs = differences(ours, reference, [name for name in ours.columns if name != MAP])
        return segmentation_records(*maps, truth, classes=self.setting.classes).with_tables(outputs=outputs)

    def comparison(self, counts: Records) -> Comparison:
        assert self.setting.classes is not None
        worst = worst_of(counts["outputs"])
        return segmentation_comparison(counts, classes=self.setting.classes, max_difference=worst)

    def moved(self, answers: Answers, order: Sequence[int], reference: Answers) -> Answers:
        return adapter.with_maps_of(super().moved(answers, order, reference), MAP, reference)

    def _load(self, annotation: OfTask) -> np.ndarray:
        assert self.setting.classes is not None
        return np.asarray(annotation.load(self.setting.classes, self.head.ignore, self.head.reduce_labels))

    def changes(self, ours: Answers, reference: Answers, data: adapter.Data) -> Changes:
        return pixel_changes(ours.columns[MAP], reference.columns[MAP])

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        found = areas(answers.columns[MAP][index].astype(np.int32), labels)
        more = [f"and {len(found) - SHOWN_CLASSES} more"] if len(found) > SHOWN_CLASSES else []
        return Said(
            ", ".join([*(f"{area.label} {100 * area.share:.0f} %" for area in found[:SHOWN_CLASSES]), *more]), None
        )

    def truth_line(self, truth: OfTask, labels: Sequence[str] | None) -> str:
        known = np.unique(self._load(truth))
        return ", ".join(postprocess.label_of(int(each), labels) for each in known[known != NONE][:8])

    def panels(self, data: adapter.Data, index: int, answers: Mapping[str, Answers]) -> adapter.Panels:
        """Yield the image, the map of every artifact and the labelled one, in the same colours."""
        maps = {name: found.columns[MAP][index] for name, found in answers.items()}
        if data.truth is not None:
            maps["label"] = self._load(data.truth_at(index))
        for name, found in maps.items():
            yield name, adapter.thumbnail(np.asarray(drawing.class_picture(found.astype(np.int32))))
