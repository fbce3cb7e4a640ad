"""Direct labels on the points of a plot, placed so that they cover neither each other nor the data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.text import Text

from vitdeploy.report import figures

_DISTANCES = (11, 18, 27, 40, 56, 76, 100)
_DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (0.8, 0.7), (0.8, -0.7), (-0.8, 0.7), (-0.8, -0.7))
_LEADER_FROM = 16  # pixels; a nearer label needs no line to its point
_PADDING = 2.0


class Box(NamedTuple):
    """A rectangle in pixels."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: Box) -> float:
        """The shared area."""
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
class Anchor:
    """A point to label, in pixels, and the size of its label."""

    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True)
class Placement:
    """The place of a label, how bad it is, and its leader line (point to label) if it needs one."""

    box: Box
    cost: float
    leader: Line | None
    clean: bool = True


def text_size(text: Text) -> tuple[float, float]:
    """The width and height of a text in pixels. The fonts of a page are rarely wider than the one measured here."""
    with warnings.catch_warnings():
        # A glyph the measuring font lacks is no concern: the browser picks the font.
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        extent = text.get_window_extent()
    return extent.width, extent.height


def label_points(
    axes: Axes,
    points: Sequence[tuple[float, float]],
    texts: Sequence[Text],
    obstacles: Sequence[Box],
    lines: Sequence[Line],
) -> bool:
    """Move each text to a free place near its point (data coordinates), with a leader line where it is far.

    Labels keep clear of obstacles and lines, leader lines of obstacles only. Returns whether all of them could.
    """
    pixels = axes.transData.transform(points)
    anchors = [Anchor(float(x), float(y), *text_size(text)) for (x, y), text in zip(pixels, texts, strict=True)]
    extent = axes.get_window_extent()
    frame = Box(extent.x0, extent.y0, extent.x1, extent.y1)
    to_data = axes.transData.inverted()
    layout = _best_layout(anchors, obstacles, lines, frame)
    for text, place in zip(texts, layout, strict=True):
        center = ((place.box.left + place.box.right) / 2, (place.box.bottom + place.box.top) / 2)
        # Centred on its place: a page font narrower than the measured one then leaves even gaps.
        text.set(position=to_data.transform(center), ha="center", va="center")
        if place.leader is not None:
            ends = to_data.transform(place.leader)
            axes.plot(
                ends[:, 0], ends[:, 1], color=figures.MUTED, linewidth=0.8, zorder=1.5, scalex=False, scaley=False
            )
    return all(place.clean for place in layout)


def _best_layout(
    anchors: Sequence[Anchor], obstacles: Sequence[Box], lines: Sequence[Line], frame: Box
) -> list[Placement]:
    """Greedy placement in several orders; the cheapest outcome wins."""
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
    anchors: Sequence[Anchor], order: Sequence[int], obstacles: Sequence[Box], lines: Sequence[Line], frame: Box
) -> list[Placement]:
    """Give each label in turn the cheapest place that is left."""
    placed: dict[int, Placement] = {}
    for index in order:
        taken = [*obstacles, *(place.box for place in placed.values())]
        drawn = [*lines, *(place.leader for place in placed.values() if place.leader)]
        others = [anchor for other, anchor in enumerate(anchors) if other != index]
        placed[index] = min(
            (_judged(place, anchors[index], others, taken, drawn, frame) for place in _places(anchors[index])),
            key=lambda place: place.cost,
        )
    return [placed[index] for index in range(len(anchors))]


def _places(anchor: Anchor) -> Iterator[Placement]:
    """The places around a point, near ones first; at this stage the cost is the distance."""
    half_width, half_height = anchor.width / 2 + _PADDING, anchor.height / 2 + _PADDING
    for distance in _DISTANCES:
        for right, up in _DIRECTIONS:
            x = anchor.x + right * distance + _sign(right) * half_width
            y = anchor.y + up * distance + _sign(up) * half_height
            box = Box(x - half_width, y - half_height, x + half_width, y + half_height)
            leader = ((anchor.x, anchor.y), _nearest(box, anchor)) if distance > _LEADER_FROM else None
            yield Placement(box, distance, leader)


def _judged(
    place: Placement,
    anchor: Anchor,
    others: Sequence[Anchor],
    taken: Sequence[Box],
    drawn: Sequence[Line],
    frame: Box,
) -> Placement:
    """The place with its full cost: what it hides, what it crosses, and whose label it could be taken for."""
    box = place.box
    hidden = sum(box.overlap(other) for other in taken)
    outside = box.area - box.overlap(frame)
    crossed = sum(_crosses(line, box) for line in drawn)
    if place.leader:
        # The boxes around the point itself are no obstacle to a line that starts there.
        crossed += sum(_crosses(place.leader, other) for other in taken if not other.holds(anchor.x, anchor.y))
    mistakable = any(_gap(box, other) < _gap(box, anchor) + 4 for other in others)
    unclear = mistakable * (20 if place.leader else 80)
    cost = place.cost + unclear + 40 * hidden + 80 * outside + 200 * crossed
    return replace(place, cost=cost, clean=hidden == 0 and outside < 1 and crossed == 0)


def _sign(value: float) -> int:
    """-1, 0 or 1."""
    return (value > 0) - (value < 0)


def _nearest(box: Box, anchor: Anchor) -> tuple[float, float]:
    """The point of the box that is nearest to the anchor."""
    return min(max(anchor.x, box.left), box.right), min(max(anchor.y, box.bottom), box.top)


def _gap(box: Box, anchor: Anchor) -> float:
    """The distance of a label from a point."""
    x, y = _nearest(box, anchor)
    return math.hypot(x - anchor.x, y - anchor.y)


def _crosses(line: Line, box: Box) -> bool:
    """Whether a line runs through a box: the stretches inside its width and inside its height overlap."""
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
