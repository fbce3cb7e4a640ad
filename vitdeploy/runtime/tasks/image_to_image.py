"""Image to image: a picture from a model's output, for super-resolution, denoising, low light and similar tasks."""

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
    """How "reconstruction" [channels, height, width] becomes an 8-bit picture: `black` and `white` are the values of
    black and white; values outside are clipped."""

    black: float = 0.0
    white: float = 1.0
    in_recipes: ClassVar[tuple[str, ...] | None] = ()

    def __post_init__(self) -> None:
        if not self.black < self.white:
            raise ValueError(f"black {self.black} and white {self.white}: expected white above black")


# Two models agree on a sample if the PSNR of their pictures is at least this, in decibels: a wrong picture is far
# below.
NEAR = 25.0
# Upper limit of a reported PSNR; that of equal pictures is infinite.
MOST = 100.0


@dataclass(frozen=True, eq=False, repr=False)
class Picture:
    """The answer for one image of `size` (width, height): `pixels`, uint8 [height, width, channels], at the model's
    output size."""

    size: tuple[int, int]
    pixels: npt.NDArray[np.uint8]

    @property
    def image(self) -> Image.Image:
        """The picture as a PIL image, in mode L or RGB."""
        from PIL import Image

        return Image.fromarray(self.pixels[:, :, 0] if self.pixels.shape[2] == 1 else self.pixels)

    def to_dict(self) -> dict[str, Any]:
        """Return the picture as a PNG in Base64."""
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
    """Return uint8 [height, width, channels] from [channels, height, width]: clipped, and rounded to the nearest
    level."""
    scaled = (values.astype(np.float32) - np.float32(spec.black)) / np.float32(spec.white - spec.black)
    return np.ascontiguousarray((scaled.clip(0, 1) * np.float32(255)).round().astype(np.uint8).transpose(1, 2, 0))


def psnr(a: npt.NDArray[np.uint8], b: npt.NDArray[np.uint8]) -> float:
    """Return the peak signal-to-noise ratio of two 8-bit pictures of one shape, in decibels: 20 log10(255 / RMSE), at
    most MOST."""
    error = float(np.square(a.astype(np.float64) - b).mean())
    return min(MOST, 10 * float(np.log10(255**2 / error))) if error else MOST


def _answer(outputs: Outputs, reading: OutputReading) -> Picture:
    return Picture(reading.size, to_pixels(outputs[RECONSTRUCTION], reading.head(ImageSpec)))


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    a, b = (to_pixels(side[RECONSTRUCTION], reading.head(ImageSpec)) for side in (ours, theirs))
    return psnr(a, b) >= NEAR


def _draw(image: Image.Image, result: Picture) -> Files:
    """The picture that the model made; the input image is not drawn."""
    return {".png": png_bytes(result.image)}


def _form(outputs: Collection[str], spec: ImageSpec) -> forms.PictureForm:
    return forms.PictureForm(RECONSTRUCTION, spec.black, spec.white)


IMAGE_TO_IMAGE = DeviceTask(_answer, _same, draw=_draw, postprocess=ImageSpec, form=_form)
