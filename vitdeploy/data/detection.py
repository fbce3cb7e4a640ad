"""Labelled boxes: YOLO text files, and COCO's instances JSON.

YOLO: `labels/` mirrors `images/`; labels/<path>.txt has a line `class cx cy width height` for each object, relative to
the image's sides; an image without a file, or with an empty one, has no objects. `classes.txt` or `data.yaml` name the
classes: see `yolo_names`.
COCO: https://cocodataset.org/#format-data, section "Object Detection"; boxes are x y width height in pixels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from vitdeploy.data.annotations import (
    AnnotatedSet,
    Category,
    coco_set,
    folder_images,
    frame_or_skip,
    nothing_annotated,
    read_json,
    turn_boxes,
    upright_notes,
)
from vitdeploy.data.folder import Sample, scan
from vitdeploy.data.pixels import Skipped
from vitdeploy.data.yolo_names import find_names
from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.runtime.preprocess import Frame

COCO_KEYS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("image_id", "category_id", "bbox"),
    "categories": ("id", "name"),
}


@dataclass(frozen=True)
class Boxes:
    """The labelled objects of one image of `size` (width, height).

    boxes: float64 [n, 4], x0 y0 x1 y1 in pixels. classes: int64 [n]. crowd: bool [n], a box around more objects than
    could be counted: neither missing it nor finding something there counts as an error. area: float64 [n] in square
    pixels, of the object's outline if that is known.
    """

    size: tuple[int, int]
    boxes: npt.NDArray[np.float64]
    classes: npt.NDArray[np.int64]
    crowd: npt.NDArray[np.bool_]
    area: npt.NDArray[np.float64]

    def content(self) -> bytes:
        """Bytes that differ where two annotations differ."""
        arrays = (self.boxes, self.classes, self.crowd, self.area)
        return repr((self.size, len(self.classes))).encode() + b"".join(array.tobytes() for array in arrays)

    @property
    def reach(self) -> tuple[float, float]:
        """The largest x and y of a box, zeros without one."""
        return (0.0, 0.0) if not len(self.boxes) else (float(self.boxes[:, 2].max()), float(self.boxes[:, 3].max()))

    def turned(self, frame: Frame) -> Boxes:
        """The same in the upright image, of boxes in the pixels as they are stored."""
        return replace(self, size=frame.size, boxes=turn_boxes(self.boxes, frame))

    def renumbered(self, mapping: Mapping[int, int]) -> Boxes:
        """The same objects with the class numbers of a model: `mapping` is that of `classes.match_categories`."""
        return replace(self, classes=np.array([mapping[int(c)] for c in self.classes], np.int64))


DetectionSet = AnnotatedSet[Boxes]


def read_detection(
    images: Path, labels: Path, kind: Literal["yolo", "coco"], skipped: Skipped | None = None
) -> DetectionSet:
    """The images below `images` with their objects; `labels` is a folder (YOLO) or a JSON file (COCO).

    With `skipped` given, unreadable images are noted there and left out; without, they are an error.

    Raises:
        MissingFileError: `images` or `labels` is not there.
        DataError: labels cannot be read, or refer to other images, sizes or classes.
        ImageError: an unreadable image and `skipped` is None.
    """
    return (_read_yolo if kind == "yolo" else _read_coco)(images, labels, skipped)


def _boxes(size: tuple[int, int], rows: Sequence[tuple[int, Sequence[float], bool, float]]) -> Boxes:
    """From rows of (class, corners, crowd, area)."""
    return Boxes(
        size,
        np.array([corners for _, corners, _, _ in rows], np.float64).reshape(-1, 4),
        np.array([row[0] for row in rows], np.int64),
        np.array([row[2] for row in rows], np.bool_),
        np.array([row[3] for row in rows], np.float64),
    )


def _read_yolo(images: Path, labels: Path, skipped: Skipped | None) -> DetectionSet:
    paths = [sample.path for sample in scan(images, "none")[0]]
    if not labels.is_dir():
        raise MissingFileError(f"no label folder at {labels}", fix="check the path of the labels")
    files = {path: (labels / path.relative_to(images)).with_suffix(".txt") for path in paths}
    if not any(file.is_file() for file in files.values()):
        raise nothing_annotated(images, labels, f"no {files[paths[0]].name}, nor a file for another image")
    named = find_names(labels)
    names, source = (named[0], named[1].name) if named is not None else (None, "")
    found, frames = {}, []
    for path, file in files.items():
        frame = frame_or_skip(path, skipped)
        if frame is not None:
            found[path] = _boxes(frame.size, _yolo_rows(file, frame.size, names, source))
            frames.append(frame)
    used = {int(c) for boxes in found.values() for c in boxes.classes}
    categories = (
        [Category(i, name) for i, name in enumerate(names)]
        if names is not None
        else [Category(i, None) for i in sorted(used)]
    )
    samples = tuple(Sample(path, None) for path in found)
    return AnnotatedSet(images, samples, found, tuple(categories), 0, upright_notes(frames))


def _yolo_rows(
    file: Path, size: tuple[int, int], names: Sequence[str] | None, source: str
) -> list[tuple[int, list[float], bool, float]]:
    if not file.is_file():
        return []
    width, height = size
    rows = []
    for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        try:
            name, *rest = line.split()
            index, (cx, cy, w, h) = int(name), (float(value) for value in rest)
        except ValueError:
            raise DataError(
                f"{file}, line {number} is not an object", found=line[:80], wanted="class cx cy width height"
            ) from None
        if not all(0 <= value <= 1 for value in (cx, cy, w, h)):  # false for NaN too
            raise DataError(
                f"{file}, line {number}: a coordinate outside of 0..1",
                found=line[:80],
                wanted="centre and size relative to the image's width and height",
            )
        if index < 0 or (names is not None and index >= len(names)):
            wanted = f"0..{len(names) - 1} as {source} has {len(names)} names" if names else "0 or more"
            raise DataError(f"{file}, line {number}: no class {index}", found=line[:80], wanted=wanted)
        corners = [(cx - w / 2) * width, (cy - h / 2) * height, (cx + w / 2) * width, (cy + h / 2) * height]
        rows.append((index, corners, False, w * width * h * height))
    return rows


def _read_coco(images: Path, labels: Path, skipped: Skipped | None) -> DetectionSet:
    paths = folder_images(images)
    document = read_json(labels, COCO_KEYS)
    categories = tuple(Category(c["id"], c["name"]) for c in sorted(document["categories"], key=itemgetter("id")))
    known = {category.id for category in categories}
    entries = {entry["id"]: entry for entry in document["images"]}
    rows: dict[int, list[tuple[int, list[float], bool, float]]] = {id: [] for id in entries}
    for index, annotation in enumerate(document["annotations"]):
        rows_of_image = rows.get(annotation["image_id"])
        if rows_of_image is None:
            raise DataError(
                f"{labels}: annotations[{index}] is of an image that is not listed",
                found=f"image_id {annotation['image_id']}",
            )
        rows_of_image.append(_coco_row(labels, index, annotation, known))
    return coco_set(
        images,
        labels,
        paths,
        list(entries.values()),
        categories,
        lambda entry, frame: _boxes(frame.size, rows[entry["id"]]),
        skipped,
    )


def _coco_row(
    labels: Path, index: int, annotation: Mapping[str, Any], known: set[int]
) -> tuple[int, list[float], bool, float]:
    if annotation["category_id"] not in known:
        raise DataError(
            f"{labels}: annotations[{index}] is of a category that is not listed",
            found=f"category_id {annotation['category_id']}",
        )
    try:
        x, y, w, h = (float(value) for value in annotation["bbox"])
        area = float(annotation.get("area", w * h))
    except (TypeError, ValueError):
        x = y = w = h = area = math.nan
    if not (math.isfinite(x + y + area) and 0 <= w < math.inf and 0 <= h < math.inf):
        raise DataError(
            f"{labels}: annotations[{index}] has no box",
            found=f"bbox {annotation['bbox']}, area {annotation.get('area')}",
            wanted="four numbers x y width height in pixels",
        )
    return annotation["category_id"], [x, y, x + w, y + h], bool(annotation.get("iscrowd", 0)), area
