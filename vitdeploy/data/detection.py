"""Labelled boxes and outlines.

Boxes: YOLO text files, and COCO's instances JSON.

YOLO: `labels/` mirrors `images/`; labels/<path>.txt has a line `class cx cy width height` for each object, relative to
the image's sides; an image without a file, or with an empty one, has no objects. A polygon `class x y x y x y ...` is
the box around it. `classes.txt` or `data.yaml` name the classes: see `find_names`.
COCO: https://cocodataset.org/#format-data, section "Object Detection"; boxes are x y width height in pixels.
"""

from __future__ import annotations

import importlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from vitdeploy.data.annotations import (
    AnnotatedSet,
    Category,
    CocoFile,
    frame_or_skip,
    nothing_annotated,
    read_coco,
    turn_boxes,
    turn_map,
    turn_points,
    upright_notes,
)
from vitdeploy.data.decoding import Skipped
from vitdeploy.data.folder import Sample, scan
from vitdeploy.data.label_file import DECIMAL, Repairs, read_text
from vitdeploy.errors import DataError, MissingFileError, MissingPackageError
from vitdeploy.runtime.preprocess import Frame
from vitdeploy.yaml_values import NOT_YAML, read_yaml

COCO_KEYS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("image_id", "category_id", "bbox"),
    "categories": ("id", "name"),
}
# Tolerances for rounding: of relative coordinates; and, in pixels, of boxes that end at the border of an image.
ROUNDED, REACH = 0.01, 0.5


@dataclass(frozen=True)
class Boxes:
    """The labelled objects of one image of `size` (width, height).

    boxes: float64 [n, 4], x0 y0 x1 y1 in pixels. classes: int64 [n]. crowd: bool [n], a box around objects too numerous
    to count: neither a missed crowd nor a detection there counts as an error. area: float64 [n] in square pixels, of
    the object's outline if that is known.
    """

    size: tuple[int, int]
    boxes: npt.NDArray[np.float64]
    classes: npt.NDArray[np.int64]
    crowd: npt.NDArray[np.bool_]
    area: npt.NDArray[np.float64]

    def content(self) -> bytes:
        arrays = (self.boxes, self.classes, self.crowd, self.area)
        return repr((self.size, len(self.classes))).encode() + b"".join(array.tobytes() for array in arrays)

    def turned(self, frame: Frame) -> Boxes:
        """Return the objects for the upright image, from boxes in the pixels as stored."""
        return replace(self, size=frame.size, boxes=turn_boxes(self.boxes, frame))

    def renumbered(self, mapping: Mapping[int, int]) -> Boxes:
        """Return the objects with the class numbers of a model; `mapping` is from `classes.match_categories`."""
        return replace(self, classes=np.array([mapping[int(c)] for c in self.classes], np.int64))


DetectionSet = AnnotatedSet[Boxes]


def read_detection(
    images: Path, labels: Path, kind: Literal["yolo", "coco"], skipped: Skipped | None = None
) -> DetectionSet:
    """Return the images below `images` with their objects; `labels` is a folder (YOLO) or a JSON file (COCO).

    Unreadable images are skipped and added to `skipped`; without `skipped` they are an error.

    Raises:
        MissingFileError: `images` or `labels` does not exist.
        DataError: labels cannot be read, or refer to other images, sizes or classes.
        ImageError: an unreadable image and `skipped` is None.
    """
    return (_read_yolo if kind == "yolo" else _read_coco)(images, labels, skipped)


class _Row(NamedTuple):
    """One object: its class, x0 y0 x1 y1 in pixels, whether it is a crowd, its area (None: that of the box), and its
    location in the file."""

    category: int
    corners: Sequence[float] | npt.NDArray[np.float64]
    crowd: bool
    area: float | None
    where: str


def _boxes(size: tuple[int, int], rows: Sequence[_Row], repairs: Repairs) -> Boxes:
    """Return the objects of an image, without empty and repeated ones."""
    objects: dict[tuple[object, ...], _Row] = {}
    for row in rows:
        x0, y0, x1, y1 = (float(side) for side in row.corners)
        if x0 >= x1 or y0 >= y1:
            repairs.add("boxes without width or height, ignored", row.where)
        elif objects.setdefault((row.category, row.crowd, x0, y0, x1, y1), row) is not row:
            repairs.add("repeated boxes, counted once", row.where)
    kept = list(objects.values())
    corners = np.array([row.corners for row in kept], np.float64).reshape(-1, 4)
    areas = (corners[:, 2:] - corners[:, :2]).prod(axis=1)
    return Boxes(
        size,
        corners,
        np.array([row.category for row in kept], np.int64),
        np.array([row.crowd for row in kept], np.bool_),
        np.array([area if row.area is None else row.area for row, area in zip(kept, areas, strict=True)], np.float64),
    )


def _inside(known: Boxes, name: str, repairs: Repairs) -> Boxes:
    """Return the objects of an upright image, clipped to it."""
    clipped = known.boxes.clip(0, [*known.size, *known.size])
    beyond = np.asarray((np.abs(clipped - known.boxes) > REACH).any(axis=1))
    if not beyond.any():
        return known
    sides = clipped[:, 2:] - clipped[:, :2]
    kept = ~beyond | (sides > 0).all(axis=1)
    for kind, boxes in (
        ("outside their image, ignored", ~kept),
        ("that exceed their image, clipped", beyond & kept),
    ):
        if boxes.any():
            repairs.add(f"boxes {kind}", name, int(boxes.sum()))
    areas = np.where(beyond, np.minimum(known.area, sides.prod(axis=1)), known.area)
    columns = (np.where(beyond[:, None], clipped, known.boxes), known.classes, known.crowd, areas)
    return Boxes(known.size, *(column[kept] for column in columns))


def _read_yolo(images: Path, labels: Path, skipped: Skipped | None) -> DetectionSet:
    paths = [sample.path for sample in scan(images, "none")[0]]
    if not labels.is_dir():
        raise MissingFileError(f"no label folder at {labels}", fix="check the path of the labels")
    files = {path: (labels / path.relative_to(images)).with_suffix(".txt") for path in paths}
    if not any(file.is_file() for file in files.values()):
        raise nothing_annotated(images, labels, f"no {files[paths[0]].name}, and no label file for any other image")
    named = find_names(labels)
    names, source = (named[0], named[1].name) if named is not None else (None, "")
    found, frames, repairs = {}, [], Repairs()
    for path, file in files.items():
        frame = frame_or_skip(path, skipped)
        if frame is not None:
            boxes = _boxes(frame.size, _yolo_rows(file, frame.size, names, source, repairs), repairs)
            found[path] = _inside(boxes, path.name, repairs)
            frames.append(frame)
    used = {int(c) for boxes in found.values() for c in boxes.classes}
    categories = (
        [Category(i, name) for i, name in enumerate(names)]
        if names is not None
        else [Category(i, None) for i in sorted(used)]
    )
    samples = tuple(Sample(path, None) for path in found)
    notes = (*upright_notes(frames), *repairs.notes)
    return AnnotatedSet(images, samples, found, tuple(categories), 0, notes)


def _yolo_rows(
    file: Path, size: tuple[int, int], names: Sequence[str] | None, source: str, repairs: Repairs
) -> list[_Row]:
    if not file.is_file():
        repairs.add("images without a label file, treated as images without objects", file.name)
        return []
    sides, rows = np.array([*size, *size], np.float64), []
    for number, line in enumerate(file.read_text(encoding="utf-8-sig", errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        where = f"{file.name}, line {number}"
        try:
            index, shares = _yolo_object(line.split(), where, repairs)
        except ValueError:
            raise DataError(
                f"{file}, line {number} is not an object",
                found=line[:80],
                expected="class cx cy width height, or a polygon class x y x y x y ..., relative to the image's sides",
                fix="correct the row; a class is an integer, named by classes.txt next to the label files",
            ) from None
        if not ((shares >= -ROUNDED) & (shares <= 1 + ROUNDED)).all():  # also false for NaN
            raise DataError(
                f"{file}, line {number}: a coordinate is outside 0..1",
                found=line[:80],
                expected="centre and size relative to the image's width and height",
                fix="divide pixels by the image's sides",
            )
        if index < 0 or (names is not None and index >= len(names)):
            expected = f"0..{len(names) - 1} as {source} has {len(names)} names" if names else "0 or more"
            raise DataError(f"{file}, line {number}: no class {index}", found=line[:80], expected=expected)
        if ((shares < 0) | (shares > 1)).any():
            repairs.add("coordinates slightly outside 0..1, clipped", f"{where}: {line[:60]}")
        rows.append(_Row(index, _corners(shares.clip(0, 1)) * sides, False, None, where))
    return rows


def _yolo_object(cells: Sequence[str], where: str, repairs: Repairs) -> tuple[int, npt.NDArray[np.float64]]:
    """Return the class of a row, and its numbers: four for a box, six or more for a polygon.

    Raises:
        ValueError: it is neither.
    """
    if re.fullmatch(r"[+-]?[0-9]+(\.0*)?", cells[0]) is None:
        raise ValueError(cells[0])
    index, numbers = int(float(cells[0])), np.array([float(cell) for cell in cells[1:]], np.float64)
    if "." in cells[0]:
        repairs.add(DECIMAL, where)
    if len(numbers) == 5 and 0 <= numbers[4] <= 1:
        repairs.add("rows with a confidence, which is ignored", where)
        numbers = numbers[:4]
    elif len(numbers) >= 6 and len(numbers) % 2 == 0:
        repairs.add("polygons, read as the boxes around them", where)
    elif len(numbers) != 4:
        raise ValueError(f"{len(numbers)} numbers")
    return index, numbers


def _corners(shares: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return x0 y0 x1 y1 of a box given by centre and size, or around a polygon."""
    if len(shares) > 4:
        points = shares.reshape(-1, 2)
        return np.concatenate([points.min(axis=0), points.max(axis=0)])
    return np.concatenate([shares[:2] - shares[2:] / 2, shares[:2] + shares[2:] / 2])


def _read_coco(images: Path, labels: Path, skipped: Skipped | None) -> DetectionSet:
    file = read_coco(images, labels, COCO_KEYS)

    def annotate(path: Path, frame: Frame, objects: Sequence[tuple[int, Mapping[str, Any]]]) -> Boxes:
        return _boxes(frame.size, [_coco_row(labels, *entry) for entry in objects], file.repairs)

    placed = file.annotated(annotate, skipped)
    inside = {path: _inside(boxes, path.name, file.repairs) for path, boxes in placed.annotations.items()}
    return replace(placed, annotations=inside, notes=tuple(dict.fromkeys((*placed.notes, *file.repairs.notes))))


def _coco_row(labels: Path, index: int, annotation: Mapping[str, Any]) -> _Row:
    where, area = f"annotations[{index}]", annotation.get("area")
    try:
        x, y, w, h = (float(value) for value in annotation["bbox"] or (0, 0, 0, 0))
        area = None if area is None else float(area)
    except (TypeError, ValueError):
        x, y, w, h, area = math.nan, 0, 0, 0, None
    if not (math.isfinite(x + y + (area or 0)) and 0 <= w < math.inf and 0 <= h < math.inf):
        raise DataError(
            f"{labels}: {where} has no box",
            found=f"bbox {annotation['bbox']}, area {annotation.get('area')}",
            expected="four numbers x y width height in pixels",
        )
    return _Row(annotation["category_id"], (x, y, x + w, y + h), bool(annotation.get("iscrowd", 0)), area, where)


# --- The names of YOLO's class numbers: `classes.txt` (LabelImg), or `names` in `data.yaml` (Ultralytics, Roboflow) ---


CLASS_NAMES = "classes.txt"
DATA_FILES = ("data.yaml", "data.yml", "dataset.yaml")
# ImageNet-21k has 21,841 classes, each a number and a name.
MAX_NAMES_BYTES, MAX_VALUES = 1 << 20, 60_000


def find_names(labels: Path) -> tuple[tuple[str, ...], Path] | None:
    """Return the class names for a folder of YOLO files and the file with them, or None.

    Looks for `classes.txt` in the folder and its parent, and for `data.yaml` in these and the grandparent.

    Raises:
        DataError: a file without a valid list of names, two files with different names, or a `classes.txt` that is not
            UTF-8.
    """
    above = [labels, *labels.absolute().parents[:2]]
    files = [folder / CLASS_NAMES for folder in above[:2]] + [folder / name for folder in above for name in DATA_FILES]
    found = [(names, file) for file in files if file.is_file() and (names := _read_names(file))]
    for names, file in found[1:]:
        if names != found[0][0]:
            raise DataError(
                "two files give different class names for the YOLO labels",
                found=f"{found[0][1]}: {', '.join(found[0][0][:3])} ...; {file}: {', '.join(names[:3])} ...",
                expected="one list of names, in the order of the numbers",
                fix="correct the wrong file, or remove it",
            )
    return found[0] if found else None


def _read_names(file: Path) -> tuple[str, ...]:
    """Return the names in a file; () for a YAML file without `names`, which serves another purpose."""
    if file.stat().st_size > MAX_NAMES_BYTES:
        raise _nameless(file, f"{file.stat().st_size:,} bytes")
    if file.name == CLASS_NAMES:
        return tuple(line.strip() for line in read_text(file).strip().splitlines())
    try:
        document = read_yaml(file.read_text(encoding="utf-8-sig", errors="replace"), MAX_VALUES)
    except NOT_YAML as error:
        raise _nameless(file, " ".join(str(error).split())[:200]) from None
    names = document.get("names") if isinstance(document, Mapping) else None
    return _in_order(file, names) if names else ()


def _in_order(file: Path, names: Any) -> tuple[str, ...]:
    """Return `names`, given as a list or as a mapping from number to name."""
    if isinstance(names, Mapping) and sorted(names, key=str) == sorted(range(len(names)), key=str):
        names = [names[number] for number in range(len(names))]
    if not isinstance(names, list) or not all(isinstance(name, str | int) for name in names):
        raise _nameless(file, f"names: {str(names)[:80]}")
    return tuple(str(name).strip() for name in names)


def _nameless(file: Path, found: str) -> DataError:
    return DataError(
        f"{file} does not name the classes",
        found=found,
        expected="one name per line (classes.txt); `names` as a list, or as a mapping from 0, 1, ... to names "
        "(data.yaml)",
        fix="correct the file, or remove it",
    )


# --- Labelled outlines of objects: COCO's instances JSON with polygons or run lengths ---------------------------------
# https://cocodataset.org/#format-data, section "Object Detection": `segmentation` is a list of polygons x y x y ... in
# pixels, or run lengths {"size": [height, width], "counts": ...}, which crowds have.


KEYS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("image_id", "category_id"),
    "categories": ("id", "name"),
}
# A polygon has at least three corners.
LEAST_NUMBERS = 6


@dataclass(frozen=True)
class Outlines:
    """The labelled objects of one image of `size` (width, height).

    outlines: `segmentation` of each, in COCO's form. classes: int64 [n]. crowd: bool [n], the outline of objects too
        numerous to separate: neither a missed crowd nor a detection there counts as an error.
    """

    size: tuple[int, int]
    outlines: tuple[Any, ...]
    classes: npt.NDArray[np.int64]
    crowd: npt.NDArray[np.bool_]

    def content(self) -> bytes:
        return json.dumps([self.size, self.outlines, self.classes.tolist(), self.crowd.tolist()]).encode()

    def turned(self, frame: Frame) -> Outlines:
        """Return the objects for the upright image, from outlines in the pixels as stored.

        Raises:
            MissingPackageError: pycocotools is not installed, and there are run lengths.
        """
        return replace(self, size=frame.size, outlines=tuple(_turned(outline, frame) for outline in self.outlines))

    def renumbered(self, mapping: Mapping[int, int]) -> Outlines:
        """Return the objects with the class numbers of a model; `mapping` is from `classes.match_categories`."""
        return replace(self, classes=np.array([mapping[int(c)] for c in self.classes], np.int64))

    def masks(self) -> npt.NDArray[np.bool_]:
        """Return bool [n, height, width], rasterised by pycocotools.

        Raises:
            MissingPackageError: pycocotools is not installed.
        """
        coco = _coco()
        width, height = self.size
        found = np.zeros((len(self.outlines), height, width), np.bool_)
        for i, outline in enumerate(self.outlines):
            runs = outline
            if isinstance(outline, list):
                runs = coco.merge(coco.frPyObjects(outline, height, width))
            elif isinstance(outline["counts"], list):
                runs = coco.frPyObjects(outline, height, width)
            found[i] = coco.decode(runs)
        return found


def _coco() -> Any:
    try:
        return importlib.import_module("pycocotools.mask")
    except ImportError:
        raise MissingPackageError("pycocotools", "export", "outlines of objects") from None


def _turned(outline: Any, frame: Frame) -> Any:
    if isinstance(outline, list):
        return [turn_points(np.reshape(p, (-1, 2)).astype(np.float64), frame).ravel().tolist() for p in outline]
    coco = _coco()
    runs = coco.frPyObjects(outline, *outline["size"]) if isinstance(outline["counts"], list) else outline
    upright = coco.encode(np.asfortranarray(turn_map(coco.decode(runs), frame.orientation)))
    return {"size": upright["size"], "counts": upright["counts"].decode("ascii")}


InstanceSet = AnnotatedSet[Outlines]


def read_instances(images: Path, labels: Path, skipped: Skipped | None = None) -> InstanceSet:
    """Return the images below `images` with the objects of COCO's JSON file `labels`.

    Unreadable images are skipped and added to `skipped`; without `skipped` they are an error.

    Raises:
        MissingFileError: `images` or `labels` does not exist.
        DataError: labels cannot be read, or refer to other images, sizes or categories, or have no outlines.
        ImageError: an unreadable image and `skipped` is None.
    """
    file = read_coco(images, labels, KEYS)

    def annotate(path: Path, frame: Frame, objects: Sequence[tuple[int, Mapping[str, Any]]]) -> Outlines:
        size = (file.entries[path]["width"], file.entries[path]["height"])
        outlines = [(entry, _outline(file, index, entry, size)) for index, entry in objects]
        kept = [(entry, outline) for entry, outline in outlines if outline]
        return Outlines(
            frame.size,
            tuple(outline for _, outline in kept),
            np.array([entry["category_id"] for entry, _ in kept], np.int64),
            np.array([bool(entry.get("iscrowd", 0)) for entry, _ in kept], np.bool_),
        )

    outlined = file.annotated(annotate, skipped)
    if file.annotations and not any(len(known.classes) for known in outlined.annotations.values()):
        raise DataError(
            f"{labels} contains no object outline",
            found="; ".join(outlined.notes),
            expected="segmentation: polygons x y x y x y ..., or run lengths",
            fix="label outlines as well as boxes; or verify without labels (data.labels: none)",
        )
    return outlined


def _outline(file: CocoFile, index: int, annotation: Mapping[str, Any], size: tuple[int, int]) -> Any:
    """Return the `segmentation` of an annotation on an image of `size` (width, height); [] if it has no area.

    Raises:
        DataError: it is not an outline, or belongs to an image of a different size.
    """
    outline, where = annotation.get("segmentation") or [], f"annotations[{index}]"
    if isinstance(outline, dict):
        if outline.get("size") == [size[1], size[0]] and _are_counts(outline.get("counts"), size[0] * size[1]):
            return outline
    elif isinstance(outline, list):
        if outline and all(map(_is_number, outline)) and len(outline) >= LEAST_NUMBERS:
            file.repairs.add("polygons not nested in a list, read as one polygon", where)
            outline = [outline]
        polygons = [polygon for polygon in outline if isinstance(polygon, list) and all(map(_is_number, polygon))]
        whole = [polygon for polygon in polygons if len(polygon) >= LEAST_NUMBERS and len(polygon) % 2 == 0]
        if len(polygons) == len(outline) or all(map(_is_number, outline)):  # may be a box, or empty
            if not whole:
                file.repairs.add("objects without an outline of at least three corners, ignored", where)
            elif len(whole) < len(polygons):
                file.repairs.add("polygons with fewer than three corners, dropped from their outlines", where)
            return whole
    raise DataError(
        f"{file.labels}: {where} has no outline",
        found=f"segmentation {json.dumps(outline)[:60]}",
        expected=f"polygons x y x y x y ..., or run lengths of size [{size[1]}, {size[0]}]",
        fix="label outlines as well as boxes; or verify without labels (data.labels: none)",
    )


def _are_counts(value: Any, pixels: int) -> bool:
    """Whether run lengths cover the whole image; COCO's compressed form is checked only by pycocotools."""
    if isinstance(value, str):
        return True
    return (
        isinstance(value, list) and all(type(count) is int and count >= 0 for count in value) and sum(value) == pixels
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
