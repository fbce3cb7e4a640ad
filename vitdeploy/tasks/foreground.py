"""Foreground: masks and mattes, their IoU, error and boundaries, and whether the same figure is cut out."""

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
from vitdeploy.tasks.images import FoundData
from vitdeploy.verification.changes import MOVED_PIXELS, Changes, Counts, judged
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


# float32 [height, width], 0..1; not a number where the model's input does not reach.
Matte = np.ndarray
Mask = npt.NDArray[np.bool_]
# A mask is the original's if both regions of the two overlap so far.
SAME_MASK = 0.9
# A figure counts as right for the least width of an interval from this IoU on.
RIGHT_IOU = 0.5
# Labels are masks of the pixels that are more than half foreground.
HALF = 0.5
# Boundaries may be so far apart, as a share of the image's diagonal: `bound_th` of DAVIS (Perazzi et al., "A Benchmark
# Dataset and Evaluation Methodology for Video Object Segmentation", CVPR 2016), in whole pixels, rounded up.
REACH = 0.008


@dataclass(frozen=True, kw_only=True)
class ForegroundComparison(Comparison):
    """A foreground model against the original. The metric is the IoU in percent of the mask (the matte above its
    threshold) and the label above a half, the mean over the images. An image without foreground on both sides counts
    100, on one side 0.

    agreement: percent of the images whose mask is the original's: the IoU of the foreground and that of the ground are
        both 0.9 or more. `masks` images are counted, those where the two masks are not both all ground or both all
        foreground, which would prove nothing.
    mae: mean |matte - label|, 0..1. boundary_f: percent, the harmonic mean of the shares of either boundary that lies
        within 0.8 % of the image's diagonal of the other one (CVPR 2016, Perazzi et al.); 100 where neither has one, 0
        where one has none. Both are means over the images; intervals are of the artifact's minus the original's (mae),
        and of the original's minus the artifact's (boundary_f_drop). None without labels. Intervals are bootstraps over
        the images, that of the agreement is Wilson's.
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
    """Of one image against its label: IoU of the masks, mean absolute error of the mattes, F of the boundaries, each
    0..1."""

    iou: float
    mae: float
    boundary_f: float


def foreground_records(
    artifact: Iterable[Mask],
    reference: Iterable[Mask],
    errors: Iterable[tuple[MatteError, MatteError]] | None,
) -> Records:
    """What `foreground_comparison` needs of each image, of masks of the same images in the same order.

    Tables: images, with the `iou` of the two masks, not a number where both are of one region; with labels, errors:
    `ours` and `theirs` float64 [images, 3], as `MatteError`.

    Args:
        errors: of the artifact and of the original of each image; None without labels.

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


def foreground_comparison(records: Records, *, max_difference: float, seed: int = 0) -> ForegroundComparison:
    """The comparison that the records of all images are of."""
    iou = records["images"]["iou"]
    proving = iou[np.isfinite(iou)]
    same = int((proving >= SAME_MASK).sum())
    none = resampled_agreement(100.0, np.array([]), 0)
    labelled = "errors" in records
    return ForegroundComparison(
        n=records.n,
        metric="IoU" if labelled else None,
        **(counted_agreement(same, len(proving)) if len(proving) else none),
        agreement_of=f"masks with an IoU of {SAME_MASK:g} with the original's, of foreground and of ground",
        max_difference=max_difference,
        masks=len(proving),
        **(_accuracy(records["errors"], records.n, seed) if labelled else {}),
    )


def _accuracy(errors: ImageRows, n: int, seed: int) -> Fields:
    ours, theirs = errors["ours"], errors["theirs"]
    lost = theirs - ours
    drawn = replicates(n, seed, lambda weights: weights @ lost / n)
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
    """The errors of one image's matte against its label, [height, width] each, 0..1. Where the model's input does not
    reach it says that there is ground."""
    ours, theirs = mask_of(matte, threshold), truth > HALF
    union = int((ours | theirs).sum())
    iou = float((ours & theirs).sum() / union) if union else 1.0
    apart = np.abs(np.nan_to_num(matte, nan=0.0).astype(np.float64) - truth)
    return MatteError(iou, float(apart.mean()), boundary_f(ours, theirs))


def boundary_f(ours: Mask, theirs: Mask) -> float:
    """The F measure, 0..1, of the boundaries of two masks [height, width]; see `ForegroundComparison`."""
    a, b = (_boundary(mask) for mask in (ours, theirs))
    if not len(a) or not len(b):
        return float(len(a) == len(b))
    reach = float(np.ceil(REACH * np.hypot(*ours.shape)))
    precision, recall = _near(a, b, reach), _near(b, a, reach)
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _boundary(mask: Mask) -> npt.NDArray[np.int64]:
    """int64 [n, 2], row and column of the pixels that differ from the one to the right, below, or both, as DAVIS's
    `seg2bmap` draws boundaries."""
    edges = np.zeros(mask.shape, bool)
    edges[:, :-1] |= mask[:, :-1] != mask[:, 1:]
    edges[:-1] |= mask[:-1] != mask[1:]
    edges[:-1, :-1] |= mask[:-1, :-1] != mask[1:, 1:]
    return np.argwhere(edges)


def _near(points: npt.NDArray[np.int64], others: npt.NDArray[np.int64], reach: float) -> float:
    """The share of the points that lie within `reach` pixels of another one."""
    # The bound of a query is exclusive.
    distances, _ = KDTree(others).query(points, distance_upper_bound=reach + 0.5 / (reach + 1))
    return float((distances <= reach).mean())


def foreground_changes(artifact: Iterable[Mask], reference: Iterable[Mask]) -> Changes:
    """Changed images: those with more than MOVED_PIXELS of their pixels on the other side."""
    moved = np.array([float((a != b).mean()) for a, b in zip(artifact, reference, strict=True)])
    return judged(moved > MOVED_PIXELS, moved)


# --- Labels: for each image a PNG of the same name below another folder, a mask or a matte ----------------------------


GREY, PALETTE, ALPHA = ("1", "L"), ("P",), ("LA", "RGBA", "PA")
WHITE = 255
# Of a matte whose values between 0 and 255 are so few, they may be classes.
FEW = 8


@dataclass(frozen=True)
class MatteAnnotation:
    """The PNG of one image, which lies as `frame` says. `one`: the value that is all foreground, 1 or 255."""

    file: Path
    frame: Frame
    one: int = WHITE

    def content(self) -> bytes:
        """Bytes that differ where two annotations differ."""
        return self.facts() + self.file.read_bytes()

    def facts(self) -> bytes:
        return repr((self.frame, self.one)).encode()

    def values(self) -> tuple[npt.NDArray[np.uint8], bool]:
        """uint8 [height, width] of the upright image, as the file has them, and whether that is its alpha channel.

        Raises:
            ImageError: the file cannot be read.
            DataError: it is of 16 bits or in colours, or of another size than the image.
        """
        image = decode(self.file, None)
        if image.mode in ALPHA:
            return masks.fit_map(self.file, np.asarray(image.getchannel("A")), self.frame), True
        if image.mode not in (*GREY, *PALETTE):
            wide = image.mode.startswith(("I", "F"))
            raise DataError(
                f"{self.file} is no mask or matte of 8 bits",
                found="16 bits or more a pixel" if wide else f"a picture of mode {image.mode}",
                expected="one channel of 8 bits or an alpha channel: 0 and 1, or 0 to 255",
                fix="write 255 * alpha as uint8" if wide else "write one channel, as Pillow's convert('L') does",
            )
        values = np.asarray(image.convert("L") if image.mode == "1" else image, np.uint8)
        return masks.fit_map(self.file, values, self.frame), False

    def load(self) -> npt.NDArray[np.float32]:
        """float32 [height, width], 0..1; errors as `values`."""
        return np.asarray(self.values()[0] / np.float32(self.one), np.float32)


MatteSet = annotations.AnnotatedSet[MatteAnnotation]


def read_mattes(images: Path, labels: Path, skipped: decoding.Skipped | None = None) -> MatteSet:
    """The images below `images` with a PNG of the same relative name below `labels`. All PNGs are read once: whether 1
    or 255 is all foreground is a matter of all of them.

    Raises:
        MissingFileError: no such folder. ImageError, DataError: as `MatteAnnotation.values`.
        DataError: no image has a PNG; or the values of all are neither masks nor mattes of one scale.
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
    """The values of a file, and whether they are its alpha channel's."""
    values, alpha = annotation.values()
    return frozenset(np.flatnonzero(np.bincount(values.ravel())).tolist()), alpha


def _scale(files: Mapping[Path, tuple[frozenset[int], bool]]) -> tuple[int, tuple[str, ...]]:
    """The value that is all foreground, and warnings. DataError: as `read_mattes`."""
    every = frozenset[int]().union(*(values for values, _ in files.values()))
    if all(alpha for _, alpha in files.values()) and every == {WHITE}:
        raise DataError(
            "the alpha channels of the labels are opaque everywhere",
            found=f"{len(files)} PNGs with an alpha of 255 alone",
            expected="alpha channels that say what is foreground, or PNGs of one channel",
            fix="write the masks as one channel of 8 bits",
        )
    if max(every) <= 1:
        return 1, ()
    small = [file.name for file, (values, _) in files.items() if max(values) == 1]
    if max(every) != WHITE or small:
        raise DataError(
            "the labels are of two scales" if small else "the labels are of no scale that is known",
            found=(f"{small[0]} with 0 and 1 alone, others" if small else "values") + f" up to {max(every)}",
            expected="0 and 1 in all files, or 0 to 255, where 255 is all foreground",
            fix="write all of them as 0 to 255",
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
    changed_when = (
        "An answer has changed where more than 1 % of the pixels are on the other side of the mask than in "
        "the original’s."
    )
    counts = "masks"
    metrics = (
        Metric(
            "IoU",
            "IoU is the intersection over union of mask and label, the mean over the images; of an image without "
            "foreground it is 100 % where the mask is empty too, else 0.",
        ),
    )
    measures = (
        Measure("Mean absolute error", "mae", 4, original=True),
        Measure("Boundary F, %", "boundary_f", original=True),
        Measure("Drop of boundary F", "boundary_f_drop", interval="boundary_f_drop_ci95"),
        Measure("Masks of two regions", "masks", 0),
    )
    head: ForegroundSpec

    def find_annotated(self, choice: DataChoice, place: Path, skipped: decoding.Skipped | None) -> FoundData:
        labelled = read_mattes(choice.path, place, skipped)
        return FoundData(labelled.split(**choice.numbers), labelled, labelled.annotations)

    def kept(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """The map as the model gives it, and the size of the image."""
        return {FOREGROUND_OUTPUT: outputs[FOREGROUND_OUTPUT], SIZE: np.array(size, np.int64)}

    def count(self, ours: Answers, reference: Answers, data: Data) -> Counts:
        errors = None if data.truth is None else self._errors(ours, reference, data)
        records = foreground_records(self._masks(ours), self._masks(reference), errors)
        return records.with_tables(outputs=differences(ours, reference, [FOREGROUND_OUTPUT]))

    def comparison(self, counts: Counts) -> Comparison:
        assert isinstance(counts, Records)
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

    def doubt(self, reference: Answers, data: Data, found: Comparison) -> str | None:
        return self.doubt_counted(found, [self.facts(reference)], [], data)

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
        """Whether logits are read as mattes, or mattes as logits; whether the labels are of the other region."""
        low, high = (choose(float(str(part[name])) for part in facts) for choose, name in ((min, "low"), (max, "high")))
        outside = low < -HALF or high > 1 + HALF
        if outside == (self.head.alpha == "given"):
            other = "given" if self.head.alpha == "sigmoid" else "sigmoid"
            return (
                f"the original's outputs lie in {low:.3g} to {high:.3g}, which is not what postprocess alpha: "
                f"{self.head.alpha} takes them for (postprocess: {{alpha: {other}}})"
            )
        assert isinstance(found, ForegroundComparison)
        if found.reference_mae is not None and found.reference_mae > HALF:
            return (
                f"the original's mattes are {found.reference_mae:.2f} off the labels in the mean, and nearer to their "
                "inverse: is 0 the foreground of the labels?"
            )
        return doubt_value(found.metric, found.reference_value)

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        return foreground_changes(self._masks(ours), self._masks(reference))

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        return Said(str(Foreground(self._matte(answers, index), self.head.threshold)), None)

    def panels(self, data: Data, index: int, answers: Mapping[str, Answers]) -> Panels:
        """The matte of every artifact, and the labelled one; white is foreground."""
        mattes = {name: self._matte(side, index) for name, side in answers.items()}
        if data.truth is not None:
            mattes["label"] = data.truth_at(index).load()
        for name, matte in mattes.items():
            levels = (255 * np.nan_to_num(matte, nan=0.0)).round().astype(np.uint8)
            yield name, thumbnail(levels[..., None])
