"""Pictures of answers, with Pillow: what `predict --draw` writes, and the maps of a report."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.anomaly import Anomaly
from vitdeploy.runtime.depth import Depth
from vitdeploy.runtime.detection import Detections
from vitdeploy.runtime.image_to_image import Picture
from vitdeploy.runtime.instances import Instances
from vitdeploy.runtime.keypoints import Keypoints
from vitdeploy.runtime.masks import png_bytes
from vitdeploy.runtime.panoptic import Panoptic
from vitdeploy.runtime.prompted import PromptedMasks
from vitdeploy.runtime.segmentation import NONE, Segmentation
from vitdeploy.spec import Task
from vitdeploy.spec.tasks import INSIDE

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

Array = npt.NDArray[Any]
# File names' ends, and what the files hold.
Files = Mapping[str, bytes]

# How much of a map covers the image below it.
OPACITY = 0.55
# Near to far, as RGB: light to dark, so that it reads without colours too.
SHADES = np.array([(252, 253, 191), (252, 137, 97), (183, 55, 121), (81, 18, 124), (0, 0, 4)], np.float64)
MARGIN = 2
# Of key points, lines and points: green and orange of Okabe and Ito, which people with any colour vision tell apart.
LINE, POINT = (0, 158, 115), (230, 159, 0)
# Of anomaly maps: yellow, orange and the vermilion of the same authors, which is also the colour of the verdict.
HEAT = np.array([(240, 228, 66), (230, 159, 0), (213, 94, 0)], np.float64)
ALARM = (213, 94, 0)
# Heat begins at this share of the threshold of pixels, and is full at the other.
HEAT_FROM, HEAT_TO = 0.7, 1.2
# Radius of a point and half the width of a line, in shares of the shorter side of the box; never below a pixel.
RADIUS, HALF_WIDTH = 0.02, 0.01


def colours(count: int) -> npt.NDArray[np.uint8]:
    """uint8 [count, 3]: the colours of PASCAL VOC's maps, without its black for 0. The bits of a number are dealt to
    red, green and blue in turn, so that neighbours differ most."""
    numbers = np.arange(1, count + 1)
    found = np.zeros((count, 3), np.int64)
    for bit in range(8):
        for channel in range(3):
            found[:, channel] |= ((numbers >> (3 * bit + channel)) & 1) << (7 - bit)
    return found.astype(np.uint8)


def class_picture(found: Array) -> Image.Image:
    """A map of classes, int [height, width], in colours; black where there is none."""
    from PIL import Image

    table = np.concatenate([np.zeros((1, 3), np.uint8), colours(max(int(found.max(initial=0)) + 1, 1))])
    return Image.fromarray(table[found - NONE])


def instance_picture(masks: Array, classes: Array) -> Image.Image:
    """Masks, bool [n, height, width], the first on top, in the colours of their classes with a white rim, which tells
    two objects of a class from each other; black where there is none."""
    from PIL import Image

    picture = np.zeros((*masks.shape[1:], 3), np.uint8)
    palette = colours(int(classes.max(initial=0)) + 1)
    for mask, index in zip(masks[::-1], classes[::-1], strict=True):
        picture[mask] = palette[index]
        picture[mask & ~_core(mask)] = 255
    return Image.fromarray(picture)


def _core(mask: Array) -> Array:
    """The pixels of a mask whose four neighbours are in it too; beyond the image everything is."""
    padded = np.pad(mask, 1, constant_values=True)
    return np.asarray(mask & padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:])


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


def _over(image: Image.Image, picture: Image.Image, covered: Array) -> Image.Image:
    """A picture over the image, where `covered`, bool [height, width]."""
    from PIL import Image

    mask = Image.fromarray((covered * round(255 * OPACITY)).astype(np.uint8))
    return Image.composite(picture, image, mask)


def _segmentation(image: Image.Image, result: Any) -> Files:
    """The classes over the image with a legend, and the map itself."""
    assert isinstance(result, Segmentation)
    drawn = _over(image, class_picture(result.map), result.map != NONE)
    palette = colours(max((each.index for each in result.classes), default=0) + 1)
    _legend(drawn, [(each.label, tuple(palette[each.index].tolist())) for each in result.classes[:12]])
    return {".png": png_bytes(drawn), ".classes.png": result.png()}


def _panoptic(image: Image.Image, result: Any) -> Files:
    """Each segment in a colour of its own, with a legend."""
    assert isinstance(result, Panoptic)
    drawn = _over(image, class_picture(result.map - 1), result.map > 0)
    palette = colours(max((each.id for each in result.segments), default=0))
    largest = sorted(result.segments, key=lambda each: -each.area)[:12]
    _legend(drawn, [(each.label, tuple(palette[each.id - 1].tolist())) for each in largest])
    return {".png": png_bytes(drawn)}


def _instances(image: Image.Image, result: Any) -> Files:
    """Masks over the image, the surest on top, with label and score at the upper left corner of each."""
    from PIL import ImageDraw

    assert isinstance(result, Instances)
    masks, classes = result.masks, np.array([each.index for each in result.objects], np.int64)
    drawn = _over(image, instance_picture(masks, classes), np.asarray(masks.any(axis=0)))
    palette = colours(int(classes.max(initial=0)) + 1)
    pen = ImageDraw.Draw(drawn)
    for each in reversed(result.objects):
        _label(pen, each.box[:2], f"{each.label} {100 * each.score:.0f} %", tuple(palette[each.index].tolist()))
    return {".png": png_bytes(drawn)}


def _detection(image: Image.Image, result: Any) -> Files:
    """Boxes with label and score, the surest on top."""
    from PIL import ImageDraw

    assert isinstance(result, Detections)
    drawn, palette = image.copy(), colours(max((each.index for each in result.objects), default=0) + 1)
    pen = ImageDraw.Draw(drawn)
    for each in reversed(result.objects):
        colour = tuple(palette[each.index].tolist())
        pen.rectangle(each.box, outline=colour, width=max(2, min(image.size) // 200))
        _label(pen, each.box[:2], f"{each.label} {100 * each.score:.0f} %", colour)
    return {".png": png_bytes(drawn)}


def _depth(image: Image.Image, result: Any) -> Files:
    """The depth in colours, light is near; the numbers, and as a PNG of 16 bits."""
    assert isinstance(result, Depth)
    numbers = io.BytesIO()
    np.save(numbers, result.map)
    return {".png": png_bytes(depth_picture(result.nearness)), ".npy": numbers.getvalue(), ".depth.png": result.png()}


def heat_picture(anomaly_map: Array, limits: tuple[float, float]) -> tuple[Image.Image, Array]:
    """A map of anomaly scores [height, width] in colours, and how much of the image each pixel covers, 0..1: nothing
    at the first of the limits and below it, OPACITY at the second and above it, and nothing where it is not finite."""
    from PIL import Image

    low, high = limits
    share = (np.nan_to_num(anomaly_map, nan=low).astype(np.float64) - low) / ((high - low) or 1.0)
    share = share.clip(0, 1)
    channels = [np.interp(share, np.linspace(0, 1, len(HEAT)), HEAT[:, channel]) for channel in range(3)]
    return Image.fromarray(np.stack(channels, axis=-1).round().astype(np.uint8)), OPACITY * share


def heat_limits(pixel_threshold: float) -> tuple[float, float]:
    """The scores of pixels from which, and up to which, heat is drawn."""
    return HEAT_FROM * pixel_threshold, HEAT_TO * pixel_threshold


def draw_heat(image: Image.Image, anomaly_map: Array, limits: tuple[float, float]) -> Image.Image:
    """A copy of the RGB image with a map of its size over it; see `heat_picture`."""
    from PIL import Image

    picture, cover = heat_picture(anomaly_map, limits)
    return Image.composite(picture, image.convert("RGB"), Image.fromarray((255 * cover).round().astype(np.uint8)))


def _anomaly(image: Image.Image, result: Any) -> Files:
    """The map as heat over the image, with the verdict; and the numbers of the map."""
    assert isinstance(result, Anomaly)
    drawn = draw_heat(image, result.map, heat_limits(result.pixel_threshold))
    verdict = "anomalous" if result.anomalous else "normal"
    _legend(drawn, [(verdict, ALARM if result.anomalous else LINE)])
    numbers = io.BytesIO()
    np.save(numbers, result.map)
    return {".png": png_bytes(drawn), ".npy": numbers.getvalue()}


def draw_keypoints(image: Image.Image, people: Sequence[Keypoints]) -> Image.Image:
    """A copy of the RGB image with the shown points of each object, and the lines of the skeleton whose ends are both
    shown."""
    from PIL import ImageDraw

    picture = image.convert("RGB")
    pen = ImageDraw.Draw(picture)
    for result in people:
        left, top, right, bottom = result.box
        side = min(right - left, bottom - top)
        radius, width = max(1.0, RADIUS * side), max(1, round(2 * HALF_WIDTH * side))
        shown = {point.index: (point.x, point.y) for point in result.shown}
        for a, b in result.skeleton:
            if a in shown and b in shown:
                pen.line([shown[a], shown[b]], fill=LINE, width=width)
        for x, y in shown.values():
            pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=POINT)
    return picture


def _keypoints(image: Image.Image, result: Any) -> Files:
    return {".png": png_bytes(draw_keypoints(image, [result] if isinstance(result, Keypoints) else result))}


def _picture(image: Image.Image, result: Any) -> Files:
    """The picture that the model made; the image is no part of it."""
    assert isinstance(result, Picture)
    return {".png": png_bytes(result.image)}


def _prompted(image: Image.Image, result: Any) -> Files:
    """The best mask of each prompt in a colour of its own, and the prompt: a box, points inside as discs, points
    outside as crosses. The masks themselves, one file a prompt."""
    from PIL import ImageDraw

    assert isinstance(result, PromptedMasks)
    drawn, palette = image, colours(len(result.prompts))
    for place, each in enumerate(result.prompts):
        drawn = _over(drawn, class_picture(np.where(each.mask, place, -1)), each.mask)
    pen, radius = ImageDraw.Draw(drawn), max(2, min(image.size) // 100)
    for each, colour in zip(result.prompts, palette.tolist(), strict=True):
        if each.prompt.box is not None:
            pen.rectangle(each.prompt.box, outline=tuple(colour), width=max(1, radius // 2))
        for (x, y), label in zip(each.prompt.points, each.prompt.labels, strict=True):
            _mark(pen, x, y, radius, tuple(colour), inside=label == INSIDE)
    masks = {f".mask{place}.png": each.png() for place, each in enumerate(result.prompts)}
    return {".png": png_bytes(drawn), **masks}


def _mark(pen: ImageDraw.ImageDraw, x: float, y: float, radius: int, colour: tuple[int, ...], *, inside: bool) -> None:
    """A disc with a white rim for a point inside of an object, a white cross for one outside."""
    if inside:
        pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=colour, outline="white")
        return
    for down in (-1, 1):
        pen.line(
            [x - radius, y - down * radius, x + radius, y + down * radius], fill="white", width=max(1, radius // 2)
        )


def _legend(image: Image.Image, entries: list[tuple[str, tuple[int, ...]]]) -> None:
    from PIL import ImageDraw

    pen, top = ImageDraw.Draw(image), 0.0
    for label, colour in entries:
        top = _label(pen, (0.0, top), label, colour)


def _label(pen: ImageDraw.ImageDraw, corner: tuple[float, ...], text: str, colour: tuple[int, ...]) -> float:
    """Text on a box of its colour, black or white by what reads better; returns the box's lower edge."""
    left, top, right, bottom = pen.textbbox((corner[0] + MARGIN, corner[1] + MARGIN), text)
    box = (corner[0], corner[1], right + MARGIN, bottom + MARGIN)
    pen.rectangle(box, fill=colour)
    light = 0.299 * colour[0] + 0.587 * colour[1] + 0.114 * colour[2] > 140  # ITU-R BT.601
    pen.text((left, top), text, fill="black" if light else "white", anchor=None)
    return box[3]


# How the answer of a task becomes files, from the upright RGB image and the result, of a top-down task also the results
# for several boxes; other tasks draw nothing.
DRAWINGS: Mapping[Task, Callable[[Image.Image, Any], Files]] = {
    "detection": _detection,
    "open-vocabulary-detection": _detection,
    "panoptic": _panoptic,
    "segmentation": _segmentation,
    "instance-segmentation": _instances,
    "depth": _depth,
    "anomaly": _anomaly,
    "keypoints": _keypoints,
    "image-to-image": _picture,
    "promptable-segmentation": _prompted,
}
