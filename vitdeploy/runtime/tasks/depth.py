"""From a depth model's output for one image to a value for every pixel of the original image."""

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
# What is said where a graph or a module does not say it.
INVERSE_ASSUMED = "the depth is taken for relative inverse depth (postprocess: {values: metric} says otherwise)"


@dataclass(frozen=True)
class DepthSpec(OutputSpec):
    """From "depth" [height, width] of a model to a value for every pixel of the image.

    `values` "inverse": disparity, larger is nearer, known up to a scale and a shift (arXiv 1907.01341); "metric":
    metres. `resize`: how the library's own post-processing enlarges it, without antialiasing. `max_depth`: the largest
    depth that the model can say, in metres; None where it says none.
    """

    values: DepthValues = "inverse"
    resize: DepthResize = "bicubic"
    max_depth: float | None = field(default=None, metadata=within(gt=0))
    in_recipes: ClassVar[tuple[str, ...] | None] = ()


Array = npt.NDArray[Any]

# Two values of a pixel are alike if neither is larger than the other by more than this factor: delta-1 of arXiv
# 1406.2283, section 4.2.
ALIKE = 1.25
# A disparity below this share of the image's largest is as good as infinitely far: ratios say nothing there.
FAR = 0.01
# Two maps agree if so large a share of their pixels is alike.
SAME_SHARE = 0.5
LARGEST = 65535
# Near to far, as RGB: light to dark, so that it reads without colours too.
SHADES = np.array([(252, 253, 191), (252, 137, 97), (183, 55, 121), (81, 18, 124), (0, 0, 4)], np.float64)


@dataclass(frozen=True, eq=False, repr=False)
class Depth:
    """The answer for one image. map: float32 [height, width]; not a number where the model's input does not reach.

    `values` "metric": metres. "inverse": disparity, larger is nearer, known up to a scale and a shift only: compare
    within an image, not between two.
    """

    map: npt.NDArray[np.float32]
    values: DepthValues

    @property
    def nearness(self) -> Array:
        """A value that grows the nearer a pixel is."""
        return self.map if self.values == "inverse" else -self.map

    @property
    def range(self) -> tuple[float, float, float]:
        """The least, the median and the largest value."""
        known = self.map[np.isfinite(self.map)]
        return (float(known.min()), float(np.median(known)), float(known.max())) if known.size else (0.0, 0.0, 0.0)

    def png(self) -> bytes:
        """A PNG of 16 bits: millimetres, up to 65.535 m; of disparity, from the least (0) to the largest (65535)."""
        from PIL import Image

        low, _, high = self.range
        scaled = 1000 * self.map if self.values == "metric" else (self.map - low) * (LARGEST / ((high - low) or 1.0))
        whole = np.nan_to_num(scaled, nan=0.0).clip(0, LARGEST).round().astype(np.uint16)
        return masks.png_bytes(Image.fromarray(whole))

    def to_dict(self) -> dict[str, Any]:
        """Everything but the pixels of the map."""
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
    """float32 [height, width] at the original image's `size` (width, height).

    The same function as `post_process_depth_estimation` of transformers' DPTImageProcessor, where the model's input
    shows the whole image.
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
    """The share of the pixels, 0..1, whose two values are alike (see ALIKE). What lies below FAR of the largest
    disparity of theirs counts as that far."""
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
    """A map of how near pixels are, [height, width], light is near, between these limits, by default the farthest and
    the nearest of the map; black where it is not finite."""
    from PIL import Image

    known = np.isfinite(nearness)
    low, high = limits or ((float(nearness[known].min()), float(nearness[known].max())) if known.any() else (0.0, 0.0))
    share = np.where(known, (nearness - low) / (high - low or 1.0), 0.0).clip(0, 1)
    position = (1 - share) * (len(SHADES) - 1)
    channels = [np.interp(position, np.arange(len(SHADES)), SHADES[:, channel]) for channel in range(3)]
    return Image.fromarray((np.stack(channels, axis=-1) * known[..., None]).round().astype(np.uint8))


def _draw(image: Image.Image, result: Depth) -> Files:
    """The depth in colours, light is near; the numbers, and as a PNG of 16 bits."""
    return {
        ".png": masks.png_bytes(depth_picture(result.nearness)),
        ".npy": drawing.npy_bytes(result.map),
        ".depth.png": result.png(),
    }


def _form(outputs: Collection[str], spec: DepthSpec) -> forms.DepthForm:
    return forms.DepthForm("depth", spec.resize, spec.values)


DEPTH = DeviceTask(_answer, _same, draw=_draw, postprocess=DepthSpec, form=_form)
