"""Labelled outlines of objects: COCO's instances JSON with polygons or run lengths.

https://cocodataset.org/#format-data, section "Object Detection": `segmentation` is a list of polygons x y x y ... in
pixels, or run lengths {"size": [height, width], "counts": ...}, which crowds have.
"""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.data.annotations import AnnotatedSet, CocoFile, read_coco, turn_map, turn_points
from vitdeploy.data.decoding import Skipped
from vitdeploy.errors import DataError, MissingPackageError
from vitdeploy.runtime.preprocess import Frame

KEYS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("image_id", "category_id"),
    "categories": ("id", "name"),
}
# A polygon has three corners at least.
LEAST_NUMBERS = 6


@dataclass(frozen=True)
class Outlines:
    """The labelled objects of one image of `size` (width, height).

    outlines: `segmentation` of each as COCO has it. classes: int64 [n]. crowd: bool [n], the outline of more objects
    than could be told apart: neither missing it nor finding something there counts as an error.
    """

    size: tuple[int, int]
    outlines: tuple[Any, ...]
    classes: npt.NDArray[np.int64]
    crowd: npt.NDArray[np.bool_]

    def content(self) -> bytes:
        """Bytes that differ where two annotations differ."""
        return json.dumps([self.size, self.outlines, self.classes.tolist(), self.crowd.tolist()]).encode()

    def turned(self, frame: Frame) -> Outlines:
        """The same in the upright image, of outlines in the pixels as they are stored.

        Raises:
            MissingPackageError: pycocotools is not installed, and there are run lengths.
        """
        return replace(self, size=frame.size, outlines=tuple(_turned(each, frame) for each in self.outlines))

    def renumbered(self, mapping: Mapping[int, int]) -> Outlines:
        """The same objects with the class numbers of a model: `mapping` is that of `classes.match_categories`."""
        return replace(self, classes=np.array([mapping[int(c)] for c in self.classes], np.int64))

    def masks(self) -> npt.NDArray[np.bool_]:
        """bool [n, height, width], as COCO's own program makes masks of outlines.

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
        raise MissingPackageError("pycocotools", "coco", "outlines of objects") from None


def _turned(outline: Any, frame: Frame) -> Any:
    if isinstance(outline, list):
        return [turn_points(np.reshape(p, (-1, 2)).astype(np.float64), frame).ravel().tolist() for p in outline]
    coco = _coco()
    runs = coco.frPyObjects(outline, *outline["size"]) if isinstance(outline["counts"], list) else outline
    upright = coco.encode(np.asfortranarray(turn_map(coco.decode(runs), frame.orientation)))
    return {"size": upright["size"], "counts": upright["counts"].decode("ascii")}


InstanceSet = AnnotatedSet[Outlines]


def read_instances(images: Path, labels: Path, skipped: Skipped | None = None) -> InstanceSet:
    """The images below `images` with the objects of COCO's JSON file `labels`.

    With `skipped` given, unreadable images are noted there and left out; without, they are an error.

    Raises:
        MissingFileError: `images` or `labels` is not there.
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
            f"{labels} has no outline of an object",
            found="; ".join(outlined.notes),
            wanted="segmentation: polygons x y x y x y ..., or run lengths",
            fix="label the outlines of objects, not their boxes alone; or verify without labels",
        )
    return outlined


def _outline(file: CocoFile, index: int, annotation: Mapping[str, Any], size: tuple[int, int]) -> Any:
    """The `segmentation` of an annotation on an image of `size` (width, height); [] of one that has no area.

    Raises:
        DataError: it is no outline, or of an image of another size.
    """
    outline, where = annotation.get("segmentation") or [], f"annotations[{index}]"
    if isinstance(outline, dict):
        if outline.get("size") == [size[1], size[0]] and _are_counts(outline.get("counts"), size[0] * size[1]):
            return outline
    elif isinstance(outline, list):
        if outline and all(map(_is_number, outline)) and len(outline) >= LEAST_NUMBERS:
            file.repairs.add("polygons without a list around them, read as one polygon", where)
            outline = [outline]
        polygons = [polygon for polygon in outline if isinstance(polygon, list) and all(map(_is_number, polygon))]
        whole = [polygon for polygon in polygons if len(polygon) >= LEAST_NUMBERS and len(polygon) % 2 == 0]
        if len(polygons) == len(outline) or all(map(_is_number, outline)):  # or a box, or nothing
            if not whole:
                file.repairs.add("objects without an outline of three corners, left out", where)
            elif len(whole) < len(polygons):
                file.repairs.add("polygons of fewer than three corners, left out of their outlines", where)
            return whole
    raise DataError(
        f"{file.labels}: {where} has no outline",
        found=f"segmentation {json.dumps(outline)[:60]}",
        wanted=f"polygons x y x y x y ..., or run lengths of size [{size[1]}, {size[0]}]",
        fix="label the outlines of objects, not their boxes alone; or verify without labels",
    )


def _are_counts(value: Any, pixels: int) -> bool:
    """Run lengths that are as long as an image; of COCO's compressed form only its own program can tell."""
    if isinstance(value, str):
        return True
    return (
        isinstance(value, list) and all(type(count) is int and count >= 0 for count in value) and sum(value) == pixels
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
