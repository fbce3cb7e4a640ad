"""Anomaly detection: a score for an image, and for every pixel of it, from a model's outputs.

Source: Roth et al., "Towards Total Recall in Industrial Anomaly Detection", CVPR 2022 (arXiv 2106.08265), PatchCore,
section 3.3 and equation 7 for the score, section 4.2 for the map.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime import drawing, masks, upsample
from vitdeploy.runtime.postprocess import softmax
from vitdeploy.runtime.tasks.task import DeviceTask, Files, OutputReading, Outputs
from vitdeploy.spec import OutputSpec, PreprocessSpec, within

if TYPE_CHECKING:
    from PIL import Image

DISTANCES, NEIGHBOURS = "distances", "neighbours"
# Output names of anomalib.
ANOMALY_MAP, PREDICTED_SCORE = "anomaly_map", "pred_score"


@dataclass(frozen=True)
class AnomalySpec(OutputSpec):
    """How outputs become the anomaly scores of an image and of its pixels.

    Outputs of a memory bank: "distances" [height, width] of the patches to normal ones, and "neighbours" [b], the
    distances of the most distant patch to its nearest entry (first) and to that entry's neighbours (PatchCore, arXiv
    2106.08265, equation 7). Other models: "anomaly_map" [1, height, width] and "pred_score" [], map and score.

    `threshold`: an image with a higher score is anomalous; `pixel_threshold`: the same for a pixel. `sigma` of the
    Gaussian that smooths the map, in pixels of the model's input (section 4.2 of the paper); 0 for no smoothing.
    """

    threshold: float
    pixel_threshold: float
    sigma: float = field(default=4.0, metadata=within(ge=0))
    in_recipes: ClassVar[tuple[str, ...] | None] = ()

    def __post_init__(self) -> None:
        if self.sigma < 0:
            raise ValueError(f"sigma {self.sigma:g}: expected >= 0 pixels")

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Return the outputs that can be compared element by element: all except the neighbours, which belong to one
        patch and change with the choice between two equally distant patches."""
        return [name for name in outputs if name != NEIGHBOURS]


# The spec of anomalib's exported graphs, whose scores are scaled to a threshold of 0.5.
GIVEN = AnomalySpec(threshold=0.5, pixel_threshold=0.5, sigma=0.0)


Array = npt.NDArray[Any]

# Radius of the Gaussian in sigmas: scipy.ndimage's default.
TRUNCATE = 4.0
# Colours of anomaly maps: Okabe and Ito's yellow, orange and vermilion, which is also the colour of the verdict.
HEAT = np.array([(240, 228, 66), (230, 159, 0), (213, 94, 0)], np.float64)
ALARM = (213, 94, 0)
# Heat starts at the first and is full at the second of these shares of the pixel threshold.
HEAT_FROM, HEAT_TO = 0.7, 1.2
# Two answers agree if the distance of their maps is at most this share of the norm of the reference, and their scores
# are within this factor.
SAME_MAPS, SAME_SCORES = 0.2, 1.25


@dataclass(frozen=True, eq=False, repr=False)
class Anomaly:
    """The answer for one image. score: higher is less normal; `anomalous` if above `threshold`. map: float32 [height,
    width] at the image's size, a smoothed score for every pixel, with its own `pixel_threshold`; NaN outside the
    model's input.
    """

    score: float
    threshold: float
    pixel_threshold: float
    map: npt.NDArray[np.float32]

    @property
    def anomalous(self) -> bool:
        return self.score > self.threshold

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """bool [height, width]: the pixels whose score is above `pixel_threshold`."""
        return np.asarray(np.nan_to_num(self.map, nan=-np.inf) > self.pixel_threshold)

    @property
    def peak(self) -> tuple[int, int] | None:
        """(x, y) of the pixel with the largest score; None if the model's input shows no pixel of the image."""
        if not np.isfinite(self.map).any():
            return None
        y, x = np.unravel_index(int(np.nanargmax(self.map)), self.map.shape)
        return int(x), int(y)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields except the pixels of the map."""
        height, width = self.map.shape
        verdict = {"score": self.score, "threshold": self.threshold, "anomalous": self.anomalous}
        pixels = {"pixel_threshold": self.pixel_threshold, "share": float(self.mask.mean()), "peak": self.peak}
        return {**verdict, **pixels, "width": width, "height": height}

    def __str__(self) -> str:
        verdict = "anomalous" if self.anomalous else "normal"
        where = f", most at x {self.peak[0]}, y {self.peak[1]}" if self.anomalous and self.peak else ""
        return f"{verdict}: score {self.score:.4g}, threshold {self.threshold:.4g}{where}"

    def __repr__(self) -> str:
        height, width = self.map.shape
        return f"<Anomaly: {width}x{height}: {self}>"


def image_score(outputs: Outputs) -> float:
    """Return the anomaly score of an image: the model's own, if it has one.

    From a memory bank, equation 7: the largest distance of a patch to the bank, times 1 minus the softmax over the
    distances of this patch to its nearest entry and that entry's neighbours. An entry in a sparse part of the bank is
    rare itself and gets more weight.
    """
    if PREDICTED_SCORE in outputs:
        return float(outputs[PREDICTED_SCORE].reshape(-1)[0])
    around = outputs[NEIGHBOURS].reshape(-1)
    weight = 1.0 if around.size < 2 else 1.0 - float(softmax(around)[0])
    return weight * float(outputs[DISTANCES].max())


def anomaly_map(
    outputs: Outputs, size: tuple[int, int], preprocess: PreprocessSpec, head: AnomalySpec
) -> npt.NDArray[np.float32]:
    """Return the map, float32 [height, width], at the original image's `size` (width, height); NaN outside the model's
    input.

    Distances are enlarged to the model's input and smoothed there, as in the paper, independent of the image's size.
    """
    plane = plane_of(outputs)
    if head.sigma > 0:
        plane = smoothed(plane, preprocess.crop, head.sigma)
    found = np.full((size[1], size[0]), np.nan, np.float32)
    for rows, columns, band in upsample.bands(plane[None], size, preprocess):
        found[rows, columns] = band[0]
    return found


def plane_of(outputs: Outputs) -> Array:
    """Return the scores at the model's resolution, [height, width]."""
    plane = outputs[DISTANCES if DISTANCES in outputs else ANOMALY_MAP]
    return plane.reshape(plane.shape[-2:])


def smoothed(plane: Array, size: tuple[int, int], sigma: float) -> npt.NDArray[np.float32]:
    """Return a plane [height, width], enlarged bilinearly to `size` (height, width) and smoothed by a Gaussian of
    `sigma` pixels (0: not smoothed). Both are linear and separable, so they take two matrix products."""
    rows, columns = (_weights(count, length, sigma) for count, length in zip(plane.shape, size, strict=True))
    return np.asarray(rows @ plane.astype(np.float64) @ columns.T, np.float32)


@functools.lru_cache(maxsize=8)
def _weights(count: int, length: int, sigma: float) -> npt.NDArray[np.float64]:
    """float64 [length, count]: the weight of each cell in each pixel."""
    cells = upsample.enlarged(np.eye(count)[None], (length, count))[0]
    return gaussian(cells, sigma) if sigma > 0 else cells


def gaussian(values: Array, sigma: float) -> npt.NDArray[np.float64]:
    """Return float64 [n, ...] smoothed along the first axis, mirrored at its ends (d c b a | a b c d | d c b a), like
    `scipy.ndimage.gaussian_filter1d(values, sigma, axis=0)`."""
    radius = int(TRUNCATE * sigma + 0.5)
    kernel = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    kernel /= kernel.sum()
    padded = np.pad(values.astype(np.float64), [(radius, radius), *[(0, 0)] * (values.ndim - 1)], mode="symmetric")
    found = np.zeros(values.shape)
    for start, weight in enumerate(kernel.tolist()):
        found += weight * padded[start : start + len(values)]
    return found


def _answer(outputs: Outputs, reading: OutputReading) -> Anomaly:
    head = reading.head(AnomalySpec)
    scores = anomaly_map(outputs, reading.size, reading.images, head)
    return Anomaly(image_score(outputs), head.threshold, head.pixel_threshold, scores)


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    a, b = (plane_of(each).astype(np.float64) for each in (ours, theirs))
    score, expected = (max(image_score(each), 1e-9) for each in (ours, theirs))
    near = max(score / expected, expected / score) <= SAME_SCORES
    return near and float(np.linalg.norm(a - b)) <= SAME_MAPS * max(float(np.linalg.norm(b)), 1e-9)


def heat_picture(anomaly_map: Array, limits: tuple[float, float]) -> tuple[Image.Image, Array]:
    """Return a map of anomaly scores [height, width] in colours, and its alpha per pixel, 0..1: 0 up to the first
    limit, OPACITY from the second limit, 0 if not finite."""
    from PIL import Image

    low, high = limits
    share = (np.nan_to_num(anomaly_map, nan=low).astype(np.float64) - low) / ((high - low) or 1.0)
    share = share.clip(0, 1)
    channels = [np.interp(share, np.linspace(0, 1, len(HEAT)), HEAT[:, channel]) for channel in range(3)]
    return Image.fromarray(np.stack(channels, axis=-1).round().astype(np.uint8)), drawing.OPACITY * share


def heat_limits(pixel_threshold: float) -> tuple[float, float]:
    """Return the pixel scores at which heat starts and is full."""
    return HEAT_FROM * pixel_threshold, HEAT_TO * pixel_threshold


def draw_heat(image: Image.Image, anomaly_map: Array, limits: tuple[float, float]) -> Image.Image:
    """Return a copy of the RGB image with a map of its size drawn over it; see `heat_picture`."""
    from PIL import Image

    picture, cover = heat_picture(anomaly_map, limits)
    return Image.composite(picture, image.convert("RGB"), Image.fromarray((255 * cover).round().astype(np.uint8)))


def _draw(image: Image.Image, result: Anomaly) -> Files:
    """The map as heat over the image with the verdict, and the map's values."""
    drawn = draw_heat(image, result.map, heat_limits(result.pixel_threshold))
    verdict = "anomalous" if result.anomalous else "normal"
    drawing.legend(drawn, [(verdict, ALARM if result.anomalous else drawing.LINE)])
    return {".png": masks.png_bytes(drawn), ".npy": drawing.npy_bytes(result.map)}


ANOMALY = DeviceTask(_answer, _same, draw=_draw, postprocess=AnomalySpec)
