"""Foreground segmentation: masks and mattes, their IoU, error and boundaries, and agreement with the original."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.spatial import KDTree

from vitdeploy.data import annotations, decoding, folder, masks
from vitdeploy.errors import DataError
from vitdeploy.runtime.preprocess import Frame, decode
from vitdeploy.runtime.tasks.foreground import (
    FOREGROUND_OUTPUT,
    Foreground,
    ForegroundSpec,
    mask_of,
    matte_of,
    region_iou,
)
from vitdeploy.tasks.adapter import Data, DataChoice, Panels, thumbnail
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.tasks.counted import CountedAdapter
from vitdeploy.verification.changes import Changes, Counts, pixel_changes
from vitdeploy.verification.comparison import (
    Comparison,
    Fields,
    counted_agreement,
    differences,
    doubt_value,
    resampled_accuracy,
    resampled_agreement,
    worst_of,
)
from vitdeploy.verification.intervals import replicates
from vitdeploy.verification.records import SIZE, Answers, ImageRows, Records

# --- Compares the mattes of an artifact with the original's, and both with labelled ones ------------------------------


# float32 [height, width], 0..1; NaN outside the model's input.
Matte = np.ndarray
Mask = npt.NDArray[np.bool_]
# A mask equals the original's if foreground and background of the two have this IoU.
SAME_MASK = 0.9
# For the least width of an interval, an image counts as right from this IoU on.
RIGHT_IOU = 0.5
# Label pixels above this value are foreground in masks.
HALF = 0.5
# Boundary tolerance relative to the image's diagonal: `bound_th` of DAVIS (Perazzi et al., "A Benchmark Dataset and
# Evaluation Methodology for Video Object Segmentation", CVPR 2016), in whole pixels, rounded up.
REACH = 0.008


@dataclass(frozen=True, kw_only=True)
class ForegroundComparison(Comparison):
    """A foreground model against the original. The metric is the IoU in percent of the mask (the matte above its
    threshold) and the label above one half, averaged over the images. An image without foreground counts 100 if the
    mask is empty too, else 0.

    agreement: percent of the images whose mask is the original's: the IoUs of foreground and background are both 0.9 or
        more. `masks` images are counted: images whose two masks are both empty or both full are left out, as they prove
        nothing.
    mae: mean |matte - label|, 0..1. boundary_f: percent, the harmonic mean of the shares of each boundary within 0.8 %
        of the image's diagonal of the other one (CVPR 2016, Perazzi et al.); 100 if neither has one, 0 if only one has.
        Both are means over the images. mae_ci95 is the interval of the artifact's minus the original's,
        boundary_f_drop_ci95 that of the original's minus the artifact's; None without labels. Intervals are bootstraps
        over the images; the agreement's is Wilson's.
    """

    masks: int
    mae: float | None = None
    reference_mae: float | None = None
    mae_ci95: tuple[float, float] | None = None
    boundary_f: float | None = None
    reference_boundary_f: float | None = None
    boundary_f_drop: float | None = None
    boundary_f_drop_ci95: tuple[float, float] | None = None


class MatteError(NamedTuple):
    """Errors of one image against its label: IoU of the masks, mean absolute error of the mattes, F of the boundaries,
    each 0..1."""

    iou: float
    mae: float
    boundary_f: float


def foreground_records(
    artifact: Iterable[Mask],
    reference: Iterable[Mask],
    errors: Iterable[tuple[MatteError, MatteError]] | None,
) -> Records:
    """Return the records for `foreground_comparison`, from masks of the same images in the same order.

    Tables: images, with the `iou` of the two masks, NaN if both are empty or both are full; with labels, errors: `ours`
    and `theirs` float64 [images, 3], as `MatteError`.

    Args:
        errors: the artifact's and the original's for each image; None without labels.

    Raises:
        ValueError: other lengths, or no image.
    """
    pairs = [region_iou(a, b) for a, b in zip(artifact, reference, strict=True)]
    if not pairs:
        raise ValueError("no image")
    tables = {"images": ImageRows.each(iou=np.array([np.nan if iou is None else iou for iou in pairs]))}
    if errors is not None:
        sides = np.array(list(errors), np.float64)
        tables["errors"] = ImageRows.each(ours=sides[:, 0], theirs=sides[:, 1])
    return Records(len(pairs), tables)


def foreground_comparison(records: Records, *, max_difference: float) -> ForegroundComparison:
    """Return the comparison for the records of all images."""
    iou = records["images"]["iou"]
    proving = iou[np.isfinite(iou)]
    same = int((proving >= SAME_MASK).sum())
    none = resampled_agreement(100.0, np.array([]), 0)
    labelled = "errors" in records
    return ForegroundComparison(
        n=records.n,
        metric="IoU" if labelled else None,
        **(counted_agreement(same, len(proving)) if len(proving) else none),
        agreement_of=f"masks with an IoU of {SAME_MASK:g} or more with the original's, for foreground and background",
        max_difference=max_difference,
        masks=len(proving),
        **(_accuracy(records["errors"], records.n) if labelled else {}),
    )


def _accuracy(errors: ImageRows, n: int) -> Fields:
    ours, theirs = errors["ours"], errors["theirs"]
    lost = theirs - ours
    drawn = replicates(n, 0, lambda weights: weights @ lost / n)
    (iou, mae, boundary), (iou_before, mae_before, boundary_before) = ours.mean(axis=0), theirs.mean(axis=0)
    right = [side[:, 0] >= RIGHT_IOU for side in (ours, theirs)]
    low, high = np.percentile(-drawn[:, 1], [2.5, 97.5])
    drops = np.percentile(100 * drawn[:, 2], [2.5, 97.5])
    return {
        **resampled_accuracy([100 * float(iou), 100 * float(iou_before)], 100 * drawn[:, 0], right),
        "mae": float(mae),
        "reference_mae": float(mae_before),
        "mae_ci95": (float(low), float(high)),
        "boundary_f": 100 * float(boundary),
        "reference_boundary_f": 100 * float(boundary_before),
        "boundary_f_drop": 100 * float(boundary_before - boundary),
        "boundary_f_drop_ci95": (float(drops[0]), float(drops[1])),
    }


def matte_error(matte: Matte, truth: Matte, threshold: float) -> MatteError:
    """Return the errors of one image's matte against its label, [height, width] each, 0..1. Outside the model's input
    the matte is background."""
    ours, theirs = mask_of(matte, threshold), truth > HALF
    union = int((ours | theirs).sum())
    iou = float((ours & theirs).sum() / union) if union else 1.0
    apart = np.abs(np.nan_to_num(matte, nan=0.0).astype(np.float64) - truth)
    return MatteError(iou, float(apart.mean()), boundary_f(ours, theirs))


def boundary_f(ours: Mask, theirs: Mask) -> float:
    """Return the F measure, 0..1, of the boundaries of two masks [height, width]; see `ForegroundComparison`."""
    a, b = (_boundary(mask) for mask in (ours, theirs))
    if not len(a) or not len(b):
        return float(len(a) == len(b))
    reach = float(np.ceil(REACH * np.hypot(*ours.shape)))
    precision, recall = _near(a, b, reach), _near(b, a, reach)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _boundary(mask: Mask) -> npt.NDArray[np.int64]:
    """Return int64 [n, 2], row and column of the pixels that differ from the one to the right, below, or diagonally
    below, as in DAVIS's `seg2bmap`."""
    edges = np.zeros(mask.shape, bool)
    edges[:, :-1] |= mask[:, :-1] != mask[:, 1:]
    edges[:-1] |= mask[:-1] != mask[1:]
    edges[:-1, :-1] |= mask[:-1, :-1] != mask[1:, 1:]
    return np.argwhere(edges)


def _near(points: npt.NDArray[np.int64], others: npt.NDArray[np.int64], reach: float) -> float:
    """Return the share of the points within `reach` pixels of another one."""
    # The distance bound of a query is exclusive.
    distances, _ = KDTree(others).query(points, distance_upper_bound=reach + 0.5 / (reach + 1))
    return float((distances <= reach).mean())


# --- Labels: for each image a PNG of the same name below another folder, a mask or a matte ----------------------------


GREY, PALETTE, ALPHA = ("1", "L"), ("P",), ("LA", "RGBA", "PA")
WHITE = 255
# With at most this many values between 0 and 255, the values of a matte may be classes.
FEW = 8


@dataclass(frozen=True)
class MatteAnnotation:
    """The PNG of one image with the orientation `frame`. `one`: the value of full foreground, 1 or 255."""

    file: Path
    frame: Frame
    one: int = WHITE

    def content(self) -> bytes:
        return self.facts() + self.file.read_bytes()

    def facts(self) -> bytes:
        return repr((self.frame, self.one)).encode()

    def values(self) -> tuple[npt.NDArray[np.uint8], bool]:
        """Return uint8 [height, width] of the upright image, unmapped, and whether it is the file's alpha channel.

        Raises:
            ImageError: the file cannot be read.
            DataError: it has 16 bits or colours, or its size differs from the image's.
        """
        image = decode(self.file, None)
        if image.mode in ALPHA:
            return masks.fit_map(self.file, np.asarray(image.getchannel("A")), self.frame), True
        if image.mode not in (*GREY, *PALETTE):
            wide = image.mode.startswith(("I", "F"))
            raise DataError(
                f"{self.file} is not an 8-bit mask or matte",
                found="16 or more bits per pixel" if wide else f"a picture with mode {image.mode}",
                expected="one 8-bit channel or an alpha channel, with values 0 and 1, or 0 to 255",
                fix="save 255 * alpha as uint8" if wide else "save one channel, for example with Pillow's convert('L')",
            )
        values = np.asarray(image.convert("L") if image.mode == "1" else image, np.uint8)
        return masks.fit_map(self.file, values, self.frame), False

    def load(self) -> npt.NDArray[np.float32]:
        """Return float32 [height, width], 0..1; errors as `values`."""
        return np.asarray(self.values()[0] / np.float32(self.one), np.float32)


MatteSet = annotations.AnnotatedSet[MatteAnnotation]


def read_mattes(images: Path, labels: Path, skipped: decoding.Skipped | None = None) -> MatteSet:
    """Return the images below `images` with a PNG of the same relative name below `labels`. All PNGs are read once, to
    decide whether 1 or 255 means full foreground.

    Raises:
        MissingFileError: no such folder. ImageError, DataError: as `MatteAnnotation.values`.
        DataError: no image has a PNG; or the PNGs do not share one scale.
    """
    samples, missing = masks.with_maps(images, labels, (".png",), skipped)
    mattes = {path: MatteAnnotation(file, frame) for path, (file, frame) in samples.items()}
    holding = {path: _present(annotation) for path, annotation in mattes.items()}
    one, warnings = _scale({mattes[path].file: values for path, values in holding.items()})
    mattes = {path: replace(annotation, one=one) for path, annotation in mattes.items()}
    notes = annotations.upright_notes((matte.frame for matte in mattes.values()), "map")
    return annotations.AnnotatedSet(
        images, tuple(folder.Sample(path, None) for path in mattes), mattes, (), missing, notes, warnings
    )


def _present(annotation: MatteAnnotation) -> tuple[frozenset[int], bool]:
    """Return the values of a file, and whether they are from its alpha channel."""
    values, alpha = annotation.values()
    return frozenset(np.flatnonzero(np.bincount(values.ravel())).tolist()), alpha


def _scale(files: Mapping[Path, tuple[frozenset[int], bool]]) -> tuple[int, tuple[str, ...]]:
    """Return the value of full foreground, and warnings. Raises DataError: as `read_mattes`."""
    every = frozenset[int]().union(*(values for values, _ in files.values()))
    if all(alpha for _, alpha in files.values()) and every == {WHITE}:
        raise DataError(
            "the alpha channels of the labels are fully opaque",
            found=f"{len(files)} PNGs with alpha 255 everywhere",
            expected="alpha channels with the foreground, or one-channel PNGs",
            fix="save the masks as one 8-bit channel",
        )
    if max(every) <= 1:
        return 1, ()
    small = [file.name for file, (values, _) in files.items() if max(values) == 1]
    if max(every) != WHITE or small:
        raise DataError(
            "the labels have two different scales" if small else "the labels have an unknown scale",
            found=(f"{small[0]} with only 0 and 1, others" if small else "values") + f" up to {max(every)}",
            expected="0 and 1 in all files, or 0 to 255 with 255 as full foreground",
            fix="save all of them as 0 to 255",
        )
    between = sorted(every - {0, WHITE})
    if 0 < len(between) <= FEW:
        listed = ", ".join(map(str, between))
        return WHITE, (
            f"labels: beside 0 and 255 there are the values {listed} alone, which are read as {listed} of 255 parts "
            "foreground: where they are classes or parts that nobody labelled, write masks of 0 and 255",
        )
    return WHITE, ()


# --- The task: mattes at the size of the image, IoU, and the share of masks that are the original's -------------------


class ForegroundAdapter(CountedAdapter):
    finer = 8
    kinds = ("masks", "none")
    compared = ForegroundComparison
    changed_when = "An answer has changed if more than 1 % of the pixels changed between foreground and background."
    counts = "masks"
    metrics = (
        Metric(
            "IoU",
            "IoU is the intersection over union of mask and label, averaged over the images; an image without "
            "foreground counts 100 % if the mask is empty too, else 0.",
        ),
    )
    measures = (
        Measure("Mean absolute error", "mae", 4, original=True),
        Measure("Boundary F, %", "boundary_f", original=True),
        Measure("Boundary F drop", "boundary_f_drop", interval="boundary_f_drop_ci95"),
        Measure("Masks with both regions", "masks", 0),
    )
    head: ForegroundSpec

    def annotated(self, choice: DataChoice, place: Path, skipped: decoding.Skipped | None) -> MatteSet:
        return read_mattes(choice.path, place, skipped)

    def kept(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Return the model's map, and the size of the image."""
        return {FOREGROUND_OUTPUT: outputs[FOREGROUND_OUTPUT], SIZE: np.array(size, np.int64)}

    def count(self, ours: Answers, reference: Answers, data: Data) -> Counts:
        errors = None if data.truth is None else self._errors(ours, reference, data)
        records = foreground_records(self._masks(ours), self._masks(reference), errors)
        return records.with_tables(outputs=differences(ours, reference, [FOREGROUND_OUTPUT]))

    def comparison(self, counts: Records) -> Comparison:
        return foreground_comparison(counts, max_difference=worst_of(counts["outputs"]))

    def _matte(self, answers: Answers, index: int) -> Matte:
        return matte_of(answers.outputs(index), answers.size(index), self.setting.images, self.head)

    def _masks(self, answers: Answers) -> Iterable[Mask]:
        return (mask_of(self._matte(answers, index), self.head.threshold) for index in range(len(answers)))

    def _errors(self, ours: Answers, reference: Answers, data: Data) -> Iterable[tuple[MatteError, MatteError]]:
        for index in range(len(reference)):
            truth = data.truth_at(index).load()
            a, b = (matte_error(self._matte(side, index), truth, self.head.threshold) for side in (ours, reference))
            yield a, b

    def facts(self, answers: Answers) -> dict[str, object]:
        planes = answers.columns[FOREGROUND_OUTPUT]
        return {"low": min(float(plane.min()) for plane in planes), "high": max(float(plane.max()) for plane in planes)}

    def doubt_counted(
        self,
        found: Comparison,
        facts: Sequence[Mapping[str, object]],
        places: Sequence[folder.Ints],
        listed: Data,
    ) -> str | None:
        """Check whether logits are read as mattes or vice versa, and whether the labels are inverted."""
        low, high = (choose(float(str(part[name])) for part in facts) for choose, name in ((min, "low"), (max, "high")))
        outside = low < -HALF or high > 1 + HALF
        if outside == (self.head.alpha == "given"):
            other = "given" if self.head.alpha == "sigmoid" else "sigmoid"
            return (
                f"the original's outputs range from {low:.3g} to {high:.3g}, which does not match postprocess alpha: "
                f"{self.head.alpha} (use postprocess: {{alpha: {other}}})"
            )
        assert isinstance(found, ForegroundComparison)
        if found.reference_mae is not None and found.reference_mae > HALF:
            return (
                f"the original's mattes are {found.reference_mae:.2f} off the labels on average, and closer to their "
                "inverse: check whether 0 is the foreground of the labels"
            )
        return doubt_value(found.metric, found.reference_value)

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        return pixel_changes(self._masks(ours), self._masks(reference))

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        return Said(str(Foreground(self._matte(answers, index), self.head.threshold)), None)

    def panels(self, data: Data, index: int, answers: Mapping[str, Answers]) -> Panels:
        """Yield the matte of every artifact, and the labelled one; white is foreground."""
        mattes = {name: self._matte(side, index) for name, side in answers.items()}
        if data.truth is not None:
            mattes["label"] = data.truth_at(index).load()
        for name, matte in mattes.items():
            levels = (255 * np.nan_to_num(matte, nan=0.0)).round().astype(np.uint8)
            yield name, thumbnail(levels[..., None])
