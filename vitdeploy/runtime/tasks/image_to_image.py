"""From the output of an image-to-image model to a picture: super-resolution, denoising, low light and their kin."""

from __future__ import annotations

import base64
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.masks import png_bytes
from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.task import DeviceTask, Files, OutputReading, Outputs
from vitdeploy.spec import OutputSpec

if TYPE_CHECKING:
    from PIL import Image

RECONSTRUCTION = "reconstruction"


@dataclass(frozen=True)
class ImageSpec(OutputSpec):
    """From "reconstruction" [channels, height, width] to a picture of 8 bits: the value that is black, and the one that
    is white; what is beyond them is clipped."""

    black: float = 0.0
    white: float = 1.0
    in_recipes: ClassVar[tuple[str, ...] | None] = ()

    def __post_init__(self) -> None:
        if not self.black < self.white:
            raise ValueError(f"black {self.black} and white {self.white}: expected white above black")


# Two models agree on a sample if their pictures are at least this near, in decibels of PSNR: a wrong one is far off.
NEAR = 25.0
# What is said of pictures that are nearer than this, as equal ones are, whose PSNR has no bound.
MOST = 100.0


@dataclass(frozen=True, eq=False, repr=False)
class Picture:
    """The answer for one image of `size` (width, height): uint8 [height, width, channels], of the model's own size."""

    size: tuple[int, int]
    pixels: npt.NDArray[np.uint8]

    @property
    def image(self) -> Image.Image:
        """The picture as Pillow's, of mode L or RGB."""
        from PIL import Image

        return Image.fromarray(self.pixels[:, :, 0] if self.pixels.shape[2] == 1 else self.pixels)

    def to_dict(self) -> dict[str, Any]:
        """The picture as a PNG in base64."""
        height, width, channels = self.pixels.shape
        png = base64.b64encode(png_bytes(self.image)).decode("ascii")
        return {"width": width, "height": height, "channels": channels, "png": png}

    def __str__(self) -> str:
        height, width, channels = self.pixels.shape
        kind = "grey" if channels == 1 else "RGB"
        return f"a picture of {width}x{height}, {kind}, mean level {self.pixels.mean():.0f} of 255"

    def __repr__(self) -> str:
        return f"<Picture: {self}>"


def to_pixels(values: npt.NDArray[Any], spec: ImageSpec) -> npt.NDArray[np.uint8]:
    """uint8 [height, width, channels] of [channels, height, width]: clipped, and rounded to the nearest level."""
    scaled = (values.astype(np.float32) - np.float32(spec.black)) / np.float32(spec.white - spec.black)
    return np.ascontiguousarray((scaled.clip(0, 1) * np.float32(255)).round().astype(np.uint8).transpose(1, 2, 0))


def psnr(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> float:
    """The peak signal-to-noise ratio of two pictures of 8 bits and one shape, in decibels: 20 log10(255 / RMSE), and
    MOST where that is more."""
    error = float(np.square(a.astype(np.float64) - b).mean())
    return min(MOST, 10 * float(np.log10(255**2 / error))) if error else MOST


def _answer(outputs: Outputs, reading: OutputReading) -> Picture:
    return Picture(reading.size, to_pixels(outputs[RECONSTRUCTION], reading.head(ImageSpec)))


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    a, b = (to_pixels(side[RECONSTRUCTION], reading.head(ImageSpec)) for side in (ours, theirs))
    return psnr(a, b) >= NEAR


def _draw(image: Image.Image, result: Picture) -> Files:
    """The picture that the model made; the image is no part of it."""
    return {".png": png_bytes(result.image)}


def _form(outputs: Collection[str], spec: ImageSpec) -> forms.PictureForm:
    return forms.PictureForm(RECONSTRUCTION, spec.black, spec.white)


IMAGE_TO_IMAGE = DeviceTask(_answer, _same, draw=_draw, postprocess=ImageSpec, form=_form)
