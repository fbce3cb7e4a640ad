"""Pictures of pictures: their differences and quality."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy import stats
from scipy.ndimage import correlate1d

from vitdeploy.data import annotations, decoding
from vitdeploy.data.folder import Sample, scan
from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.runtime.preprocess import SUFFIXES, decode, image_frame
from vitdeploy.runtime.tasks.image_to_image import MOST, RECONSTRUCTION, ImageSpec, psnr, to_pixels
from vitdeploy.tasks.adapter import Data, DataChoice, ImageAdapter, Panels, thumbnail
from vitdeploy.tasks.answers import Measure, Metric, Said
from vitdeploy.tasks.images import FoundData
from vitdeploy.verification import comparison, intervals
from vitdeploy.verification.changes import Changes, judged
from vitdeploy.verification.records import Answers, LazyColumn

# --- Compares an image-to-image model's pictures with the original's, and both with target pictures -------------------


Pixels = npt.NDArray[np.uint8]

# Pictures this near differ by 2.55 of 255 grey levels (RMS), which nobody sees.
NEAR_DB = 40.0
# Of SSIM, as in its paper: the deviation and the size of the window, and the two constants.
SIGMA, WINDOW = 1.5, 11
C1, C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2


@dataclass(frozen=True, kw_only=True)
class ImageComparison(comparison.Comparison):
    """Pictures against the original's. The metric is the mean SSIM with the targets, in percent (100 of equal ones).

    drop has Student's paired interval of the mean over images; so has `psnr_drop`, in decibels.
    agreement: percent of pictures of at least 40 dB with the original's, with its Wilson interval.
    psnr, reference_psnr: mean PSNR with the targets, in decibels; 100 of equal pictures.
    psnr_to_original_mean, psnr_to_original_min: between the artifact's and the original's pictures.
    max_difference: of the pictures, in shares of 255 levels.
    """

    psnr_to_original_mean: float
    psnr_to_original_min: float
    psnr: float | None = None
    reference_psnr: float | None = None
    psnr_drop: float | None = None
    psnr_drop_ci95: tuple[float, float] | None = None


def compare_pictures(
    artifact: Sequence[Pixels], reference: Sequence[Pixels], targets: Sequence[Pixels] | None
) -> ImageComparison:
    """Compare uint8 [height, width, channels] of the artifact, of the original and, where known, the targets.

    Raises:
        ValueError: no picture, or pictures of other shapes.
    """
    n = len(reference)
    sides = (artifact, reference) if targets is None else (artifact, reference, targets)
    if not n or any(len({each.shape for each in row}) > 1 for row in zip(*sides, strict=True)):
        raise ValueError(f"{n} pictures, or pictures of other shapes")
    apart = np.array([psnr(a, b) for a, b in zip(artifact, reference, strict=True)])
    worst = max(int(np.abs(a.astype(np.int16) - b).max()) for a, b in zip(artifact, reference, strict=True))
    return ImageComparison(
        n=n,
        **comparison.counted_agreement(int((apart >= NEAR_DB).sum()), n),
        agreement_of=f"pictures of {NEAR_DB:g} dB or more with the original's",
        max_difference=worst / 255,
        psnr_to_original_mean=float(apart.mean()),
        psnr_to_original_min=float(apart.min()),
        **({"metric": None} if targets is None else _accuracy(artifact, reference, targets)),
    )


def _accuracy(artifact: Sequence[Pixels], reference: Sequence[Pixels], targets: Sequence[Pixels]) -> comparison.Fields:
    ours, theirs = (
        np.array([(100 * ssim(a, t), psnr(a, t)) for a, t in zip(side, targets, strict=True)])
        for side in (artifact, reference)
    )
    drop, drop_ci95 = mean_with_interval((theirs - ours)[:, 0], 200.0)
    psnr_drop, psnr_drop_ci95 = mean_with_interval((theirs - ours)[:, 1], MOST)
    return {
        "metric": "SSIM",
        "value": float(ours[:, 0].mean()),
        "reference_value": float(theirs[:, 0].mean()),
        "drop": drop,
        "drop_ci95": drop_ci95,
        "psnr": float(ours[:, 1].mean()),
        "reference_psnr": float(theirs[:, 1].mean()),
        "psnr_drop": psnr_drop,
        "psnr_drop_ci95": psnr_drop_ci95,
    }


def mean_with_interval(values: intervals.Floats, most: float) -> tuple[float, tuple[float, float]]:
    """The mean of values within -most..most, and its 95 % interval (Student 1908); all that can be of one value."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, (-most, most)
    reach = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return mean, (max(-most, mean - reach), min(most, mean + reach))


def ssim(a: Pixels, b: Pixels) -> float:
    """The structural similarity of two pictures of one shape, sides of 11 pixels and more: -1..1, mean over channels.

    Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity", IEEE Transactions on
    Image Processing 13:600-612, equation 13 with its Gaussian window, where that lies within the picture. (For this one
    function scikit-image would be one more package.)
    """
    x, y = a.astype(np.float64), b.astype(np.float64)
    mean_x, mean_y = _window(x), _window(y)
    var_x, var_y = _window(x * x) - mean_x**2, _window(y * y) - mean_y**2
    covariance = _window(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + C1) / (mean_x**2 + mean_y**2 + C1)
    return float((luminance * (2 * covariance + C2) / (var_x + var_y + C2)).mean())


def _window(values: intervals.Floats) -> intervals.Floats:
    """The weighted mean of the 11x11 pixels around each that has so many."""
    reach = WINDOW // 2
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / SIGMA) ** 2)
    weights /= weights.sum()
    for axis in (0, 1):
        values = correlate1d(values, weights, axis=axis)
    return values[reach : len(values) - reach, reach : values.shape[1] - reach]


# --- Target pictures: for each image the one that a model is to make of it, in a folder of the same names -------------
# targets/a.png belongs to images/a.jpg: what counts is the path below the folder without its suffix.


@dataclass(frozen=True)
class TargetPicture:
    """The file of a target, and its size (width, height)."""

    path: Path
    size: tuple[int, int]

    def content(self) -> bytes:
        """Bytes that differ where two targets differ."""
        return self.path.read_bytes()


def read_targets(
    images: Path, targets: Path, size: tuple[int, int], skipped: decoding.Skipped | None = None
) -> annotations.AnnotatedSet[TargetPicture]:
    """The images below `images` with their targets below `targets`.

    All images are to be of `size` (width, height), the model's input, and all targets of one size: an image that is
    resized would be compared with a picture of something else.

    With `skipped` given, unreadable images are noted there and left out; without, they are an error.

    Raises:
        MissingFileError: a folder is not there.
        DataError: no image has a target, or one has several; or one is of another size.
        ImageError: an unreadable image and `skipped` is None, or an unreadable target.
    """
    paths, named = [sample.path for sample in scan(images, "none")[0]], _by_name(targets)
    found: dict[Path, TargetPicture] = {}
    for path in paths:
        own = named.get(_name(path, images))
        frame = annotations.frame_or_skip(path, skipped) if own is not None else None
        if own is None or frame is None:
            continue
        if frame.size != size:
            raise DataError(
                f"{path.name} is not of the size that the model takes, and its target would be of something else",
                found="{}x{} pixels".format(*frame.size),
                expected=f"{size[0]}x{size[1]}",
                fix="cut images and targets to it, or take the model at their size (--image-size HEIGHTxWIDTH)",
            )
        found[path] = TargetPicture(own, image_frame(own).size)
    if not found:
        raise annotations.nothing_annotated(
            images, targets, f"no {_name(paths[0], images)}, nor a file for another image"
        )
    _require_one_size([*found.values()])
    samples = tuple(Sample(path, None) for path in found)
    return annotations.AnnotatedSet(images, samples, found, (), len(paths) - len(found))


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).with_suffix("").as_posix()


def _by_name(targets: Path) -> dict[str, Path]:
    """The files of a folder of targets. Raises DataError where two of them have one name."""
    if not targets.is_dir():
        raise MissingFileError(f"no folder of targets at {targets}", fix="check the path of the targets")
    named: dict[str, Path] = {}
    for path in sorted(targets.rglob("*")):
        if path.suffix.lower() not in SUFFIXES or not path.is_file():
            continue
        if (other := named.setdefault(_name(path, targets), path)) != path:
            raise DataError("two targets have one name", found=f"{other}, {path}", fix="leave one for each image")
    return named


def _require_one_size(targets: list[TargetPicture]) -> None:
    other = next((each for each in targets if each.size != targets[0].size), None)
    if other is not None:
        raise DataError(
            "the targets are of several sizes, and a model makes pictures of one",
            found=f"{targets[0].path.name} {'{}x{}'.format(*targets[0].size)}, "
            f"{other.path.name} {'{}x{}'.format(*other.size)}",
            expected="one size",
            fix="take out those of other sizes, with their images",
        )


# --- Image to image: target pictures, SSIM and PSNR, and whether the same picture is made -----------------------------


PICTURE, RANGE = "picture", "range"
# Values so many times the range from black to white beyond it mean that this is not the range.
BEYOND = 2.0
# The longer side of a picture in a report.
SHOWN_SIDE = 288


class ImageToImageAdapter(ImageAdapter):
    kinds = ("targets", "none")
    compared = ImageComparison
    metrics = (Metric("SSIM", "SSIM is the structural similarity with the target pictures; 100 of equal ones."),)
    measures = (
        Measure("PSNR, dB", "psnr", original=True),
        Measure("Drop of PSNR, dB", "psnr_drop", interval="psnr_drop_ci95"),
        Measure("PSNR with the original’s, mean, dB", "psnr_to_original_mean"),
        Measure("PSNR with the original’s, least, dB", "psnr_to_original_min"),
    )
    head: ImageSpec

    def find_annotated(self, choice: DataChoice, place: Path, skipped: decoding.Skipped | None) -> FoundData:
        height, width = self.setting.images.crop
        found = read_targets(choice.path, place, (width, height), skipped)
        return FoundData(found.split(**choice.numbers), found, found.annotations)

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """The picture of 8 bits, and the least and the largest value that it was made of."""
        values = outputs[RECONSTRUCTION]
        return {PICTURE: to_pixels(values, self.head), RANGE: np.array([values.min(), values.max()], np.float64)}

    def compare(self, ours: Answers, reference: Answers, data: Data) -> comparison.Comparison:
        pictures = reference.columns[PICTURE]
        targets = None
        if data.truth is not None:
            targets = [self._target(data, i, picture.shape) for i, picture in enumerate(pictures)]
        return compare_pictures(ours.columns[PICTURE], pictures, targets)

    def unrelated(self, ours: Answers, reference: Answers, data: Data) -> Iterator[Answers]:
        """And the images themselves at the pictures' size: a model that changes little is all but its input."""
        yield from super().unrelated(ours, reference, data)
        images, pictures = self.pixels(data), reference.columns[PICTURE]
        plain = LazyColumn(len(pictures), lambda index: resized(images[index][0], pictures[index].shape))
        yield Answers({**reference.columns, PICTURE: plain})

    def _target(self, data: Data, index: int, shape: tuple[int, ...]) -> np.ndarray:
        """The target of a sample, as the model's picture is.

        Raises:
            DataError: it is of another size; or too small for SSIM.
        """
        target: TargetPicture = data.truth_at(index)
        height, width, channels = shape
        if target.size != (width, height) or min(width, height) < WINDOW:
            raise DataError(
                f"{target.path.name} is not of the size of the pictures that the model makes",
                found="{}x{} pixels".format(*target.size),
                expected=f"{width}x{height}, of at least {WINDOW} pixels a side",
                fix="take the targets of these images at that size",
            )
        return np.asarray(decode(target.path, channels)).reshape(shape)

    def doubt(self, reference: Answers, data: Data, found: comparison.Comparison) -> str | None:
        """Whether the values are of another range than is said: nearly all of a picture is then clipped."""
        low, high = np.median(reference.stacked(RANGE), axis=0)
        head = self.head
        span = head.white - head.black
        if high <= head.white + BEYOND * span and low >= head.black - BEYOND * span:
            return None
        return (
            f"the original's values reach from {low:.4g} to {high:.4g} in most pictures, where {head.black:g} is black "
            f"and {head.white:g} is white (postprocess: black, white)"
        )

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        """Changed pictures: those below 40 dB with the original's; the fewer decibels, the worse."""
        pairs = zip(ours.columns[PICTURE], reference.columns[PICTURE], strict=True)
        apart = np.array([psnr(a, b) for a, b in pairs], np.float64)
        return judged(apart < NEAR_DB, 1 - apart / MOST)

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        return Said(f"mean level {answers.columns[PICTURE][index].mean():.0f} of 255", None)

    def picture(self, data: Data, index: int) -> bytes:
        return thumbnail(self.pixels(data)[index][0], SHOWN_SIDE)

    def panels(self, data: Data, index: int, answers: Mapping[str, Answers]) -> Panels:
        """The pictures that these artifacts made, and the target."""
        for title, each in answers.items():
            yield title, thumbnail(each.columns[PICTURE][index], SHOWN_SIDE)
        if data.truth is not None:
            shape = next(iter(answers.values())).columns[PICTURE][index].shape
            yield "label", thumbnail(self._target(data, index, shape), SHOWN_SIDE)

    def truth_line(self, truth: TargetPicture, labels: Sequence[str] | None) -> str:
        return truth.path.name


def resized(pixels: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """An image, uint8 [h, w, channels], as a picture of another shape, bicubically; grey or in colour as that is."""
    height, width, channels = shape
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    image = image.convert("L" if channels == 1 else "RGB").resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image).reshape(shape)
