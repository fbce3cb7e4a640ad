"""Panoptic annotations in COCO's form: one JSON file, and a PNG of segment ids for each image.

https://cocodataset.org/#format-data, section "Panoptic Segmentation": the PNGs lie in a folder of the JSON's name
without its suffix; a pixel's segment id is R + 256 G + 65536 B, and 0 is VOID: unlabelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.data.annotations import AnnotatedSet, CocoFile, check_keys, read_coco, turn_map
from vitdeploy.data.decoding import Skipped
from vitdeploy.data.masks import fit_map
from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.runtime.preprocess import Frame, decode

VOID = 0
KEYS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("image_id", "file_name", "segments_info"),
    "categories": ("id", "name", "isthing"),
}


@dataclass(frozen=True)
class PanopticMap:
    """An image cut into segments.

    ids: int32 [height, width], the segment of each pixel, `VOID` for none. classes: the class of each
    segment. crowd: the segments that stand for more instances than could be counted.
    """

    ids: npt.NDArray[np.int32]
    classes: Mapping[int, int]
    crowd: frozenset[int] = field(default=frozenset())


@dataclass(frozen=True)
class PanopticAnnotation:
    """The PNG of one image, and its segments: id -> category id. `frame`: how the image lies; `stored`:
    the PNG is of its pixels before EXIF turns them."""

    png: Path
    frame: Frame
    segments: Mapping[int, int]
    crowd: frozenset[int]
    stored: bool = False

    def content(self) -> bytes:
        """Bytes that differ where two annotations differ."""
        facts = (sorted(self.segments.items()), sorted(self.crowd), *((self.frame,) if self.stored else ()))
        return repr(facts).encode() + self.png.read_bytes()

    def turned(self, frame: Frame) -> PanopticAnnotation:
        return replace(self, frame=frame, stored=True)

    def load(self, mapping: Mapping[int, int]) -> PanopticMap:
        """The map with the class numbers of a model: `mapping` is that of `classes.match_categories`.

        Raises:
            ImageError: the PNG cannot be read.
            DataError: it is not of the image's size, or holds ids that are not in the JSON.
        """
        pixels = np.asarray(decode(self.png, 3), np.int32)
        pixels = fit_map(self.png, pixels, Frame(self.frame.stored, 1) if self.stored else self.frame)
        pixels = turn_map(pixels, self.frame.orientation) if self.stored else pixels
        ids = pixels @ np.array([1, 256, 65536], np.int32)
        unknown = sorted({int(i) for i in np.unique(ids)} - set(self.segments) - {VOID})
        if unknown:
            raise DataError(
                f"{self.png} holds segments that its JSON does not know",
                found=f"ids {', '.join(map(str, unknown[:5]))}",
                wanted="the ids of segments_info, or 0 for no segment",
            )
        return PanopticMap(ids, {id: mapping[category] for id, category in self.segments.items()}, self.crowd)


PanopticSet = AnnotatedSet[PanopticAnnotation]


def read_panoptic(images: Path, labels: Path, skipped: Skipped | None = None) -> PanopticSet:
    """The images below `images` that the JSON file `labels` annotates. The PNGs are read by `load`, one by one.

    With `skipped` given, unreadable images are noted there and left out; without, they are an error.

    Raises:
        MissingFileError: `images`, `labels` or a PNG is not there.
        DataError: the JSON file has another form, or refers to other images, sizes or categories.
        ImageError: an unreadable image and `skipped` is None.
    """
    file = read_coco(images, labels, KEYS)
    annotated = replace(file, entries={path: file.entries[path] for path in file.annotations})
    return annotated.annotated(lambda path, frame, entries: _annotation(file, entries, frame), skipped)


def _annotation(file: CocoFile, entries: Sequence[tuple[int, Mapping[str, Any]]], frame: Frame) -> PanopticAnnotation:
    labels, entry = file.labels, entries[0][1]
    if len(entries) > 1:
        raise DataError(
            f"{labels}: an image has two annotations that differ",
            found=" and ".join(f"annotations[{index}]" for index, _ in entries[:2]),
            wanted="one for each image",
            fix="take out the one that is wrong",
        )
    png = labels.with_suffix("") / entry["file_name"].replace("\\", "/")
    if not png.is_file():
        raise MissingFileError(
            f"no segment map at {png}", fix=f"put the PNG files into a folder {labels.stem}/ beside {labels.name}"
        )
    known = {category.id for category in file.categories}
    segments: dict[int, int] = {}
    crowd: set[int] = set()
    for index, segment in enumerate(entry["segments_info"]):
        where = f"{entry['file_name']}, segments_info[{index}]"
        check_keys(labels, where, segment, ("id", "category_id"))
        if segment["category_id"] not in known:
            raise DataError(
                f"{labels}: {where} is of a category that is not listed", found=f"category_id {segment['category_id']}"
            )
        before = segments.setdefault(segment["id"], segment["category_id"])
        if before != segment["category_id"]:
            raise DataError(
                f"{labels}: {where} has an id that is there before",
                found=f"id {segment['id']} of the categories {before} and {segment['category_id']}",
                wanted="an id for each segment of an image",
                fix="correct the one that is wrong",
            )
        if segment.get("iscrowd"):
            crowd.add(segment["id"])
    return PanopticAnnotation(png, frame, segments, frozenset(crowd))
