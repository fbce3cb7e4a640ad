"""Image to image: target pictures, SSIM and PSNR, and whether the same picture is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from vitdeploy.data.pixels import Skipped
from vitdeploy.data.targets import Target, read_targets
from vitdeploy.document.answers import Said
from vitdeploy.errors import DataError
from vitdeploy.runtime.image_to_image import MOST, psnr, to_pixels
from vitdeploy.runtime.preprocess import decode
from vitdeploy.spec import RECONSTRUCTION, ImageSpec
from vitdeploy.tasks.adapter import Data, DataChoice, Found, ImageKit, Panel, thumbnail
from vitdeploy.verification.changes import Changes, judged
from vitdeploy.verification.collect import Answers, Column
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.image_quality import NEAR_DB, WINDOW, compare_pictures

PICTURE, RANGE = "picture", "range"
# Values so many times the range from black to white beyond it mean that this is not the range.
BEYOND = 2.0
# The longer side of a picture in a report.
SHOWN_SIDE = 288


class ImageToImageKit(ImageKit):
    kinds = ("targets", "none")

    def find(self, choice: DataChoice, skipped: Skipped | None = None) -> Found:
        if choice.annotations is None or choice.labels == "none":
            return super().find(choice, skipped)
        height, width = self.setting.images.crop
        found = read_targets(choice.path, choice.annotations, (width, height), skipped)
        return Found(found.split(**choice.numbers), found, found.annotations)

    @property
    def _head(self) -> ImageSpec:
        assert isinstance(self.setting.postprocess, ImageSpec)
        return self.setting.postprocess

    def keep(self, outputs: Mapping[str, np.ndarray], size: tuple[int, int]) -> Mapping[str, np.ndarray]:
        """The picture of 8 bits, and the least and the largest value that it was made of."""
        values = outputs[RECONSTRUCTION]
        return {PICTURE: to_pixels(values, self._head), RANGE: np.array([values.min(), values.max()], np.float64)}

    def compare(self, ours: Answers, reference: Answers, data: Data) -> Comparison:
        pictures = reference.columns[PICTURE]
        targets = None
        if data.truth is not None:
            targets = [self._target(data, i, picture.shape) for i, picture in enumerate(pictures)]
        return compare_pictures(ours.columns[PICTURE], pictures, targets)

    def unrelated(self, ours: Answers, reference: Answers, data: Data) -> Iterator[Answers]:
        """And the images themselves at the pictures' size: a model that changes little is all but its input."""
        yield from super().unrelated(ours, reference, data)
        images, pictures = self.pixels(data), reference.columns[PICTURE]
        plain = Column(len(pictures), lambda index: resized(images[index][0], pictures[index].shape))
        yield Answers({**reference.columns, PICTURE: plain})

    def _target(self, data: Data, index: int, shape: tuple[int, ...]) -> np.ndarray:
        """The target of a sample, as the model's picture is.

        Raises:
            DataError: it is of another size; or too small for SSIM.
        """
        target: Target = data.truth_at(index)
        height, width, channels = shape
        if target.size != (width, height) or min(width, height) < WINDOW:
            raise DataError(
                f"{target.path.name} is not of the size of the pictures that the model makes",
                found="{}x{} pixels".format(*target.size),
                wanted=f"{width}x{height}, of at least {WINDOW} pixels a side",
                fix="take the targets of these images at that size",
            )
        return np.asarray(decode(target.path, channels)).reshape(shape)

    def doubt(self, reference: Answers, data: Data, found: Comparison) -> str | None:
        """Whether the values are of another range than is said: nearly all of a picture is then clipped."""
        low, high = np.median(reference.stacked(RANGE), axis=0)
        head = self._head
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

    def panels(self, data: Data, index: int, answers: Mapping[str, Answers]) -> Iterator[Panel]:
        """The pictures that these artifacts made, and the target."""
        for title, each in answers.items():
            yield Panel(title, thumbnail(each.columns[PICTURE][index], SHOWN_SIDE))
        if data.truth is not None:
            shape = next(iter(answers.values())).columns[PICTURE][index].shape
            yield Panel("label", thumbnail(self._target(data, index, shape), SHOWN_SIDE))

    def truth_of(self, data: Data, index: int, labels: Sequence[str] | None) -> str | None:
        if data.truth is None:
            return None
        target: Target = data.truth_at(index)
        return target.path.name


def resized(pixels: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """An image, uint8 [h, w, channels], as a picture of another shape, bicubically; grey or in colour as that is."""
    from PIL import Image

    height, width, channels = shape
    image = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    image = image.convert("L" if channels == 1 else "RGB").resize((width, height), Image.Resampling.BICUBIC)
    return np.asarray(image).reshape(shape)
