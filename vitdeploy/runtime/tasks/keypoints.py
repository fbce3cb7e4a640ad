"""Key points: points in the original image, from a model's heat maps."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime import drawing, geometry, masks, postprocess, topdown
from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.task import DeviceTask, Files, OutputReading, Outputs
from vitdeploy.spec import OutputSpec, PreprocessSpec, TensorSpec, within

if TYPE_CHECKING:
    from PIL import Image

HEATMAPS = "heatmaps"
Decoding = Literal["dark", "argmax"]


@dataclass(frozen=True)
class KeypointSpec(OutputSpec):
    """How "heatmaps" [points, height, width] become points.

    `decoding` "argmax": the maximum of a map; "dark": refined to the peak of the parabola through the logarithm of the
    map, smoothed by a Gaussian of `kernel` pixels (DARK, arXiv 1910.06278, equations 7 to 9). `threshold`: the score
    from which a point is shown. `skeleton`: the pairs of points joined by lines in drawings.
    """

    decoding: Decoding = "dark"
    kernel: int = field(default=11, metadata=within(ge=1))
    threshold: float = 0.3
    skeleton: tuple[tuple[int, int], ...] = field(default=(), metadata=within(ge=0))
    in_recipes: ClassVar[tuple[str, ...] | None] = ("decoding",)

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel {self.kernel}: expected an odd number of pixels")

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """Return the number of points, which labels name; None if the outputs do not tell."""
        size = next((tensor.shape[1] for tensor in outputs if tensor.name == HEATMAPS), None)
        return size if isinstance(size, int) else None


Array = npt.NDArray[Any]

# DARK's Gaussian, and the range to which values are clipped before the logarithm, as in mmpose and transformers.
SIGMA = 0.8
LEAST, MOST = 0.001, 50.0
# Two models agree on a sample if at least NEAR_SHARE of its points are within NEAR times the longer side of each other.
NEAR_SHARE, NEAR = 0.5, 0.1


@dataclass(frozen=True)
class Keypoint:
    """One point: its index and name, its position in pixels of the original image, and the peak value of its heat map.

    Coordinates are COCO's: 0 is the centre of the first pixel. A point may be outside the image. The score is near 1
    for a confident model; it is not bounded.
    """

    index: int
    name: str
    x: float
    y: float
    score: float

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True, repr=False)
class Keypoints:
    """The answer for one object: all its points, in the model's order.

    `size`: (width, height) of the image; `box`: the part of it that the model saw, (left, top, right, bottom).
    `threshold`: the score from which a point is shown; `skeleton`: the pairs of points joined by lines.
    """

    size: tuple[int, int]
    box: topdown.Box
    points: tuple[Keypoint, ...]
    threshold: float = 0.0
    skeleton: tuple[tuple[int, int], ...] = ()

    @property
    def shown(self) -> tuple[Keypoint, ...]:
        """The points with a score of `threshold` or more."""
        return tuple(point for point in self.points if point.score >= self.threshold)

    def to_dict(self) -> dict[str, Any]:
        width, height = self.size
        points = [point.to_dict() for point in self.points]
        return {"width": width, "height": height, "box": list(self.box), "threshold": self.threshold, "points": points}

    def __str__(self) -> str:
        """One shown point per line."""
        lines = (f"{p.name} {p.score:.2f} at {p.x:.1f} {p.y:.1f}" for p in self.shown)
        return "\n".join(lines) or "nothing above the threshold"

    def __repr__(self) -> str:
        text = postprocess.shortened(str(self))
        return f"<Keypoints: {len(self.shown)} of {len(self.points)} in {self.size[0]}x{self.size[1]}: {text}>"


def locate(heatmaps: Array, spec: KeypointSpec) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Return the points, float64 [points, 2], x and y in pixels of the maps [points, height, width], and their scores,
    float64 [points].

    A map without a value above 0 has no position: its point is (-1, -1), as in mmpose.
    """
    count, _, width = heatmaps.shape
    flat = heatmaps.reshape(count, -1)
    best, scores = flat.argmax(axis=1), flat.max(axis=1).astype(np.float64)
    points = np.stack([best % width, best // width], axis=1).astype(np.float64)
    seen = scores > 0
    if spec.decoding == "dark" and seen.any():
        points[seen] += _refinement(heatmaps[seen], points[seen].astype(np.int64), spec.kernel)
    points[~seen] = -1
    return points, scores


def _refinement(heatmaps: Array, peaks: npt.NDArray[np.int64], kernel: int) -> npt.NDArray[np.float64]:
    """float64 [n, 2]: the offsets that DARK adds to the `peaks`, x and y of each map's maximum.

    The step of Newton's method for the logarithm of the smoothed map: -H^-1 g with differences of neighbouring pixels,
    borders repeated. Computed in float32 up to the differences, as in transformers: if H is nearly singular, rounding
    changes the result.
    """
    logs = np.log(np.clip(_smoothed(heatmaps, kernel), np.float32(LEAST), np.float32(MOST)))
    padded = np.pad(logs, ((0, 0), (1, 1), (1, 1)), mode="edge")
    each, x, y = np.arange(len(peaks)), peaks[:, 0] + 1, peaks[:, 1] + 1

    def near(right: int, down: int) -> Array:
        return np.asarray(padded[each, y + down, x + right])

    half, centre = np.float32(0.5), near(0, 0)
    gradient = np.stack([half * (near(1, 0) - near(-1, 0)), half * (near(0, 1) - near(0, -1))], axis=1)
    xx, yy = near(1, 0) - 2 * centre + near(-1, 0), near(0, 1) - 2 * centre + near(0, -1)
    xy = half * (near(1, 1) - near(1, 0) - near(0, 1) + centre + centre - near(-1, 0) - near(0, -1) + near(-1, -1))
    hessian = np.stack([xx, xy, xy, yy], axis=1).reshape(-1, 2, 2) + np.finfo(np.float32).eps * np.eye(2)
    return np.asarray(-np.einsum("nij,nj->ni", np.linalg.inv(hessian), gradient))


def _smoothed(heatmaps: Array, kernel: int) -> npt.NDArray[np.float32]:
    """float32 [n, height, width], smoothed by a Gaussian of `kernel` pixels, mirrored at the borders (scipy's
    "reflect")."""
    radius = kernel // 2
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / SIGMA) ** 2)
    weights /= weights.sum()
    smooth = heatmaps.astype(np.float32)
    for axis in (1, 2):
        widths = [(0, 0)] * 3
        widths[axis] = (radius, radius)
        padded = np.pad(smooth, widths, mode="symmetric").astype(np.float64)
        windows = np.lib.stride_tricks.sliding_window_view(padded, kernel, axis=axis)
        smooth = (windows @ weights).astype(np.float32)
    return smooth


def in_image(
    places: Array, grid: tuple[int, int], size: tuple[int, int], preprocess: PreprocessSpec, box: topdown.Box
) -> npt.NDArray[np.float64]:
    """Convert positions [n, 2] from pixels of maps of `grid` (width, height) to float64 [n, 2] in pixels of an image of
    `size` (width, height), of which a top-down model saw the `box`. The centre of the first pixel is 0 in both.

    The maps of a top-down model span its input from the first to the last pixel centre; those of any other model divide
    the input into equal cells, as pooling and strides do.
    """
    if preprocess.fit == "topdown":
        return topdown.to_image(places, grid, topdown.cutout(box, (preprocess.crop[1], preprocess.crop[0])))
    window = geometry.input_window(size, preprocess)
    cells = np.array([window.right - window.left, window.bottom - window.top]) / np.array(grid)
    return np.asarray((places + 0.5) * cells + (window.left, window.top) - 0.5)


def _answer(outputs: Outputs, reading: OutputReading) -> Keypoints:
    spec, maps = reading.head(KeypointSpec), outputs[HEATMAPS]
    width, height = reading.size
    box = reading.box or (0.0, 0.0, float(width), float(height))
    places, scores = locate(maps, spec)
    points = in_image(places, (maps.shape[2], maps.shape[1]), reading.size, reading.images, box)
    named = (
        Keypoint(index, postprocess.label_of(index, reading.labels), float(x), float(y), float(score))
        for index, ((x, y), score) in enumerate(zip(points, scores, strict=True))
    )
    return Keypoints(reading.size, box, tuple(named), spec.threshold, spec.skeleton)


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    """Whether most points are at about the same position."""
    spec = reading.head(KeypointSpec)
    (a, _), (b, _) = locate(ours[HEATMAPS], spec), locate(theirs[HEATMAPS], spec)
    bound = NEAR * max(theirs[HEATMAPS].shape[1:])
    return bool((np.linalg.norm(a - b, axis=1) <= bound).mean() >= NEAR_SHARE)


def _draw(image: Image.Image, result: Keypoints | Sequence[Keypoints]) -> Files:
    return {
        ".png": masks.png_bytes(drawing.draw_keypoints(image, [result] if isinstance(result, Keypoints) else result))
    }


def _form(outputs: Collection[str], spec: KeypointSpec) -> forms.PointsForm:
    return forms.PointsForm(HEATMAPS, spec.decoding, spec.kernel, spec.threshold, spec.skeleton)


KEYPOINTS = DeviceTask(_answer, _same, draw=_draw, postprocess=KeypointSpec, form=_form)
