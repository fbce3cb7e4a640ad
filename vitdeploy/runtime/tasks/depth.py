"""Depth estimation: a value for every pixel of an image, from a model's output."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime import drawing, masks
from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.task import DeviceTask, Files, OutputReading, Outputs
from vitdeploy.runtime.upsample import bands, bicubic
from vitdeploy.spec import OutputSpec, PreprocessSpec, within

if TYPE_CHECKING:
    from PIL import Image

DepthValues = Literal["inverse", "metric"]
DepthResize = Literal["bilinear", "bicubic"]
# Note for a graph or module that does not tell the kind of depth.
INVERSE_ASSUMED = "the output is assumed to be relative inverse depth; for metres, set postprocess: {values: metric}"


@dataclass(frozen=True)
class DepthSpec(OutputSpec):
    """How "depth" [height, width] becomes a value for every pixel of the image.

    `values` "inverse": disparity, larger is closer, known up to a scale and a shift (arXiv 1907.01341); "metric":
    metres. `resize`: how the library's post-processing enlarges the map, without antialiasing. `max_depth`: the model's
    largest depth in metres; None if unknown.
    """

    values: DepthValues = "inverse"
    resize: DepthResize = "bicubic"
    max_depth: float | None = field(default=None, metadata=within(gt=0))
    in_recipes: ClassVar[tuple[str, ...] | None] = ()


Array = npt.NDArray[Any]

# Two values of a pixel are alike if neither is larger than the other by more than this factor: delta-1 of arXiv
# 1406.2283, section 4.2.
ALIKE = 1.25
# A disparity below this share of the image's largest counts as infinitely far: ratios are meaningless there.
FAR = 0.01
# Two maps agree if at least this share of their pixels is alike.
SAME_SHARE = 0.5
LARGEST = 65535
# Near to far, as RGB: light to dark, so that it also reads without colours.
SHADES = np.array([(252, 253, 191), (252, 137, 97), (183, 55, 121), (81, 18, 124), (0, 0, 4)], np.float64)


@dataclass(frozen=True, eq=False, repr=False)
class Depth:
    """The answer for one image. map: float32 [height, width]; NaN outside the model's input.

    `values` "metric": metres. "inverse": disparity, larger is closer, known only up to a scale and a shift: compare
    within an image, not between images.
    """

    map: npt.NDArray[np.float32]
    values: DepthValues

    @property
    def nearness(self) -> Array:
        """A value that is larger for closer pixels."""
        return self.map if self.values == "inverse" else -self.map

    @property
    def range(self) -> tuple[float, float, float]:
        """The minimum, median and maximum."""
        known = self.map[np.isfinite(self.map)]
        return (float(known.min()), float(np.median(known)), float(known.max())) if known.size else (0.0, 0.0, 0.0)

    def png(self) -> bytes:
        """Return a 16-bit PNG: metric depth in millimetres, up to 65.535 m; disparity scaled from its minimum (0) to
        its maximum (65535)."""
        from PIL import Image

        low, _, high = self.range
        scaled = 1000 * self.map if self.values == "metric" else (self.map - low) * (LARGEST / ((high - low) or 1.0))
        whole = np.nan_to_num(scaled, nan=0.0).clip(0, LARGEST).round().astype(np.uint16)
        return masks.png_bytes(Image.fromarray(whole))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except the pixels of the map."""
        height, width = self.map.shape
        low, median, high = self.range
        values = {"values": self.values, "unit": "m" if self.values == "metric" else None}
        return {"width": width, "height": height, **values, "min": low, "median": median, "max": high}

    def __str__(self) -> str:
        low, median, high = self.range
        if self.values == "metric":
            return f"depth from {low:.2f} to {high:.2f} m, median {median:.2f} m"
        return f"relative inverse depth from {low:.4g} (far) to {high:.4g} (near), median {median:.4g}"

    def __repr__(self) -> str:
        height, width = self.map.shape
        return f"<Depth: {width}x{height}: {self}>"


def depth_of(
    outputs: Mapping[str, Array], size: tuple[int, int], preprocess: PreprocessSpec, postprocess: DepthSpec
) -> npt.NDArray[np.float32]:
    """Return the map, float32 [height, width], at the original image's `size` (width, height).

    If the model's input shows the whole image, this equals `post_process_depth_estimation` of transformers'
    DPTImageProcessor.
    """
    plane = outputs["depth"].reshape(outputs["depth"].shape[-2:])
    found = np.full((size[1], size[0]), np.nan, np.float32)
    if postprocess.resize == "bicubic":
        rows, columns, values = bicubic(plane, size, preprocess)
        found[rows, columns] = values
        return found
    for rows, columns, band in bands(plane[None], size, preprocess):
        found[rows, columns] = band[0]
    return found


def alike_share(ours: Array, theirs: Array, values: DepthValues) -> float:
    """Return the share of pixels, 0..1, whose two values are alike (see ALIKE). Disparities below FAR times the largest
    of `theirs` are raised to that value."""
    known = np.isfinite(theirs) & np.isfinite(ours)
    if not known.any():
        return 1.0
    a, b = ours[known].astype(np.float64), theirs[known].astype(np.float64)
    least = FAR * float(b.max()) if values == "inverse" else 0.0
    a, b = (np.maximum(each, max(least, 1e-9)) for each in (a, b))
    return float((np.maximum(a / b, b / a) < ALIKE).mean())


def _answer(outputs: Outputs, reading: OutputReading) -> Depth:
    head = reading.head(DepthSpec)
    return Depth(depth_of(outputs, reading.size, reading.images, head), head.values)


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    return alike_share(ours["depth"], theirs["depth"], reading.head(DepthSpec).values) >= SAME_SHARE


def depth_picture(nearness: Array, limits: tuple[float, float] | None = None) -> Image.Image:
    """Return a picture of a nearness map [height, width], light is near, between these limits (default: minimum and
    maximum of the map); black where it is not finite."""
    from PIL import Image

    known = np.isfinite(nearness)
    low, high = limits or ((float(nearness[known].min()), float(nearness[known].max())) if known.any() else (0.0, 0.0))
    share = np.where(known, (nearness - low) / (high - low or 1.0), 0.0).clip(0, 1)
    position = (1 - share) * (len(SHADES) - 1)
    channels = [np.interp(position, np.arange(len(SHADES)), SHADES[:, channel]) for channel in range(3)]
    return Image.fromarray((np.stack(channels, axis=-1) * known[..., None]).round().astype(np.uint8))


def _draw(image: Image.Image, result: Depth) -> Files:
    """The depth in colours, light is near; its values, and as a 16-bit PNG."""
    return {
        ".png": masks.png_bytes(depth_picture(result.nearness)),
        ".npy": drawing.npy_bytes(result.map),
        ".depth.png": result.png(),
    }


def _form(outputs: Collection[str], spec: DepthSpec) -> forms.DepthForm:
    return forms.DepthForm("depth", spec.resize, spec.values)


DEPTH = DeviceTask(_answer, _same, draw=_draw, postprocess=DepthSpec, form=_form)
