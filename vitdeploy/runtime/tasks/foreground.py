"""Foreground segmentation: a matte at the image's size, the foreground share of each pixel. For background removal,
salient objects, portrait mattes and binary masks."""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.masks import png_bytes
from vitdeploy.runtime.postprocess import sigmoid
from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.task import DeviceTask, Files, OutputReading, Outputs
from vitdeploy.runtime.upsample import bands
from vitdeploy.spec import SHARE, OutputSpec, PreprocessSpec

if TYPE_CHECKING:
    from PIL import Image

FOREGROUND_OUTPUT = "foreground"
# Output names of a matte in RobustVideoMatting, models like MODNet, and transformers' VitMatte.
CERTAIN = ("foreground", "alpha", "alphas", "matte", "mattes", "pha")


@dataclass(frozen=True)
class ForegroundSpec(OutputSpec):
    """How "foreground" [1, height, width] or [height, width] becomes a matte: the foreground share, 0..1, of each
    pixel.

    `alpha` "sigmoid": the outputs are logits, whose sigmoid is the matte; "given": they are the matte, 0..1.
    `enlarge`: whether "alpha" is enlarged, bilinearly, to the size of the image, as in the code of BiRefNet, U2-Net and
    MODNet, or "logits", as in most U-Nets. `threshold`: the mask is the matte above it.
    """

    alpha: Literal["sigmoid", "given"] = "sigmoid"
    enlarge: Literal["alpha", "logits"] = "alpha"
    threshold: float = field(default=0.5, metadata=SHARE)
    in_recipes: ClassVar[tuple[str, ...] | None] = ("alpha",)

    def __post_init__(self) -> None:
        if self.alpha == "given" and self.enlarge == "logits":
            raise ValueError("enlarge: logits needs alpha: sigmoid; a model with alpha: given has no logits")

    @classmethod
    def among(cls, shapes: Mapping[str, tuple[int | str, ...]], asked: bool) -> Mapping[str, str]:
        """Return the one-channel map with a known name. If the task is requested explicitly, also the only map, or the
        only one of the largest size: smaller maps are side outputs, as in BiRefNet."""
        maps = {name: shape[-2:] for name, shape in shapes.items() if len(shape) == 2 or shape[:-2] == (1,)}
        named = [name for name in CERTAIN if name in maps]
        if named or not asked:
            return {FOREGROUND_OUTPUT: named[0]} if len(named) == 1 else {}
        if len(maps) > 1 and all(isinstance(side, int) for shape in maps.values() for side in shape):
            areas = {name: int(height) * int(width) for name, (height, width) in maps.items()}
            maps = {name: maps[name] for name, area in areas.items() if area == max(areas.values())}
        return {FOREGROUND_OUTPUT: next(iter(maps))} if len(maps) == 1 else {}

    @classmethod
    def in_words(cls) -> str:
        return "foreground, alpha or matte [batch, 1, height, width]; with --task foreground a single map of any name"

    @classmethod
    def by_range(cls, bounded: bool) -> ForegroundSpec:
        return cls("given" if bounded else "sigmoid")

    @property
    def assumed(self) -> str:
        given = self.alpha == "given"
        read, other = ("the matte, as all values are in 0..1", "sigmoid") if given else ("logits of the matte", "given")
        return f"the output is assumed to be {read}; to change that, set postprocess: {{alpha: {other}}}"


Array = npt.NDArray[Any]

# Two masks agree if both of their regions have at least this IoU.
SAME_IOU = 0.5
# If both masks are a single region, mattes agree up to this mean difference.
NEAR = 0.02


@dataclass(frozen=True, eq=False, repr=False)
class Foreground:
    """The answer for one image. matte: float32 [height, width] in 0..1 at the size of the image, the foreground share
    of each pixel; NaN outside the model's input. threshold: of `mask`, 0..1."""

    matte: npt.NDArray[np.float32]
    threshold: float

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """bool [height, width]: the pixels above the threshold."""
        return mask_of(self.matte, self.threshold)

    @property
    def share(self) -> float:
        """The share of the image's pixels in the mask, 0..1."""
        return float(self.mask.mean())

    @property
    def box(self) -> tuple[int, int, int, int] | None:
        """(left, top, right, bottom) around the mask in pixels, right and bottom exclusive; None for an empty mask."""
        rows, columns = np.flatnonzero(self.mask.any(axis=1)), np.flatnonzero(self.mask.any(axis=0))
        return (int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1) if rows.size else None

    def png(self) -> bytes:
        """Return the matte as an 8-bit grey PNG, 255 is foreground; 0 outside the model's input."""
        from PIL import Image

        return png_bytes(Image.fromarray(_levels(self.matte)))

    def cut_out(self, image: Image.Image) -> Image.Image:
        """Return the image, in mode RGB and of the matte's size, with the matte as alpha channel; colours are
        unchanged."""
        from PIL import Image

        picture = image.convert("RGB")
        picture.putalpha(Image.fromarray(_levels(self.matte)))
        return picture

    def to_dict(self) -> dict[str, Any]:
        """Return the matte as a PNG (see `png`) in Base64, and the properties of its mask."""
        height, width = self.matte.shape
        mask = {"threshold": self.threshold, "share": self.share, "box": self.box}
        return {"width": width, "height": height, **mask, "matte_png": base64.b64encode(self.png()).decode("ascii")}

    def __str__(self) -> str:
        where = "" if self.box is None else ", in {}, {} to {}, {}".format(*self.box)
        return f"foreground {100 * self.share:.1f} % of the image{where}"

    def __repr__(self) -> str:
        height, width = self.matte.shape
        return f"<Foreground: {width}x{height}: {self}>"


def mask_of(matte: Array, threshold: float) -> npt.NDArray[np.bool_]:
    """Return bool [height, width]: where a matte is above the threshold; False for NaN."""
    return np.asarray(np.nan_to_num(matte, nan=-np.inf) > threshold)


def matte_of(
    outputs: Mapping[str, Array], size: tuple[int, int], preprocess: PreprocessSpec, spec: ForegroundSpec
) -> npt.NDArray[np.float32]:
    """Return the matte, float32 [height, width] in 0..1, at the original image's `size` (width, height), enlarged
    bilinearly without antialiasing (`torch.nn.functional.interpolate`, align_corners=False); NaN outside the model's
    input."""
    plane = plane_of(outputs)
    matte = np.full((size[1], size[0]), np.nan, np.float32)
    early = spec.enlarge == "alpha"
    for rows, columns, band in bands((alpha_of(plane, spec) if early else plane)[None], size, preprocess):
        matte[rows, columns] = band[0] if early else alpha_of(band[0], spec)
    return matte


def plane_of(outputs: Mapping[str, Array]) -> npt.NDArray[np.float32]:
    """Return the model's output, float32 [height, width]."""
    output = outputs[FOREGROUND_OUTPUT]
    return output.reshape(output.shape[-2:]).astype(np.float32)


def alpha_of(plane: Array, spec: ForegroundSpec) -> Array:
    """Return the matte, 0..1, from a model's output; values outside are clipped, because INT8 rounding may exceed the
    range."""
    return sigmoid(plane) if spec.alpha == "sigmoid" else plane.clip(0, 1)


def region_iou(ours: npt.NDArray[np.bool_], theirs: npt.NDArray[np.bool_]) -> float | None:
    """Return the smaller IoU of two masks' foregrounds and backgrounds, 0..1, so that a large foreground alone does not
    make masks agree. None if both masks are a single region, which is not informative."""
    if (ours.all() and theirs.all()) or not (ours.any() or theirs.any()):
        return None
    sides = ((ours, theirs), (~ours, ~theirs))
    return min(float((a & b).sum() / max(int((a | b).sum()), 1)) for a, b in sides)


def _levels(matte: Array) -> npt.NDArray[np.uint8]:
    return np.asarray((255 * np.nan_to_num(matte, nan=0.0)).round(), np.uint8)


def _answer(outputs: Outputs, reading: OutputReading) -> Foreground:
    spec = reading.head(ForegroundSpec)
    return Foreground(matte_of(outputs, reading.size, reading.images, spec), spec.threshold)


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    spec = reading.head(ForegroundSpec)
    a, b = (alpha_of(plane_of(side), spec) for side in (ours, theirs))
    iou = region_iou(a > spec.threshold, b > spec.threshold)
    return float(np.abs(a - b).mean()) <= NEAR if iou is None else iou >= SAME_IOU


def _draw(image: Image.Image, result: Foreground) -> Files:
    """The image cut out by the matte, and the matte."""
    return {".png": png_bytes(result.cut_out(image)), ".matte.png": result.png()}


def _form(outputs: Collection[str], spec: ForegroundSpec) -> forms.MatteForm:
    return forms.MatteForm(FOREGROUND_OUTPUT, spec.alpha, spec.enlarge, float(spec.threshold))


FOREGROUND = DeviceTask(_answer, _same, draw=_draw, postprocess=ForegroundSpec, form=_form)
