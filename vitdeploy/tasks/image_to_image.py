"""Image-to-image models: quality of their pictures, and differences from the original's."""

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
from vitdeploy.verification import comparison, intervals
from vitdeploy.verification.changes import Changes, judged
from vitdeploy.verification.records import Answers, LazyColumn

# --- Compares an image-to-image model's pictures with the original's, and both with target pictures -------------------


Pixels = npt.NDArray[np.uint8]

# Pictures this close differ by 2.55 of 255 grey levels (RMS), which is invisible.
NEAR_DB = 40.0
# Parameters of SSIM, as in its paper: deviation and size of the window, and two constants.
SIGMA, WINDOW = 1.5, 11
C1, C2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2


@dataclass(frozen=True, kw_only=True)
class ImageComparison(comparison.Comparison):
    """Pictures against the original's. The metric is the mean SSIM with the targets, in percent (100 if equal).

    drop and `psnr_drop` (in decibels) have Student's paired interval of the mean over images.
    agreement: percent of pictures with a PSNR of at least 40 dB to the original's, with its Wilson interval.
    psnr, reference_psnr: mean PSNR with the targets, in decibels; 100 for equal pictures.
    psnr_to_original_mean, psnr_to_original_min: between the artifact's and the original's pictures.
    max_difference: of the pictures, divided by 255.
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
    """Compare uint8 [height, width, channels] of the artifact, of the original and, if known, the targets.

    Raises:
        ValueError: no picture, or pictures with different shapes.
    """
    n = len(reference)
    sides = (artifact, reference) if targets is None else (artifact, reference, targets)
    if not n or any(len({each.shape for each in row}) > 1 for row in zip(*sides, strict=True)):
        raise ValueError(f"{n} pictures, or pictures with different shapes")
    apart = np.array([psnr(a, b) for a, b in zip(artifact, reference, strict=True)])
    worst = max(int(np.abs(a.astype(np.int16) - b).max()) for a, b in zip(artifact, reference, strict=True))
    return ImageComparison(
        n=n,
        **comparison.counted_agreement(int((apart >= NEAR_DB).sum()), n),
        agreement_of=f"pictures with a PSNR of {NEAR_DB:g} dB or more to the original's",
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
    """Return the mean of values within -most..most, and its 95 % interval (Student 1908); -most..most for a single
    value."""
    mean = float(values.mean())
    if len(values) < 2:
        return mean, (-most, most)
    reach = float(stats.t.ppf(0.975, len(values) - 1) * values.std(ddof=1) / np.sqrt(len(values)))
    return mean, (max(-most, mean - reach), min(most, mean + reach))


def ssim(a: Pixels, b: Pixels) -> float:
    """Return the structural similarity of two pictures of equal shape with sides of 11 or more pixels: -1..1, mean over
    channels.

    Wang et al. 2004, "Image quality assessment: from error visibility to structural similarity", IEEE Transactions on
    Image Processing 13:600-612, equation 13 with its Gaussian window, where it lies within the picture. (Implemented
    here to avoid a dependency on scikit-image.)
    """
    x, y = a.astype(np.float64), b.astype(np.float64)
    mean_x, mean_y = _window(x), _window(y)
    var_x, var_y = _window(x * x) - mean_x**2, _window(y * y) - mean_y**2
    covariance = _window(x * y) - mean_x * mean_y
    luminance = (2 * mean_x * mean_y + C1) / (mean_x**2 + mean_y**2 + C1)
    return float((luminance * (2 * covariance + C2) / (var_x + var_y + C2)).mean())


def _window(values: intervals.Floats) -> intervals.Floats:
    """Return the weighted mean of the 11x11 pixels around each pixel with a full window."""
    reach = WINDOW // 2
    weights = np.exp(-0.5 * (np.arange(-reach, reach + 1) / SIGMA) ** 2)
    weights /= weights.sum()
    for axis in (0, 1):
        values = correlate1d(values, weights, axis=axis)
    return values[reach : len(values) - reach, reach : values.shape[1] - reach]


# --- Target pictures: the expected output for each image, in a folder with the same names -----------------------------
# targets/a.png belongs to images/a.jpg: paths below the folders are matched without their suffixes.


@dataclass(frozen=True)
class TargetPicture:
    """The file of a target, and its size (width, height)."""

    path: Path
    size: tuple[int, int]

    def content(self) -> bytes:
        return self.path.read_bytes()


def read_targets(
    images: Path, targets: Path, size: tuple[int, int], skipped: decoding.Skipped | None = None
) -> annotations.AnnotatedSet[TargetPicture]:
    """Return the images below `images` with their targets below `targets`.

    All images must have the `size` (width, height) of the model's input, and all targets one size: a resized image
    would not match its target.

    Unreadable images are skipped and added to `skipped`; without `skipped` they are an error.

    Raises:
        MissingFileError: a folder does not exist.
        DataError: no image has a target, or one has several; or a size differs.
        ImageError: an unreadable image and `skipped` is None, or an unreadable target.
    """
    paths, named = [sample.path for sample in scan(images, "none")[0]], _by_name(targets)
    pictures: dict[Path, TargetPicture] = {}
    for path in paths:
        own = named.get(_name(path, images))
        frame = annotations.frame_or_skip(path, skipped) if own is not None else None
        if own is None or frame is None:
            continue
        if frame.size != size:
            raise DataError(
                f"{path.name} does not have the model's input size, so its target would not match",
                found="{}x{} pixels".format(*frame.size),
                expected=f"{size[0]}x{size[1]}",
                fix="crop images and targets to it, or build the model for their size (--image-size HEIGHTxWIDTH)",
            )
        pictures[path] = TargetPicture(own, image_frame(own).size)
    if not pictures:
        raise annotations.nothing_annotated(
            images, targets, f"no {_name(paths[0], images)}, and no target for any other image"
        )
    _require_one_size([*pictures.values()])
    samples = tuple(Sample(path, None) for path in pictures)
    return annotations.AnnotatedSet(images, samples, pictures, (), len(paths) - len(pictures))


def _name(path: Path, folder: Path) -> str:
    return path.relative_to(folder).with_suffix("").as_posix()


def _by_name(targets: Path) -> dict[str, Path]:
    """Return the files of a target folder by name. Raises DataError if two have the same name."""
    if not targets.is_dir():
        raise MissingFileError(f"no target folder at {targets}", fix="check the path of the targets")
    named: dict[str, Path] = {}
    for path in sorted(targets.rglob("*")):
        if path.suffix.lower() not in SUFFIXES or not path.is_file():
            continue
        if (other := named.setdefault(_name(path, targets), path)) != path:
            raise DataError("two targets have the same name", found=f"{other}, {path}", fix="keep one per image")
    return named


def _require_one_size(targets: list[TargetPicture]) -> None:
    other = next((target for target in targets if target.size != targets[0].size), None)
    if other is not None:
        raise DataError(
            "the targets have different sizes, but a model produces one size",
            found=f"{targets[0].path.name} {'{}x{}'.format(*targets[0].size)}, "
            f"{other.path.name} {'{}x{}'.format(*other.size)}",
            expected="one size",
            fix="remove targets of other sizes, with their images",
        )


# --- Image to image: target pictures, SSIM and PSNR, and agreement of the pictures ------------------------------------


PICTURE, RANGE = "picture", "range"
# Values outside black..white by more than this multiple of the range show that the range is wrong.
BEYOND = 2.0
# The longer side of a picture in a report.
SHOWN_SIDE = 288


class ImageToImageAdapter(ImageAdapter):
    kinds = ("targets", "none")
    compared = ImageComparison
    metrics = (Metric("SSIM", "SSIM is the structural similarity with the target pictures; 100 if equal."),)
    measures = (
        Measure("PSNR, dB", "psnr", original=True),
        Measure("PSNR drop, dB", "psnr_drop", interval="psnr_drop_ci95"),
        Measure("PSNR to the original, mean, dB", "psnr_to_original_mean"),
        Measure("PSNR to the original, least, dB", "psnr_to_original_min"),
    )
    head: ImageSpec

    def annotated(
        self, choice: DataChoice, place: Path, skipped: decoding.Skipped | None
    ) -> annotations.AnnotatedSet[TargetPicture]:
        height, width = self.setting.images.crop
        return read_targets(choice.path, place, (width, height), skipped)

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """Return the 8-bit picture, and the least and largest value it was made from."""
        values = outputs[RECONSTRUCTION]
        return {PICTURE: to_pixels(values, self.head), RANGE: np.array([values.min(), values.max()], np.float64)}

    def compare(self, ours: Answers, reference: Answers, data: Data) -> comparison.Comparison:
        pictures = reference.columns[PICTURE]
        targets = None
        if data.truth is not None:
            targets = [self._target(data, i, picture.shape) for i, picture in enumerate(pictures)]
        return compare_pictures(ours.columns[PICTURE], pictures, targets)

    def unrelated(self, ours: Answers, reference: Answers, data: Data) -> Iterator[Answers]:
        """Also yields the images themselves at the pictures' size: a model that changes little nearly returns its
        input."""
        yield from super().unrelated(ours, reference, data)
        images, pictures = self.pixels(data), reference.columns[PICTURE]
        plain = LazyColumn(len(pictures), lambda index: resized(images[index][0], pictures[index].shape))
        yield Answers({**reference.columns, PICTURE: plain})

    def _target(self, data: Data, index: int, shape: tuple[int, ...]) -> np.ndarray:
        """Return the target of a sample, in the form of the model's picture.

        Raises:
            DataError: its size differs, or it is too small for SSIM.
        """
        target: TargetPicture = data.truth_at(index)
        height, width, channels = shape
        if target.size != (width, height) or min(width, height) < WINDOW:
            raise DataError(
                f"{target.path.name} does not have the size of the model's output",
                found="{}x{} pixels".format(*target.size),
                expected=f"{width}x{height}, with at least {WINDOW} pixels per side",
                fix="provide targets of that size",
            )
        return np.asarray(decode(target.path, channels)).reshape(shape)

    def doubt(self, reference: Answers, data: Data, found: comparison.Comparison) -> str | None:
        """Check whether the value range is wrong: then most of a picture is clipped."""
        low, high = np.median(reference.stacked(RANGE), axis=0)
        head = self.head
        span = head.white - head.black
        if high <= head.white + BEYOND * span and low >= head.black - BEYOND * span:
            return None
        return (
            f"the original's values reach from {low:.4g} to {high:.4g} in most pictures, but {head.black:g} is set as "
            f"black and {head.white:g} as white (postprocess: black, white)"
        )

    def changes(self, ours: Answers, reference: Answers, data: Data) -> Changes:
        """Return the changed pictures: those below 40 dB to the original's; the fewer decibels, the worse."""
        pairs = zip(ours.columns[PICTURE], reference.columns[PICTURE], strict=True)
        apart = np.array([psnr(a, b) for a, b in pairs], np.float64)
        return judged(apart < NEAR_DB, 1 - apart / MOST)

    def show(self, answers: Answers, index: int, labels: Sequence[str] | None) -> Said:
        return Said(f"mean level {answers.columns[PICTURE][index].mean():.0f} of 255", None)

    def picture(self, data: Data, index: int) -> bytes:
        return thumbnail(self.pixels(data)[index][0], SHOWN_SIDE)

    def panels(self, data: Data, index: int, answers: Mapping[str, Answers]) -> Panels:
        """Yield the pictures that these artifacts made, and the target."""
        for title, each in answers.items():
            yield title, thumbnail(each.columns[PICTURE][index], SHOWN_SIDE)
        if data.truth is not None:
            shape = next(iter(answers.values())).columns[PICTURE][index].shape
            yield "label", thumbnail(self._target(data, index, shape), SHOWN_SIDE)

    def truth_line(self, truth: TargetPicture, labels: Sequence[str] | None) -> str:
        return truth.path.name


def resized(pixels: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Return an image, uint8 [h, w, channels], resized bicubically to another shape; grey or colour as that shape."""
    height, width, channels = shape
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    image = image.convert("L" if channels == 1 else "RGB").resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image).reshape(shape)
