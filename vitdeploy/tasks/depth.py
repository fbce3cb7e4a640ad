"""Monocular depth: maps and their errors."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitdeploy.data import annotations, decoding, folder, masks
from vitdeploy.errors import DataError, ImageError
from vitdeploy.runtime.preprocess import Frame
from vitdeploy.runtime.tasks.depth import ALIKE, Depth, DepthSpec, DepthValues, alike_share, depth_of, depth_picture
from vitdeploy.tasks.adapter import Data, DataChoice, Panels, thumbnail
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.tasks.counted import CountedAdapter
from vitdeploy.verification.changes import MOVED_PIXELS, Changes, Counts, judged
from vitdeploy.verification.comparison import (
    Comparison,
    Fields,
    differences,
    resampled_accuracy,
    resampled_agreement,
    worst_of,
)
from vitdeploy.verification.intervals import Floats, replicates
from vitdeploy.verification.records import SIZE, Answers, ImageRows, Records
from vitdeploy.zip_members import DAMAGED

# --- Compares the depth of an artifact with the original's, and both with measured depth ------------------------------


Plane = np.ndarray
# For the least width of an interval, an image counts as right above this share of right pixels.
RIGHT_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class DepthComparison(Comparison):
    """A depth model against the original. The metric is delta-1 in percent: the share of pixels with known depth that
    are within a factor of 1.25 (arXiv 1406.2283, section 4.2), averaged over the images.

    Relative depth is first aligned with the labels, image by image: scale and shift of the disparity by least squares
    (arXiv 1907.01341, equation 4), then inverted and clipped to the largest labelled depth.

    agreement: percent of the pixels within the same factor between the artifact's and the original's map, without
        alignment, averaged over the images. All intervals are bootstraps over the images; those of shares are no
        narrower than that of as many independent trials as there are images.
    abs_rel, reference_abs_rel: mean |depth - label| / label, the artifact's and the original's; abs_rel_ci95: of the
        difference, artifact minus original. None without labels.
    """

    abs_rel: float | None = None
    reference_abs_rel: float | None = None
    abs_rel_ci95: tuple[float, float] | None = None


@dataclass(frozen=True)
class DepthError:
    """AbsRel and the share of right pixels, 0..1, of one image."""

    abs_rel: float
    delta1: float


def depth_records(
    artifact: Sequence[Plane],
    reference: Sequence[Plane],
    errors: Iterable[tuple[DepthError, DepthError] | None] | None,
    values: DepthValues,
) -> Records:
    """Return the records for `depth_comparison`, from planes [height, width] of the same images in the same order.

    Tables: images, with the `share` of matching pixels, 0..1; with labels, errors: a row for each image with a known
        pixel, `ours` and `theirs` float64 [rows, 2], AbsRel and the share of right pixels.

    Args:
        errors: the artifact's and the original's for each image (see `depth_error`), None for an image without known
            pixels; None without labels.

    Raises:
        ValueError: other lengths, or no image.
    """
    shares = np.array([alike_share(a, b, values) for a, b in zip(artifact, reference, strict=True)], np.float64)
    if not len(shares):
        raise ValueError("no image")
    tables = {"images": ImageRows.each(share=shares)}
    if errors is None:
        return Records(len(shares), tables)
    pairs = [[] if error is None else [[(side.abs_rel, side.delta1) for side in error]] for error in errors]
    sides = [np.array(pair, np.float64).reshape(-1, 2, 2) for pair in pairs]
    return Records(
        len(shares), {**tables, "errors": ImageRows.of([{"ours": each[:, 0], "theirs": each[:, 1]} for each in sides])}
    )


def depth_comparison(records: Records, *, max_difference: float) -> DepthComparison:
    """Return the comparison for the records of all images. Raises DataError: the labels contain no known pixel."""
    n, shares = records.n, records["images"]["share"]
    agreement = 100 * float(shares.mean())
    drawn = replicates(n, 0, lambda weights: 100 * weights @ shares / n)
    labelled = "errors" in records
    accuracy = _accuracy(records["errors"], n) if labelled else {}
    return DepthComparison(
        n=n,
        metric="delta-1" if labelled else None,
        **resampled_agreement(agreement, drawn, n),
        agreement_of=f"pixels within a factor of {ALIKE:g} of the original's",
        max_difference=max_difference,
        **accuracy,
    )


def _accuracy(errors: ImageRows, n: int) -> Fields:
    if not len(errors):
        raise DataError(
            "the labels contain no pixel of known depth",
            found=f"{n} maps with only zeros or non-finite values",
            fix="check the label folder, or verify without labels (data.labels: none)",
        )
    ours, theirs, pairs = errors["ours"], errors["theirs"], len(errors)
    lost, farther = (theirs - ours)[:, 1], (ours - theirs)[:, 0]
    drawn, relative = replicates(
        pairs, 0, lambda weights: np.stack([100 * weights @ lost / pairs, weights @ farther / pairs], axis=1)
    ).T
    drop = 100 * float((theirs - ours)[:, 1].mean())
    values = [100 * float(side[:, 1].mean()) for side in (ours, theirs)]
    return {
        **resampled_accuracy(values, drawn, [side[:, 1] >= RIGHT_SHARE for side in (ours, theirs)], drop),
        "abs_rel": float(ours[:, 0].mean()),
        "reference_abs_rel": float(theirs[:, 0].mean()),
        "abs_rel_ci95": tuple(float(each) for each in np.percentile(relative, [2.5, 97.5])),
    }


def depth_error(found: Plane, truth: Plane, values: DepthValues) -> DepthError | None:
    """Return the errors of one image's map [height, width] against its measured depth, which is NaN where unknown; None
    if it is unknown everywhere."""
    known = np.isfinite(truth) & np.isfinite(found)
    if not known.any():
        return None
    a, b = found[known].astype(np.float64), truth[known].astype(np.float64)
    depth = np.maximum(a, 1e-9) if values == "metric" else aligned_depth(a, b)
    return DepthError(float((np.abs(depth - b) / b).mean()), float((np.maximum(depth / b, b / depth) < ALIKE).mean()))


def aligned_depth(disparity: Floats, truth: Floats) -> Floats:
    """Return the depth, float64 [n], for disparities [n] known up to scale and shift: s d + t with the least squared
    distance from 1 / truth (arXiv 1907.01341, equation 4), inverted; at most the maximum of `truth`."""
    expected = 1 / truth
    centred = disparity - disparity.mean()
    spread = float(centred @ centred)
    scale = float(centred @ expected) / spread if spread > 0 else 0.0
    aligned = expected.mean() + scale * centred
    return np.asarray(1 / np.maximum(aligned, expected.min()))


def depth_changes(artifact: Sequence[Plane], reference: Sequence[Plane], values: DepthValues) -> Changes:
    """Return the changed images: those with more than MOVED_PIXELS of their pixels outside the factor."""
    moved = np.array([1 - alike_share(a, b, values) for a, b in zip(artifact, reference, strict=True)])
    return judged(moved > MOVED_PIXELS, moved)


# --- Depth labels: for each image a .npy of floats or a PNG of 16 bits, of the same name below another folder ---------


# In the label folder: {"scale": metres per unit of the PNGs}, such as 0.001, or 1 / 256 for KITTI.
UNITS_FILE = "depth.json"
SUFFIXES = (".npy", ".png")


@dataclass(frozen=True)
class DepthAnnotation:
    """The depth of one image with the orientation `frame`. `scale`: metres per unit of a PNG, None if unknown."""

    file: Path
    frame: Frame
    scale: float | None

    def content(self) -> bytes:
        return repr(self.scale).encode() + self.file.read_bytes()

    def facts(self) -> bytes:
        return repr((self.frame, self.scale)).encode()

    def load(self, metres: bool) -> npt.NDArray[np.float32]:
        """Return float32 [height, width] of depth, NaN where it is unknown: 0, negative, or not finite. In metres, or
        in any unit unless `metres`.

        Raises:
            ImageError: the file cannot be read.
            DataError: it is not a map of numbers, its size differs from the image's, or it is a PNG of unknown unit.
        """
        if self.file.suffix == ".npy":
            values = masks.fit_map(self.file, _numbers(self.file), self.frame)
        else:
            values = masks.read_map(self.file, "a PNG of 16 bits", self.frame).astype(np.float32)
            if metres and self.scale is None:
                raise DataError(
                    f"{self.file} has no depth unit",
                    found=f"a PNG without {UNITS_FILE} in {self.file.parent}",
                    expected="metres, for a metric depth model",
                    fix=f'write {{"scale": METRES_PER_UNIT}} to {UNITS_FILE} in the label folder, for example 0.001',
                )
            values = values * np.float32(self.scale or 1.0)
        return np.where(np.isfinite(values) & (values > 0), values, np.float32(np.nan)).astype(np.float32)


DepthSet = annotations.AnnotatedSet[DepthAnnotation]


def read_depth(images: Path, labels: Path, skipped: decoding.Skipped | None = None) -> DepthSet:
    """Return the images below `images` with a file of the same relative name below `labels`; files are read by `load`.

    Errors as `masks.read_masks`; DataError: UNITS_FILE has no positive scale.
    """
    samples, missing = masks.with_maps(images, labels, SUFFIXES, skipped)
    scale = _scale(labels / UNITS_FILE)
    found = {path: DepthAnnotation(file, frame, scale) for path, (file, frame) in samples.items()}
    notes = annotations.upright_notes((each.frame for each in found.values()), "map")
    return annotations.AnnotatedSet(
        images, tuple(folder.Sample(path, None) for path in found), found, (), missing, notes
    )


def _scale(path: Path) -> float | None:
    if not path.is_file():
        return None
    try:
        scale = json.loads(path.read_bytes())["scale"]
    except (ValueError, KeyError, TypeError, RecursionError):
        scale = None
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < 1e9:
        raise DataError(
            f"{path} has no valid scale",
            found=path.read_text("utf-8", "replace")[:80],
            expected='{"scale": metres per unit}',
        )
    return float(scale)


def _numbers(path: Path) -> npt.NDArray[np.float32]:
    try:
        # Memory-mapped: a header that claims more than the file contains fails before memory is allocated.
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except DAMAGED as error:
        raise ImageError(f"{path} cannot be read", found=str(error)[:200], expected="a .npy of floats") from None
    if not isinstance(values, np.ndarray):
        raise ImageError(f"{path} cannot be read", found="an .npz archive", expected="a .npy of floats")
    if values.dtype.kind not in "fiu":
        raise DataError(f"{path} is not a map of numbers", found=str(values.dtype), expected="a .npy of floats")
    return np.array(
        values.reshape(values.shape[:2]) if values.ndim == 3 and values.shape[2] == 1 else values, np.float32
    )


# --- Monocular depth: a value for every pixel, delta-1 and AbsRel, and the share of pixels that keep their value ------


PLANE = "depth"


class DepthAdapter(CountedAdapter):
    finer = 8
    kinds = ("depth", "none")
    compared = DepthComparison
    changed_when = (
        "An answer has changed if more than 1 % of the pixels differ from the original’s by more than a factor of 1.25."
    )
    metrics = (Metric("delta-1", "delta-1 is the share of pixels whose depth is within a factor of 1.25."),)
    measures = (Measure("AbsRel", "abs_rel", 4, original=True),)
    head: DepthSpec

    def annotated(self, choice: DataChoice, place: Path, skipped: decoding.Skipped | None) -> DepthSet:
        return read_depth(choice.path, place, skipped)

    def kept(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Return the model's map, and the size of the image."""
        return {PLANE: outputs[PLANE], SIZE: np.array(size, np.int64)}

    def count(self, ours: Answers, reference: Answers, data: Data) -> Counts:
        errors = None
        if data.truth is not None:
            errors = (self._errors(ours, reference, data, i) for i in range(len(data.evaluation)))
        records = depth_records(ours.columns[PLANE], reference.columns[PLANE], errors, self.head.values)
        return records.with_tables(outputs=differences(ours, reference, [PLANE]))

    def comparison(self, counts: Records) -> Comparison:
        return depth_comparison(counts, max_difference=worst_of(counts["outputs"]))

    def _errors(
        self, ours: Answers, reference: Answers, data: Data, index: int
    ) -> tuple[DepthError, DepthError] | None:
        truth = self._truth(data, index)
        a, b = (depth_error(self._map(each, index), truth, self.head.values) for each in (ours, reference))
        return None if a is None or b is None else (a, b)

    def _map(self, answers: Answers, index: int) -> np.ndarray:
        """Return the depth at the original image's size."""
        return depth_of(answers.outputs(index), answers.size(index), self.setting.images, self.head)

    def _truth(self, data: Data, index: int) -> np.ndarray:
        annotation = data.truth_at(index)
        return np.asarray(annotation.load(self.head.values == "metric"))

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        return depth_changes(ours.columns[PLANE], reference.columns[PLANE], self.head.values)

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        low, median, high = Depth(answers.columns[PLANE][index], self.head.values).range
        unit = " m" if self.head.values == "metric" else ""
        return Said(f"{low:.2g} to {high:.2g}{unit}, median {median:.2g}{unit}", None)

    def panels(self, data: Data, index: int, answers: Mapping[str, Answers]) -> Panels:
        """Yield the map of every artifact in the range of the first, and the measured depth; light is near."""
        near = {name: Depth(self._map(each, index), self.head.values).nearness for name, each in answers.items()}
        first = next(iter(near.values()))
        limits = float(np.nanmin(first)), float(np.nanmax(first))
        for name, each in near.items():
            yield name, thumbnail(np.asarray(depth_picture(each, limits)))
        if data.truth is not None:
            yield "label", thumbnail(np.asarray(depth_picture(1 / self._truth(data, index))))
