"""Attention maps over their image, as PNG pictures."""

import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib.style
import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image

from vitdeploy.report import figures, text

# The colours of the report's light page.
INK, MUTED, RULE, PAPER = "#1a1f26", "#58616d", "#dde1e6", "#ffffff"
# Uniform in lightness, and readable with every kind of colour vision.
COLOURS = "viridis"
# The alpha of a patch's colour over the image, which is grey and of low contrast, so that it is not mistaken for
# attention.
STRENGTH, CONTRAST = 0.72, 0.6
SMALL = 168  # pixels of the longer side of a picture of one map
TILE, GAP, MARGIN, TITLE, HEAD, FOOT = 232, 16, 20, 42, 62, 52  # CSS pixels
SCALE = 2  # pixels of the file for one CSS pixel

_STYLE = {
    "text.parse_math": False,
    "text.usetex": False,
    "font.size": 11,
    "text.color": INK,
    "savefig.facecolor": PAPER,
}


@dataclass(frozen=True)
class MapPanel:
    """One tile: the image, with `map` over it if given.

    map: float [rows, columns], not negative; colours range from 0 to its largest value.
    box: (left, top, right, bottom) in pixels of the image, drawn over it.
    """

    title: str
    note: str = ""
    map: npt.NDArray[np.float64] | None = None
    box: tuple[float, float, float, float] | None = None


def picture_size(image: npt.NDArray[np.uint8], panels: int) -> tuple[int, int]:
    """(width, height) in pixels of a picture with `panels` tiles."""
    columns, rows, tile = _layout(image, panels)
    width = 2 * MARGIN + columns * (TILE + GAP) - GAP
    return SCALE * width, SCALE * (HEAD + rows * (TITLE + tile + GAP) + FOOT)


def attention_picture(image: npt.NDArray[np.uint8], panels: Sequence[MapPanel], heading: str, subheading: str) -> bytes:
    """A PNG of `picture_size`. image: uint8 [height, width, 1 or 3], as the model sees it."""
    columns, _, tile = _layout(image, len(panels))
    width, height = (side / SCALE for side in picture_size(image, len(panels)))
    grey = image.astype(np.float64).mean(axis=2)
    with matplotlib.style.context(["default", _STYLE]), warnings.catch_warnings():
        # Letters that the font lacks are drawn as boxes, which makes a warning unnecessary.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure = figures.new_figure(width, height)
        _write(figure, MARGIN, 26, text.shorten(text.clean(heading), int(width / 9)), 15, INK, "bold")
        _write(figure, MARGIN, 46, text.shorten(text.clean(subheading), int(width / 6.2)), 11, MUTED)
        for index, panel in enumerate(panels):
            left = MARGIN + (index % columns) * (TILE + GAP)
            top = HEAD + (index // columns) * (TITLE + tile + GAP)
            _write(figure, left, top + 16, text.shorten(text.clean(panel.title), 32), 11.5, INK, "bold")
            _write(figure, left, top + 33, text.shorten(text.clean(panel.note), 40), 10, MUTED)
            axes = figures.axes_in(
                figure,
                left=left,
                right=width - left - TILE,
                bottom=height - top - TITLE - tile,
                top=top + TITLE,
            )
            _draw(axes, image, grey, panel)
        _colour_bar(figure, width)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=72 * SCALE, metadata={"Software": None})
    return buffer.getvalue()


def attention_tile(image: npt.NDArray[np.uint8], values: npt.NDArray[np.float64], largest: float) -> bytes:
    """A PNG of a single map, SMALL pixels long, in 128 colours.

    Args:
        image: uint8 [height, width, 3], as the model sees it. values: float64 [rows, columns], not negative.
        largest: the value with the lightest colour.
    """
    height, width = image.shape[:2]
    scale = SMALL / max(height, width)
    size = max(1, round(width * scale)), max(1, round(height * scale))
    grey = np.asarray(Image.fromarray(image).convert("L").resize(size, Image.Resampling.BICUBIC), np.float64)
    rows, columns = (np.arange(side) * count // side for side, count in zip(size[::-1], values.shape, strict=True))
    colours = colormaps[COLOURS](values[rows][:, columns] / max(largest, 1e-12))[..., :3] * 255
    faint = 127.5 + CONTRAST * (grey - 127.5)
    blended = STRENGTH * colours + (1 - STRENGTH) * faint[..., None]
    buffer = io.BytesIO()
    Image.fromarray(blended.round().astype(np.uint8)).quantize(128).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


def _layout(image: npt.NDArray[np.uint8], panels: int) -> tuple[int, int, int]:
    """Columns and rows of tiles, and the height of a tile's image."""
    columns = panels if panels <= 4 else max(3, math.ceil(math.sqrt(panels)))
    height, width = image.shape[:2]
    return columns, -(-panels // columns), max(24, round(TILE * height / width))


def _draw(axes: Axes, image: npt.NDArray[np.uint8], grey: npt.NDArray[np.float64], panel: MapPanel) -> None:
    height, width = grey.shape
    axes.set_axis_off()
    extent = (0, width, height, 0)
    if panel.map is None:
        axes.imshow(image if image.shape[2] == 3 else grey, cmap="gray", vmin=0, vmax=255, extent=extent, aspect="auto")
    else:
        largest = max(float(panel.map.max()), 1e-12)
        faint = 127.5 + CONTRAST * (grey - 127.5)
        axes.imshow(faint, cmap="gray", vmin=0, vmax=255, extent=extent, aspect="auto")
        # One flat square per patch: the resolution of the map.
        colours = Normalize(0, largest)
        axes.imshow(
            panel.map,
            cmap=COLOURS,
            norm=colours,
            alpha=STRENGTH,
            interpolation="nearest",
            extent=extent,
            aspect="auto",
        )
    if panel.box is not None:
        left, top, right, bottom = panel.box
        for colour, line in ((INK, 4.5), (PAPER, 2)):  # light on dark, visible on any image
            axes.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, edgecolor=colour, lw=line))
    axes.set(xlim=(0, width), ylim=(height, 0))


def _colour_bar(figure: Figure, width: float) -> None:
    """Draw the colour legend, in the same blend with grey as on the maps."""
    height = figure.get_size_inches()[1] * 72
    axes = figures.axes_in(figure, left=MARGIN, right=width - MARGIN - 140, bottom=22, top=height - 34)
    axes.set_axis_off()
    colours = ScalarMappable(Normalize(0, 1), colormaps[COLOURS]).to_rgba(np.linspace(0, 1, 64)[None])[..., :3]
    axes.imshow(STRENGTH * colours + (1 - STRENGTH) * 0.5, aspect="auto", extent=(0, 1, 0, 1))
    words = "attention: none to maximum (scaled per map)"
    _write(figure, MARGIN + 152, height - 24, words, 10, MUTED)


def _write(figure: Figure, x: float, y: float, words: str, size: float, colour: str, weight: str = "normal") -> None:
    """Write one line of text with its base line at (x, y), in pixels from the top left."""
    width, height = figure.get_size_inches() * 72
    figure.text(x / width, 1 - y / height, words, fontsize=size, color=colour, fontweight=weight, parse_math=False)
