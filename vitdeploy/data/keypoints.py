"""Key point labels in COCO's format: https://cocodataset.org/#format-data, section "Keypoint Detection".

Each annotated object is a separate sample, cropped to its box: the input of a top-down model. Objects without a
labelled point, and crowds, are skipped, as in COCO's evaluation. Images are split, not objects: those of one image are
never on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from vitdeploy.data import decoding, folder
from vitdeploy.data.annotations import AnnotatedSet, CocoFile, read_coco, turn_boxes, turn_points
from vitdeploy.errors import DataError
from vitdeploy.runtime.preprocess import Frame

KEYS = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("image_id", "category_id", "bbox"),
    "categories": ("id", "name"),
}
Sigmas = tuple[float, ...] | None
# The points of a person in COCO, and their deviations as in pycocotools.
COCO_POINTS = [
    *("nose", "left_eye", "right_eye", "left_ear", "right_ear", "left_shoulder", "right_shoulder"),
    *("left_elbow", "right_elbow", "left_wrist", "right_wrist", "left_hip", "right_hip"),
    *("left_knee", "right_knee", "left_ankle", "right_ankle"),
]
COCO_SIGMAS = (
    *(0.026, 0.025, 0.025, 0.035, 0.035, 0.079, 0.079, 0.072, 0.072),
    *(0.062, 0.062, 0.107, 0.107, 0.087, 0.087, 0.089, 0.089),
)


@dataclass(frozen=True)
class LabelledObject(folder.Sample):
    """One object of an image by its `box`. points: (x, y, visible) for each, with visible 0 for unlabelled, 1 hidden, 2
    visible. area: of its outline, in square pixels. sigmas: the deviation of each point relative to the object's size,
        for OKS; None if unknown."""

    points: tuple[tuple[float, float, int], ...] = ()
    area: float = 0.0
    sigmas: Sigmas = None


@dataclass(frozen=True)
class LabelledObjects:
    """The objects of one image."""

    objects: tuple[LabelledObject, ...]

    def content(self) -> bytes:
        return repr([(each.box, each.points, each.area, each.sigmas) for each in self.objects]).encode()

    def turned(self, frame: Frame) -> LabelledObjects:
        """Return the objects for the upright image, from the pixels as stored."""
        return LabelledObjects(tuple(_turned(each, frame) for each in self.objects))


def _turned(known: LabelledObject, frame: Frame) -> LabelledObject:
    x0, y0, x1, y1 = turn_boxes(np.array([known.box], np.float64), frame)[0].tolist()
    places = turn_points(np.array([point[:2] for point in known.points], np.float64), frame, last=1).tolist()
    # An unlabelled point is at 0, 0 regardless of the orientation.
    points = tuple((x, y, v) if v else (0.0, 0.0, v) for (x, y), (_, _, v) in zip(places, known.points, strict=True))
    return replace(known, box=(x0, y0, x1, y1), points=points)


class KeypointSet(AnnotatedSet[LabelledObjects]):
    """The labelled images of a folder."""

    def split(self, *, calibration: int | None, evaluation: int | Literal["all"], seed: int) -> folder.DataSplit:
        """Split by number of images and return the objects; errors as `AnnotatedSet.split`."""
        parts = super().split(calibration=calibration, evaluation=evaluation, seed=seed)
        first, second = (
            tuple(labelled for sample in part for labelled in self.annotations[sample.path].objects)
            for part in (parts.calibration, parts.evaluation)
        )
        return folder.DataSplit(first, second)


def read_keypoints(
    images: Path, labels: Path, names: Sequence[str], count: int | None, skipped: decoding.Skipped | None = None
) -> KeypointSet:
    """Return the images below `images` with the objects of COCO's JSON file `labels`.

    Args:
        names: the model's names of the points, or (). If the file has the same names in another order, its points are
            reordered. count: the model's number of points, None if unknown.

    Unreadable images are skipped and added to `skipped`; without `skipped` they are an error.

    Raises:
        MissingFileError: `images` or `labels` does not exist.
        DataError: labels cannot be read, do not have the model's points, or belong to other images.
        ImageError: an unreadable image and `skipped` is None.
    """
    file = read_coco(images, labels, KEYS)
    own, sigmas = _points_of(labels, file.listed)
    objects: dict[Path, list[LabelledObject]] = {}
    for path, listed in file.annotations.items():
        found = [_object(file, *each) for each in listed]
        if kept := [each for each in found if each is not None]:
            objects[path] = kept
    _check_count(labels, own, objects, count)
    order = [own.index(name) for name in names] if own and sorted(own) == sorted(names) else range(count or len(own))
    if sigmas is not None:
        sigmas = tuple(sigmas[i] for i in order)

    def annotate(path: Path, frame: Frame, _: object) -> LabelledObjects:
        return LabelledObjects(
            tuple(
                replace(each, path=path, points=tuple(each.points[i] for i in order), sigmas=sigmas)
                for each in objects[path]
            )
        )

    labelled = replace(file, entries={path: file.entries[path] for path in objects}).annotated(annotate, skipped)
    return KeypointSet(**vars(labelled))


def _points_of(labels: Path, categories: Sequence[Mapping[str, Any]]) -> tuple[tuple[str, ...], Sigmas]:
    """Return the names of the points, and their deviations.

    Raises:
        DataError: categories with different points.
    """
    named = {tuple(map(str, category["keypoints"])) for category in categories if category.get("keypoints")}
    if len(named) > 1:
        raise DataError(
            f"{labels} has categories with different key points",
            found="; ".join(f"{len(each)}: {', '.join(each[:3])} ..." for each in sorted(named)),
            expected="one set of points",
            fix="split the file by category",
        )
    names = next(iter(named), ())
    sigmas = next((category["sigmas"] for category in categories if isinstance(category.get("sigmas"), list)), None)
    if sigmas is not None and len(sigmas) == len(names) and all(isinstance(s, int | float) and s > 0 for s in sigmas):
        return names, tuple(float(sigma) for sigma in sigmas)
    return names, COCO_SIGMAS if list(names) == COCO_POINTS else None


def _object(file: CocoFile, index: int, annotation: Mapping[str, Any]) -> LabelledObject | None:
    """Return one annotated object; None for a crowd, without a labelled point, or without a box with an area."""
    flat = annotation.get("keypoints")
    if flat is None or annotation.get("iscrowd"):
        return None
    try:
        x, y, w, h = (float(value) for value in annotation["bbox"])
        area = float(annotation.get("area", w * h))
        points = tuple((float(a), float(b), int(v)) for a, b, v in zip(*[iter(flat)] * 3, strict=True))
    except (TypeError, ValueError):
        x = y = w = h = area = math.nan
        points = ()
    if not (math.isfinite(x + y + area + sum(a + b for a, b, _ in points)) and 0 <= w < math.inf and 0 <= h < math.inf):
        raise DataError(
            f"{file.labels}: annotations[{index}] has no box with key points",
            found=f"bbox {annotation['bbox']}, keypoints {str(flat)[:60]}",
            expected="bbox x y width height; keypoints x y v for each point",
        )
    if not any(visible > 0 for _, _, visible in points):
        return None
    if not w or not h:
        file.repairs.add("boxes without width or height, ignored", f"annotations[{index}]")
        return None
    return LabelledObject(Path(), None, (x, y, x + w, y + h), points, max(area, 1e-9))


def _check_count(
    labels: Path, names: Sequence[str], objects: Mapping[Path, Sequence[LabelledObject]], count: int | None
) -> None:
    """Raise DataError without objects, or if their points differ from the model's."""
    counts = {len(each.points) for of_image in objects.values() for each in of_image}
    if not counts:
        raise DataError(
            f"{labels} labels no key points",
            found="no annotation with visible keypoints",
            expected="COCO's key points: annotations with bbox and keypoints",
        )
    expected = count or (len(names) if names else min(counts))
    if counts != {expected}:
        raise DataError(
            f"{labels} has different key points than the model",
            found=f"{', '.join(map(str, sorted(counts)))} points: {', '.join(names[:4])} ...",
            expected=f"{expected} points per object",
            fix="use images labelled with the model's key points, or verify without labels (data.labels: none)",
        )
