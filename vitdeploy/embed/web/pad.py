"""The visual style of a model's images, measured on the golden images, for a drawing pad."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from PIL import Image

from vitdeploy.runtime.preprocess import Pixels
from vitdeploy.spec import PreprocessSpec

# Limits of a drawing: the share of the frame covered by ink, and the largest share of intermediate grey values.
INK = (0.03, 0.6)
MOST_BETWEEN = 0.4
# An image has no finer detail than a reduced copy if enlarging the copy loses at most this share of its deviation.
LOST = 0.2
REDUCTIONS = (8, 4, 2)

Ink = npt.NDArray[np.float64]


@dataclass(frozen=True)
class DrawingForm:
    """The visual style of drawings in a model's input.

    `light`: ink is lighter than the paper. `height`, `width`: extent of the ink as shares of the frame. `stroke`: width
    of the pen as a share of the frame's shorter side. `detail`: (rows, columns), the resolution that the images had
    before they were enlarged.
    """

    light: bool
    height: float
    width: float
    stroke: float
    detail: tuple[int, int]


def drawing_form(images: Pixels, spec: PreprocessSpec) -> DrawingForm | None:
    """Return the style of uint8 images [n, height, width, 1]; None unless they are strokes on plain paper."""
    grey = images[..., 0] / 255.0
    light = bool(np.median(grey) < 0.5)
    ink: Ink = grey if light else 1 - grey
    covered = float((ink > 0.5).mean())
    between = float(((ink > 0.25) & (ink < 0.75)).mean())
    if not INK[0] < covered < INK[1] or between > MOST_BETWEEN or any(not (each > 0.5).any() for each in ink):
        return None
    extents = np.array([_extent(each > 0.5) for each in ink])
    height, width = ink.shape[1:]
    strokes = float(np.mean([_stroke(each > 0.5) for each in ink])) / min(height, width)
    detail = next(
        ((height // by, width // by) for by in REDUCTIONS if _survives(images, by, spec)),
        (height, width),
    )
    return DrawingForm(light, float(extents[:, 0].mean()) / height, float(extents[:, 1].max()) / width, strokes, detail)


def _extent(ink: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Return (rows, columns) of the bounding box of the ink."""
    rows, columns = (np.flatnonzero(ink.any(axis=axis)) for axis in (1, 0))
    return int(rows[-1] - rows[0] + 1), int(columns[-1] - columns[0] + 1)


def _stroke(ink: npt.NDArray[np.bool_]) -> float:
    """Return the width of a long stroke in pixels: twice its area divided by its outline."""
    padded = np.pad(ink, 1)
    outline = sum(int((np.diff(padded.astype(np.int8), axis=axis) != 0).sum()) for axis in (0, 1))
    return 2.0 * float(ink.sum()) / outline


def _survives(images: Pixels, by: int, spec: PreprocessSpec) -> bool:
    """Whether the images can be restored from copies that are smaller by an integer factor."""
    height, width = images.shape[1:3]
    if height % by or width % by:
        return False
    lost = []
    for pixels in images[..., 0]:
        small = Image.fromarray(pixels).resize((width // by, height // by), Image.Resampling.BOX)
        again = np.asarray(small.resize((width, height), Image.Resampling[spec.interpolation.upper()]), np.float64)
        lost.append(float(np.sqrt(((again - pixels) ** 2).mean()) / max(float(pixels.std()), 1e-9)))
    return float(np.mean(lost)) < LOST
