"""Preprocessing and tensors, as bundles hold them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from vitdeploy.spec.coding import SPARSE

# --- From a decoded image to a model's input --------------------------------------------------------------------------


Interpolation = Literal["nearest", "bilinear", "bicubic", "lanczos"]
Fit = Literal["stretch", "cover", "contain", "topdown", "longest-pad"]
CropRounding = Literal["even", "down"]
ChannelOrder = Literal["rgb", "bgr"]
# Each fit in words, followed by a size.
RESIZING: dict[Fit, str] = {
    "stretch": "resize to",
    "cover": "cover",
    "contain": "fit into",
    "topdown": "cut out a box to",
    "longest-pad": "resize and pad to",
}


@dataclass(frozen=True)
class PreprocessSpec:
    """From a decoded image to the model's input.

    An integer `resize` scales the short side to this size and keeps the aspect ratio. (height, width) scales both
    sides, by `fit`: "stretch" to exactly this size, ignoring the aspect ratio; "cover" by the smallest factor at which
    the image covers it; "contain" by the largest factor at which the image fits into it. All are antialiased. Then a
    centre crop of `crop` (height, width) pixels is taken, with black padding around a smaller image, and pixel values x
    in 0..255 become (x / 255 - mean) / std per channel. The number of channels is the length of `mean`: 1 for grey, 3
    for colour. Images and pixels are always RGB; with `channel_order` "bgr" the model's input has reversed channels,
    and `mean` and `std` are in the order of the model's channels. A model that scales pixels itself and takes them in
    0..255 has mean 0 and std 1 / 255.

    With `fit` "topdown" the model sees one object: a box in the image, or the whole image (`runtime.topdown`). With
    "longest-pad" the image is scaled by the largest factor at which it fits into both sides, and placed at the top
    left; the padding has the grey level `fill`, or by default the levels closest to `mean`, which are about 0 for the
    model.

    `interpolation` is the filter of the scaling. If the crop offset is half a pixel, `crop_rounding` rounds it to
    "even", as in torchvision and timm, or "down", as in transformers.
    """

    resize: int | tuple[int, int]
    crop: tuple[int, int]
    interpolation: Interpolation = "bicubic"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    fit: Fit = "stretch"
    crop_rounding: CropRounding = "even"
    fill: int | None = field(default=None, metadata=SPARSE)
    channel_order: ChannelOrder = field(default="rgb", metadata=SPARSE)

    def __post_init__(self) -> None:
        if self.fit == "topdown" and self.resize != self.crop:
            raise ValueError(f"resize {self.resize}: topdown cuts out a box of {self.crop[0]}x{self.crop[1]} pixels")
        if self.fit == "longest-pad" and self.resize != self.crop:
            raise ValueError(f"crop {self.crop[0]}x{self.crop[1]}: must equal resize {self.resize} with longest-pad")

        if self.fill is not None and (self.fit != "longest-pad" or not 0 <= self.fill <= 255):
            raise ValueError(f"fill {self.fill}: expected a grey level from 0 to 255, only with longest-pad")
        if self.channel_order == "bgr" and self.channels != 3:
            raise ValueError(f"channel_order bgr needs 3 channels, not {self.channels}")

    @property
    def channels(self) -> int:
        return len(self.mean)

    @property
    def statistics(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """`mean` and `std` in the order of the pixels, RGB."""
        step = -1 if self.channel_order == "bgr" else 1
        return self.mean[::step], self.std[::step]

    @property
    def raw(self) -> bool:
        """Whether the model takes unscaled pixels 0..255."""
        return not any(self.mean) and all(abs(255 * value - 1) < 1e-4 for value in self.std)

    def same_scale(self, other: PreprocessSpec) -> bool:
        """Whether equal pixels become equal inputs."""
        return (self.mean, self.std, self.channel_order) == (other.mean, other.std, other.channel_order)

    @property
    def normalisation(self) -> str:
        """The normalisation of pixel values, in words."""
        mean, std = (
            " ".join(f"{value:.4g}" for value in (values[:1] if len(set(values)) == 1 else values))
            for values in (self.mean, self.std)
        )
        scale = "pixels 0..255" if self.raw else f"mean {mean}, std {std}"
        return f"{scale}, channels BGR" if self.channel_order == "bgr" else scale


# --- Inputs and outputs by name, dtype and shape ----------------------------------------------------------------------


@dataclass(frozen=True)
class TensorSpec:
    """Name, numpy dtype name and shape of one input or output; a string in the shape is a dynamic axis."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]

    def with_batch(self, batch: int) -> TensorSpec:
        """The same tensor with its leading axis, if dynamic, set to `batch`."""
        if self.shape and isinstance(self.shape[0], str):
            return dataclasses.replace(self, shape=(batch, *self.shape[1:]))
        return self

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype}[{', '.join(str(size) for size in self.shape)}]"


def last_axis(outputs: Iterable[TensorSpec], name: str) -> int | None:
    """The size of the last axis of the output `name`; None if the output does not exist or its size is open."""
    size = next((tensor.shape[-1] for tensor in outputs if tensor.name == name), None)
    return size if isinstance(size, int) else None
