"""Figures in the style of the pages, as inline SVG."""

from __future__ import annotations

import html
import io
import itertools
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple
from xml.etree import ElementTree

import matplotlib.style
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from vitdeploy.report.text import shorten

# --- Figures in the look of the report: placeholder colours, style, margins in pixels, the latency axis ---------------


# Plots are drawn in placeholder colours; each becomes a CSS variable of the page. So the same SVG serves the
# light and the dark page, and print.
INK, MUTED, RULE, PAPER = "#010101", "#010102", "#010103", "#010104"
SERIES = tuple(f"#0101{index:02x}" for index in range(0x10, 0x17))
# Parts of a bar: the precisions in order, and the rest. Their colours differ from those of artifacts.
PARTS = tuple(f"#0102{index:02x}" for index in range(0x10, 0x15))
VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    RULE: "var(--rule)",
    PAPER: "var(--paper)",
    **{colour: f"var(--series-{index})" for index, colour in enumerate(SERIES)},
    **{colour: f"var(--part-{index})" for index, colour in enumerate(PARTS)},
}
MARKERS = ("D", "o", "s", "^", "v", "P", "X")

Place = tuple[float, float]

LOG_FROM = 4.0  # a wider range than this is drawn on a logarithmic axis

_STYLE = {
    "svg.fonttype": "none",  # real text: sharp, small, and set in the font of the page
    "svg.hashsalt": "vitdeploy",
    "text.parse_math": False,  # a "$" in a name is a "$"
    "text.usetex": False,
    "font.size": 12,
    "text.color": INK,
    "axes.edgecolor": RULE,
    "axes.facecolor": "none",
    "axes.labelcolor": MUTED,
    "axes.labelsize": 12,
    "axes.linewidth": 1,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 72,  # one point is one CSS pixel
    "figure.facecolor": "none",
    "grid.color": RULE,
    "grid.linewidth": 0.75,
    "xtick.color": RULE,
    "ytick.color": RULE,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "xtick.labelsize": 11.5,
    "ytick.labelsize": 11.5,
}


@contextmanager
def plot_style() -> Iterator[None]:
    """The style in which a figure must be both built and written, independent of the user's matplotlibrc."""
    with matplotlib.style.context(["default", _STYLE]):
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure measured in CSS pixels, on a canvas that can measure text."""
    figure = Figure(figsize=(width / 72, height / 72), dpi=72)
    FigureCanvasAgg(figure)
    return figure


def axes_in(figure: Figure, *, left: float, right: float, bottom: float, top: float) -> Axes:
    """Axes with margins in pixels, for any size of the figure."""
    width, height = figure.get_size_inches() * 72
    return figure.add_axes(
        (left / width, bottom / height, (width - left - right) / width, (height - bottom - top) / height)
    )


def plane(
    figure: Figure, xlabel: str, title: str, *, left: float = 50, bottom: float = 48, top: float = 28, pad: float = 12
) -> Axes:
    """Axes with horizontal grid lines, and a title above them instead of a rotated label."""
    axes = axes_in(figure, left=left, right=14, bottom=bottom, top=top)
    axes.set_xlabel(xlabel)
    axes.set_title(title, loc="left", fontsize=12, color=MUTED, pad=pad)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    return axes


def mark_legend(axes: Axes, handles: Sequence[Line2D], *, right: bool = False, gap: float = 0.4) -> None:
    """The legend of the marks, in one line above the plot; `gap` in letter heights."""
    axes.legend(
        handles=handles,
        loc="lower right" if right else "lower left",
        bbox_to_anchor=(1 if right else 0, 1.0),
        borderaxespad=gap,
        borderpad=0,
        ncols=len(handles),
        frameon=False,
        labelcolor=MUTED,
        handletextpad=0.1,
        columnspacing=1.4,
    )


def limit_latency(axes: Axes, values: Sequence[float], padding: float) -> None:
    """Set a horizontal latency axis around the values, logarithmic for a wide range."""
    low, high = float(min(values)), float(max(values))
    if low > 0 and high / low > LOG_FROM:
        margin = (high / low) ** padding
        low, high = low / margin, high * margin
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator(_log_ticks(low, high)))
    else:
        margin = max(padding * (high - low), 0.02 * high)
        low, high = max(0.0, low - margin), high + margin
        axes.xaxis.set_major_locator(MaxNLocator(nbins=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(low, high)


def _log_ticks(low: float, high: float) -> list[float]:
    """Round numbers between two limits: the sparsest set with at least three of them."""
    exponents = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    ticks: list[float] = []
    for mantissas in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [float(f"{m}e{e}") for e in exponents for m in mantissas if low <= float(f"{m}e{e}") <= high]
        if len(ticks) >= 3:
            break
    return ticks


def front(places: Sequence[Place]) -> list[Place]:
    """The Pareto front of the points (x, y), lower is better in both, from left to right."""
    found: list[Place] = []
    for x, y in sorted(set(places)):
        if not found or y < found[-1][1]:
            found.append((x, y))
    return found


def corners(places: Sequence[Place]) -> list[Place]:
    """The staircase through places from left to right, each lower than the one before; points beyond are dominated."""
    steps = list(places[:1])
    for (_, higher), (right, lower) in itertools.pairwise(places):
        steps += [(right, higher), (right, lower)]
    return steps


def draw_front(axes: Axes, places: Sequence[Place], sign: float = 1.0) -> list[Place]:
    """Draw the Pareto front of points (x, y), lower is better, as grey steps; returns the corners as drawn.

    sign: -1 where the axis shows -y.
    """
    steps = [(x, sign * y) for x, y in corners(front(places))]
    if len(steps) > 1:
        axes.plot(*zip(*steps, strict=True), color=MUTED, linewidth=1.2, alpha=0.8, zorder=1.4)
    return steps


def mark_point(axes: Axes, place: Place, series: int, chosen: bool) -> None:
    """Draw a marker in the colour and shape of a series, with a ring if it is chosen."""
    colour = SERIES[series]
    if chosen:
        axes.plot(*place, marker="o", markersize=19, color="none", markeredgecolor=colour, zorder=3)
    axes.plot(
        *place,
        marker=MARKERS[series],
        markersize=9,
        color=colour,
        markeredgecolor=PAPER,
        markeredgewidth=1,
        zorder=4,
    )


# --- Figures with one named strip per artifact, on a common horizontal axis -------------------------------------------


WIDE, NARROW = 840.0, 360.0  # pixels
_HEIGHTS = {False: 58.0, True: 68.0}  # of a strip, by whether the figure is narrow
_LONGEST = 30  # letters of a name next to its strip


def new_strips(
    names: Sequence[str], notes: Sequence[str], narrow: bool, top: float, rise: float
) -> tuple[Figure, Axes]:
    """Axes with a strip for each name, the first at height 0, the next at -1, and so on.

    Beside a strip stands its name, with a note below it; on a phone both stand above it, where there is more room.

    Args:
        top: room above the strips, in pixels. rise: how far what is drawn in a strip reaches above its height, at most
            0.5.
    """
    count, height = len(names), _HEIGHTS[narrow]
    if narrow:
        figure = new_figure(NARROW, count * height + top + 54)
        axes = axes_in(figure, left=10, right=12, bottom=48, top=top + 6)
    else:
        figure = new_figure(WIDE, count * height + top + 48)
        left = _label_width(figure, [*names, *notes]) + 30
        axes = axes_in(figure, left=left, right=14, bottom=48, top=top)
    axes.set_ylim(-count + (0.62 if narrow else 0.5), rise + (0.36 if narrow else 0.14))
    axes.spines["left"].set_visible(False)
    axes.set_yticks([])
    axes.set_axisbelow(True)
    for index, (name, note) in enumerate(zip(names, notes, strict=True)):
        if narrow:
            _name_above(axes, -index + rise + 0.1, name, note)
        else:
            _name_beside(axes, -index, name, note)
    return figure, axes


def _label_width(figure: Figure, names: Sequence[str]) -> float:
    """The width of the longest name or note, in pixels."""
    probe = figure.text(0, 0, "", fontsize=12, parse_math=False)
    widths = []
    for name in names:
        probe.set_text(shorten(name, _LONGEST))
        widths.append(text_size(probe)[0])
    probe.remove()
    return max(widths)


def _name_beside(axes: Axes, height: float, name: str, note: str) -> None:
    lines = [(shorten(name, _LONGEST), INK, 12.0), (note, MUTED, 11.0)]
    for number, (words, colour, size) in enumerate(line for line in lines if line[0]):
        axes.annotate(
            words,
            (0, height),
            xytext=(-14, (4 if note else -4) - 15 * number),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            ha="right",
            color=colour,
            fontsize=size,
            parse_math=False,
        )


def _name_above(axes: Axes, height: float, name: str, note: str) -> None:
    axes.text(
        0,
        height,
        shorten(name, _LONGEST if note else 40),
        transform=axes.get_yaxis_transform(),
        color=INK,
        parse_math=False,
    )
    axes.text(
        1,
        height,
        note,
        transform=axes.get_yaxis_transform(),
        ha="right",
        color=MUTED,
        fontsize=11,
        parse_math=False,
    )


# --- A matplotlib figure as inline SVG that follows the page: its colours, its font, its dark mode --------------------


_SVG = "{http://www.w3.org/2000/svg}"
_HREF = "{http://www.w3.org/1999/xlink}href"
# Allowed elements and attributes: metadata, style sheets (their "*" rule would affect the whole page) and everything
# else are left out.
_ELEMENTS = {"svg", "g", "path", "defs", "use", "clipPath", "rect", "circle", "text", "tspan"}
_ATTRIBUTES = {"d", "x", "y", "width", "height", "transform", "clip-path", "style", "cx", "cy", "r"}
_DECIMALS = re.compile(r"-?\d+\.\d+")
_REFERENCE = re.compile(r"#([\w.-]+)")


@dataclass(frozen=True)
class Plot:
    """One plot in its two variants, with its caption. `folded`: its section is collapsed on screen."""

    title: str
    caption: str
    wide: Markup
    narrow: Markup
    folded: bool = False


def both_variants(draw: Callable[[bool], Figure], name: str, description: str) -> tuple[Markup, Markup]:
    """The wide and the narrow variant of a plot as inline SVG."""
    with plot_style():
        wide = inline_svg(draw(False), f"{name}-wide", description)
        narrow = inline_svg(draw(True), f"{name}-narrow", description)
    return wide, narrow


def inline_svg(figure: Figure, prefix: str, description: str) -> Markup:
    """The figure as an <svg> element, with every text and attribute escaped; `prefix` keeps its ids apart from those of
    the page's other plots."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ElementTree.fromstring(buffer.getvalue())  # noqa: S314 - matplotlib wrote it just now
    body = "".join(_serialise(child, prefix) for child in root)
    box = html.escape(root.attrib["viewBox"])
    label = html.escape(description)
    text = f'<svg viewBox="{box}" role="img" aria-label="{label}" class="{prefix}">{body}</svg>'
    return Markup(text)  # noqa: S704


def _serialise(element: ElementTree.Element, prefix: str) -> str:
    """One element and its children as HTML text."""
    tag = element.tag.removeprefix(_SVG)
    if tag not in _ELEMENTS:
        return ""
    inner = html.escape((element.text or "").strip()) + "".join(_serialise(child, prefix) for child in element)
    if tag in ("g", "defs") and not inner:
        return ""
    attributes = "".join(
        f' {name}="{html.escape(value)}"' for name, value in _attributes(element.attrib, tag, prefix) if value
    )
    # Groups carry only ids and clip paths; groups without either are dropped.
    return inner if tag == "g" and not attributes else f"<{tag}{attributes}>{inner}</{tag}>"


def _attributes(attributes: dict[str, str], tag: str, prefix: str) -> Iterator[tuple[str, str]]:
    """The attributes to keep: numbers rounded, ids made unique, colours made variables."""
    for name, value in attributes.items():
        if name == "id" and tag != "g":
            yield "id", f"{prefix}-{value}"
        elif name in (_HREF, "clip-path"):
            yield name.rsplit("}", 1)[-1], _REFERENCE.sub(rf"#{prefix}-\1", value)
        elif name == "style":
            yield name, _style(value)
        elif name == "transform" and tag == "text" and value.startswith("rotate(-0 "):
            continue
        elif name in _ATTRIBUTES:
            yield name, _DECIMALS.sub(_rounded, " ".join(value.split()))


def _style(value: str) -> str:
    """A style attribute in the page's colours, without the font family: text inherits that of the page."""
    parts = [part.strip() for part in value.split(";") if part.strip()]
    kept = (part for part in parts if not part.startswith("font-family"))
    return "; ".join(re.sub(r"#[0-9a-f]{6}", lambda match: VARIABLES.get(match[0], match[0]), part) for part in kept)


def _rounded(match: re.Match[str]) -> str:
    """A coordinate to a hundredth of a pixel."""
    return f"{float(match[0]):.2f}".rstrip("0").rstrip(".")


# --- Direct labels on the points of a plot, placed so that they cover neither each other nor the data -----------------


_DISTANCES = (11, 18, 27, 40, 56, 76, 100)
_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (0.8, 0.7), (0.8, -0.7), (-0.8, 0.7), (-0.8, -0.7))
_LEADER_FROM = 16  # pixels; a closer label needs no leader line
_PADDING = 2.0


class PixelBox(NamedTuple):
    """A rectangle in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: PixelBox) -> float:
        """The area of the intersection."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return width * height if width > 0 and height > 0 else 0.0

    def holds(self, x: float, y: float) -> bool:
        """Whether a point lies inside."""
        return self.left < x < self.right and self.bottom < y < self.top

    @property
    def area(self) -> float:
        """The area in square pixels."""
        return (self.right - self.left) * (self.top - self.bottom)


Line = tuple[tuple[float, float], tuple[float, float]]


@dataclass(frozen=True)
class _Anchor:
    """A point to label, in pixels, and the size of its label."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class _LabelPlace:
    """The place of a label, its cost, and its leader line (point to label) if it needs one."""

    box: PixelBox
    cost: float
    leader: Line | None
    clean: bool = True


def text_size(text: Text) -> tuple[float, float]:
    """The width and height of a text in pixels. The fonts of a page are rarely wider than the one measured here."""
    with warnings.catch_warnings():
        # A glyph that the measuring font lacks does not matter: the browser picks the font.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        extent = text.get_window_extent()
    return extent.width, extent.height


def label_points(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    texts: Sequence[Text],
    obstacles: Sequence[PixelBox],
    lines: Sequence[Line],
) -> bool:
    """Move each text to a free place near its point (data coordinates), with a leader line if it is far away.

    Labels keep clear of obstacles and lines, leader lines of obstacles only. Returns whether all of them could.
    """
    pixels = axes.transData.transform(points)
    anchors = [_Anchor(float(x), float(y), *text_size(text)) for (x, y), text in zip(pixels, texts, strict=True)]
    extent = axes.get_window_extent()
    frame = PixelBox(extent.x0, extent.y0, extent.x1, extent.y1)
    to_data = axes.transData.inverted()
    layout = _best_layout(anchors, obstacles, lines, frame)
    for text, place in zip(texts, layout, strict=True):
        center = ((place.box.left + place.box.right) / 2, (place.box.bottom + place.box.top) / 2)
        # Centred, so that a narrower font leaves equal gaps.
        text.set(position=to_data.transform(center), ha="center", va="center")
        if place.leader is not None:
            ends = to_data.transform(place.leader)
            axes.plot(ends[:, 0], ends[:, 1], color=MUTED, linewidth=0.8, zorder=1.5, scalex=False, scaley=False)
    return all(place.clean for place in layout)


def number_points(axes: Axes, places: Sequence[Place], numbers: Sequence[int], lines: Sequence[Line] = ()) -> None:
    """Draw a number at each point (data coordinates)."""
    texts = [axes.text(*place, str(number), color=INK) for place, number in zip(places, numbers, strict=True)]
    boxes = [PixelBox(x - 7, y - 7, x + 7, y + 7) for x, y in axes.transData.transform(places).tolist()]
    label_points(axes, places, texts, boxes, lines)


def _best_layout(
    anchors: Sequence[_Anchor], obstacles: Sequence[PixelBox], lines: Sequence[Line], frame: PixelBox
) -> list[_LabelPlace]:
    """Greedy placement in several orders; returns the cheapest result."""
    indices = range(len(anchors))
    orders = [
        sorted(indices, key=lambda i: anchors[i].x),
        sorted(indices, key=lambda i: -anchors[i].x),
        sorted(indices, key=lambda i: anchors[i].y),
        sorted(indices, key=lambda i: -anchors[i].y),
    ]
    layouts = [_greedy(anchors, order, obstacles, lines, frame) for order in orders]
    return min(layouts, key=lambda layout: sum(place.cost for place in layout))


def _greedy(
    anchors: Sequence[_Anchor],
    order: Sequence[int],
    obstacles: Sequence[PixelBox],
    lines: Sequence[Line],
    frame: PixelBox,
) -> list[_LabelPlace]:
    """Assign each label in turn to the cheapest free place."""
    placed: dict[int, _LabelPlace] = {}
    for index in order:
        taken = [*obstacles, *(place.box for place in placed.values())]
        drawn = [*lines, *(place.leader for place in placed.values() if place.leader)]
        others = [anchor for other, anchor in enumerate(anchors) if other != index]
        placed[index] = min(
            (_judged(place, anchors[index], others, taken, drawn, frame) for place in _places(anchors[index])),
            key=lambda place: place.cost,
        )
    return [placed[index] for index in range(len(anchors))]


def _places(anchor: _Anchor) -> Iterator[_LabelPlace]:
    """The places around a point, the closest first; the cost here is the distance."""
    half_width, half_height = anchor.width / 2 + _PADDING, anchor.height / 2 + _PADDING
    for distance in _DISTANCES:
        for right, up in _DIRECTIONS:
            x = anchor.x + right * distance + _sign(right) * half_width
            y = anchor.y + up * distance + _sign(up) * half_height
            box = PixelBox(x - half_width, y - half_height, x + half_width, y + half_height)
            leader = ((anchor.x, anchor.y), _nearest(box, anchor)) if distance > _LEADER_FROM else None
            yield _LabelPlace(box, distance, leader)


def _judged(
    place: _LabelPlace,
    anchor: _Anchor,
    others: Sequence[_Anchor],
    taken: Sequence[PixelBox],
    drawn: Sequence[Line],
    frame: PixelBox,
) -> _LabelPlace:
    """The place with its full cost: hidden objects, crossed lines, and ambiguity with other points."""
    box = place.box
    hidden = sum(box.overlap(other) for other in taken)
    outside = box.area - box.overlap(frame)
    crossed = sum(_crosses(line, box) for line in drawn)
    if place.leader:
        # The boxes around the point itself do not block a line that starts there.
        crossed += sum(_crosses(place.leader, other) for other in taken if not other.holds(anchor.x, anchor.y))
    mistakable = any(_gap(box, other) < _gap(box, anchor) + 4 for other in others)
    unclear = mistakable * (20 if place.leader else 80)
    cost = place.cost + unclear + 40 * hidden + 80 * outside + 200 * crossed
    return replace(place, cost=cost, clean=hidden == 0 and outside < 1 and crossed == 0)


def _sign(value: float) -> int:
    """The sign of a number: -1, 0 or 1."""
    return (value > 0) - (value < 0)


def _nearest(box: PixelBox, anchor: _Anchor) -> tuple[float, float]:
    """The point of the box that is closest to the anchor."""
    return min(max(anchor.x, box.left), box.right), min(max(anchor.y, box.bottom), box.top)


def _gap(box: PixelBox, anchor: _Anchor) -> float:
    """The distance of a label from a point."""
    x, y = _nearest(box, anchor)
    return math.hypot(x - anchor.x, y - anchor.y)


def _crosses(line: Line, box: PixelBox) -> bool:
    """Whether a line crosses a box: the parts within its width and within its height overlap."""
    (x0, y0), (x1, y1) = line
    enter, leave = 0.0, 1.0
    for start, step, low, high in ((x0, x1 - x0, box.left, box.right), (y0, y1 - y0, box.bottom, box.top)):
        if step == 0:
            if not low < start < high:
                return False
        else:
            near, far = sorted(((low - start) / step, (high - start) / step))
            enter, leave = max(enter, near), min(leave, far)
    return enter < leave
