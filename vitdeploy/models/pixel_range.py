"""The pixel range that a model expects, inferred from its first operators.

Graphs and modules may scale pixels themselves: x / 255, x / 127.5 - 1, (x - 123.675) / 58.395, or (x - 0.485) / 0.229
of pixels in 0..1. Everything before the first layer is linear in the image, so a few images determine it, whatever
operators it consists of and however they move channels.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from vitdeploy.spec import ChannelOrder, PreprocessSpec

Floats = npt.NDArray[np.float32]
# Maps images [1, channels, height, width] to the values that the model's first layer reads, each of any shape.
FirstValues = Callable[[Floats], Sequence[Floats]]
Range = Literal["0..255", "0..1", "-1..1"]
# mean and std of the spec that produces pixels of a range.
SCALES: dict[Range, tuple[float, float]] = {"0..255": (0.0, 1 / 255), "0..1": (0.0, 1.0), "-1..1": (0.5, 0.5)}
# ImageNet means for pixels in 0..1 in the order BGR: a model that subtracts them in this order takes BGR.
BGR = np.array([0.406, 0.456, 0.485])
OTHERWISE = "override with preprocess: in a recipe"
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Scaling:
    """The scaling of a pixel x by a model's first operators: factor x + shift, [channels] each."""

    factor: npt.NDArray[np.float64]
    shift: npt.NDArray[np.float64]

    @property
    def range(self) -> Range | None:
        """The range of x; None if the numbers do not determine it."""
        if not self.factor.all():
            return None
        mean = -self.shift / self.factor
        if (np.abs(self.factor) <= 0.05).all() or mean.max() > 1.5:
            return "0..255"
        if (np.abs(mean + 1) < 0.05).all():
            return "-1..1"
        centred = self.factor.min() > 1.2 and mean.min() >= 0.2 and mean.max() <= 0.8
        return "0..1" if centred or ((np.abs(self.factor - 255) < 1).all() and not mean.any()) else None

    @property
    def bgr(self) -> bool:
        unit = -self.shift / self.factor / (255 if self.range == "0..255" else 1)
        return len(unit) == 3 and bool((np.abs(unit - BGR) < 0.01).all())

    def __str__(self) -> str:
        numbers = (
            " ".join(f"{value:.4g}" for value in (values[:1] if np.ptp(values) == 0 else values))
            for values in (self.factor, self.shift)
        )
        return "times {}, plus {}".format(*numbers)


def scaling_of(first: FirstValues, channels: int, size: tuple[int, int]) -> Scaling | None:
    """Return the scaling before the first layer; None if nothing is scaled, or not by one number per channel."""
    blank = np.zeros((1, channels, *size), np.float32)
    marked = [blank.copy() for _ in range(channels)]
    for channel, image in enumerate(marked):
        image[:, channel] = 1
    black, *lit, white = (first(image) for image in (blank, *marked, blank + 255))
    for index, floor in enumerate(black):
        gains = [values[index].astype(np.float64) - floor for values in lit]
        expected = floor + 255 * sum(gains)
        linear = np.allclose(white[index], expected, rtol=TOLERANCE, atol=TOLERANCE)
        pairs = [_uniform(gain, floor) for gain in gains]
        known = [pair for pair in pairs if pair is not None]
        if not linear or len(known) < channels:
            continue
        factor, shift = (np.array(values) for values in zip(*known, strict=True))
        if not np.allclose(factor, 1, atol=TOLERANCE) or not np.allclose(shift, 0, atol=TOLERANCE):
            return Scaling(factor, shift)
    return None


def _uniform(gain: npt.NDArray[np.float64], floor: Floats) -> tuple[float, float] | None:
    """Return the gain and the floor of a channel if they are the same at all positions, else None."""
    reached = gain != 0
    if not reached.any():
        return None
    gains, floors = gain[reached], floor[reached]
    spread = TOLERANCE * max(float(np.abs(gains).max()), TOLERANCE)
    if np.ptp(gains) > spread or np.ptp(floors) > TOLERANCE * max(float(np.abs(floors).max()), 1):
        return None
    return float(np.median(gains)), float(np.median(floors))


def settled(
    spec: PreprocessSpec, scaling: Scaling | None, assumed: str | None
) -> tuple[PreprocessSpec, tuple[str, ...]]:
    """Return the preprocessing that suits the model's own scaling, and notes. `assumed`: the note on an assumed spec;
    None for a spec from the user or the model's files: it is kept, with a warning if it contradicts the scaling."""
    if scaling is None:
        return spec, () if assumed is None else (assumed,)
    pixels = scaling.range
    if pixels is None:
        reading = f"the model's first operators scale its input ({scaling}), but do not determine its range"
        return spec, () if assumed is None else (assumed, f"{reading}: assuming {spec.normalisation} ({OTHERWISE})")
    mean, std = SCALES[pixels]
    order: ChannelOrder = "bgr" if scaling.bgr else spec.channel_order
    named = f"{pixels} in BGR order" if scaling.bgr else pixels
    reading = f"the model's first operators scale pixels {named} ({scaling})"
    if assumed is not None:
        scale = (mean,) * spec.channels, (std,) * spec.channels
        own = dataclasses.replace(spec, mean=scale[0], std=scale[1], channel_order=order)
        return own, (f"{reading}: the preprocessing provides these; the rest is assumed ({OTHERWISE})",)
    if (fed := _fed(spec)) == pixels and order == spec.channel_order:
        return spec, ()
    contradiction = (
        f"the preprocessing gives it {fed} ({spec.normalisation}): results are wrong unless this is intended"
    )
    fix = f"set mean {mean:g}, std {std:.6g} and channel_order {order} in preprocess: to match the model"
    return spec, (f"{reading}, but {contradiction}; {fix}",)


def _fed(spec: PreprocessSpec) -> str:
    """Describe the pixel range that a spec produces."""
    low = min(-mean / std for mean, std in zip(spec.mean, spec.std, strict=True))
    high = max((1 - mean) / std for mean, std in zip(spec.mean, spec.std, strict=True))
    if high > 20:
        return "0..255"
    named = {name: (-mean / std, (1 - mean) / std) for name, (mean, std) in SCALES.items()}
    near = [name for name, ends in named.items() if np.allclose((low, high), ends, atol=0.05)]
    return near[0] if near else f"{low:.3g}..{high:.3g}"
