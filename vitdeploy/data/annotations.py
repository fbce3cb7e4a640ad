"""The common part of detection and panoptic data: categories, annotated images, their split and their digest."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from vitdeploy.data.folder import OWN_SPLIT, DataSplit, Sample, enough, has_own_split, scan, usual_calibration
from vitdeploy.data.pixels import Skipped, skippable
from vitdeploy.errors import DataError, ImageError, MissingFileError
from vitdeploy.paths import is_file
from vitdeploy.runtime.preprocess import Frame, image_frame

# What the label lists of COCO models say for the ids that the data set does not use.
UNUSED = "n/a"
MAX_NUMBER = 2**53  # what every reader of JSON takes
# The types of the values in COCO's files.
KEYS: dict[str, type] = {
    **dict.fromkeys(("id", "image_id", "category_id", "width", "height", "isthing"), int),
    **dict.fromkeys(("file_name", "name"), str),
    **dict.fromkeys(("bbox", "segments_info"), list),
}


@dataclass(frozen=True)
class Category:
    """A class as the data set numbers it. `name` is None if its files give numbers only.

    `thing`: has instances (person); otherwise stuff (sky), in the words of arXiv 1801.00868.
    """

    id: int
    name: str | None
    thing: bool = True


class Annotation(Protocol):
    """What is known about one image."""

    def content(self) -> bytes:
        """Bytes that differ where two annotations differ."""


class Placed(Annotation, Protocol):
    """One with coordinates of pixels."""

    @property
    def reach(self) -> tuple[float, float]:
        """The largest x and y that it has; zeros where it has none."""
        ...

    def turned(self: P, frame: Frame) -> P:
        """The same of the upright image, where this is of the pixels as they are stored."""
        ...


@runtime_checkable
class InFile(Protocol):
    """An annotation whose content is read when it is needed."""

    @property
    def file(self) -> Path:
        """Where it is read from."""
        ...

    def facts(self) -> bytes:
        """What is known without reading it: with the bytes of the file all that tells two annotations apart."""
        ...


A = TypeVar("A", bound=Annotation)
P = TypeVar("P", bound=Placed)
Points = npt.NDArray[np.float64]
# Of each EXIF orientation whether x and y change places, and whether x and y are then mirrored.
_TURNS = {
    1: (False, False, False),
    2: (False, True, False),
    3: (False, True, True),
    4: (False, False, True),
    5: (True, False, False),
    6: (True, True, False),
    7: (True, True, True),
    8: (True, False, True),
}
# Boxes reach so many pixels beyond their image by rounding.
SLACK = 2.0


@dataclass(frozen=True)
class AnnotatedSet(Generic[A]):
    """The annotated images below `folder`, sorted by path, and the annotation of each, by `Sample.path`.

    Annotations hold category ids of the data set: see `data.classes`. `unannotated` counts the images below `folder`
    without an annotation; they are not in `samples`. `notes`: what was assumed of them, for people.
    """

    folder: Path
    samples: tuple[Sample, ...]
    annotations: Mapping[Path, A]
    categories: tuple[Category, ...]
    unannotated: int
    notes: tuple[str, ...] = ()

    def split(self, *, calibration: int | None, evaluation: int | Literal["all"], seed: int) -> DataSplit:
        """Choose calibration and evaluation images as `folder.split` does, among the annotated ones.

        Raises:
            DataError: fewer images than asked for.
        """
        generator = np.random.RandomState(seed)
        if has_own_split(self.folder):
            first, second = ([s for s in self.samples if self.folder / part in s.path.parents] for part in OWN_SPLIT)
            calibration = usual_calibration(len(first), own=True) if calibration is None else calibration
            enough(self.folder, len(first), calibration, "calibration")
            chosen = [first[i] for i in generator.permutation(len(first))[:calibration]]
            rest = [second[i] for i in generator.permutation(len(second))]
        else:
            calibration = usual_calibration(len(self.samples)) if calibration is None else calibration
            what = "calibration (and at least one more to evaluate)"
            enough(self.folder, len(self.samples) - 1, calibration, what)
            shuffled = [self.samples[i] for i in generator.permutation(len(self.samples))]
            chosen, rest = shuffled[:calibration], shuffled[calibration:]
        if evaluation != "all":
            enough(self.folder, len(rest), evaluation, "evaluation")
            rest = rest[:evaluation]
        enough(self.folder, len(rest), 1, "evaluation")
        return DataSplit(tuple(chosen), tuple(rest), tuple(c.name or str(c.id) for c in self.categories))

    def to_calibrate(self, count: int | None, seed: int) -> tuple[Sample, ...]:
        """`count` annotated images (None: all) in seeded order, of the data set's own calibration part where it brings
        a split, whose other part stays unseen.

        Raises:
            DataError: fewer images than asked for.
        """
        samples: Sequence[Sample] = self.samples
        if has_own_split(self.folder):
            samples = [each for each in samples if self.folder / OWN_SPLIT[0] in each.path.parents]
        enough(self.folder, len(samples), count or 1, "calibration")
        return tuple(samples[i] for i in np.random.RandomState(seed).permutation(len(samples))[:count])

    def digest(self, samples: Iterable[Sample]) -> str:
        """SHA-256 over the categories, and over relative path and annotation of the images, in order."""
        total = hashlib.sha256(repr(self.categories).encode())
        for sample in samples:
            content = hashlib.sha256(self.annotations[sample.path].content()).hexdigest()
            total.update(f"{sample.path.relative_to(self.folder).as_posix()}\t{content}\n".encode())
        return total.hexdigest()


def folder_images(folder: Path) -> dict[str, Path]:
    """The images below `folder` by their path relative to it, and by file name if that is unique; errors as `scan`.

    COCO's files name images by file name, whatever their folders.
    """
    paths = [sample.path for sample in scan(folder, "none")[0]]
    times = Counter(path.name for path in paths)
    alone = {path.name: path for path in paths if times[path.name] == 1}
    return {**alone, **{path.relative_to(folder).as_posix(): path for path in paths}}


def frame_or_skip(path: Path, skipped: Skipped | None) -> Frame | None:
    """`image_frame`, or None for an unreadable image that is noted in `skipped`."""
    try:
        return image_frame(path)
    except ImageError as error:
        if skipped is None:
            raise skippable(error) from None
        skipped.paths.append(str(path))
        return None


def turn_map(values: npt.NDArray[Any], orientation: int) -> npt.NDArray[Any]:
    """[height, width, ...] of the upright image, of values for the pixels as they are stored."""
    swapped, mirror_x, mirror_y = _TURNS[orientation]
    upright = values.swapaxes(0, 1) if swapped else values
    return np.ascontiguousarray(upright[:: -1 if mirror_y else 1, :: -1 if mirror_x else 1])


def turn_points(points: Points, frame: Frame, last: int = 0) -> Points:
    """[..., 2], x and y in the upright image, of points in the pixels as they are stored. `last`: 1 of places of
    pixels, the largest of which is one less than the side; 0 of lengths."""
    swapped, *mirrored = _TURNS[frame.orientation]
    moved = points[..., ::-1] if swapped else points
    return np.where(mirrored, np.array(frame.size) - last - moved, moved)


def turn_boxes(boxes: Points, frame: Frame) -> Points:
    """[n, 4] as `turn_points`, x0 y0 x1 y1."""
    corners = turn_points(boxes.reshape(-1, 2, 2), frame)
    return np.concatenate([corners.min(1), corners.max(1)], axis=1)


def upright_notes(frames: Iterable[Frame], of_maps: str = "") -> tuple[str, ...]:
    """What is assumed of the labels of images that EXIF turns. `of_maps`: what they are, where they are pictures."""
    turned = sum(frame.orientation != 1 for frame in frames)
    if not turned:
        return ()
    told = f"{turned} images are turned or mirrored by their EXIF orientation, and labels are of the upright image"
    told += f"; a {of_maps} of the size of the pixels as they are stored is turned with them" if of_maps else ""
    return (f"{told} (if they are not: save the images without an orientation)",)


def coco_set(
    images: Path,
    labels: Path,
    paths: Mapping[str, Path],
    entries: Sequence[Mapping[str, Any]],
    categories: tuple[Category, ...],
    annotate: Callable[[Mapping[str, Any], Frame], P],
    skipped: Skipped | None,
) -> AnnotatedSet[P]:
    """The images below `images` that a COCO file's `entries` name. `annotate` gets an entry and how its image lies.

    `paths` are the images as `folder_images` finds them.

    Raises:
        DataError: it names none of them, or an image has another size than recorded; and what `annotate` raises.
        ImageError: an unreadable image and `skipped` is None.
    """
    listed = {paths[entry["file_name"]]: entry for entry in entries if entry["file_name"] in paths}
    if not listed:
        raise nothing_annotated(images, labels, f"{len(entries)} images of other names")
    found: dict[Path, P] = {}
    frames: dict[Path, Frame] = {}
    recorded: dict[Path, tuple[int, int]] = {}
    for path in sorted(listed):
        entry, frame = listed[path], frame_or_skip(path, skipped)
        if frame is not None:
            recorded[path] = entry["width"], entry["height"]
            _check_size(path, frame, recorded[path], labels)
            found[path], frames[path] = annotate(entry, frame), frame
    lying, notes = _lying(labels, found, frames, recorded)
    upright = {path: each.turned(frames[path]) if path in lying else each for path, each in found.items()}
    samples = tuple(Sample(path, None) for path in upright)
    return AnnotatedSet(images, samples, upright, categories, len(set(paths.values())) - len(listed), notes)


def _check_size(path: Path, frame: Frame, recorded: tuple[int, int], source: Path) -> None:
    """Raise DataError if the annotations give another size for the image, upright or as it is stored."""
    if recorded not in (frame.size, frame.stored):
        turned = f", {'{}x{}'.format(*frame.stored)} before EXIF's orientation {frame.orientation}"
        raise DataError(
            f"{path.name} is not of the size that {source.name} says",
            found="{}x{} pixels (upright".format(*frame.size) + (f"{turned})" if frame.orientation != 1 else ")"),
            wanted="{}x{}".format(*recorded),
            fix="take the images that were annotated, not resized or turned copies",
        )


def _lying(
    labels: Path,
    annotations: Mapping[Path, Placed],
    frames: Mapping[Path, Frame],
    recorded: Mapping[Path, tuple[int, int]],
) -> tuple[set[Path], tuple[str, ...]]:
    """The images whose annotations are of the pixels as they are stored, before EXIF turns them, and notes on that.

    A file whose boxes fit one way only is of that way throughout. Otherwise the sizes that it records decide; where
    they are as stored wherever that makes a difference, it is so throughout. What nothing decides is upright.

    Raises:
        DataError: some boxes fit the upright image only, and some the stored pixels only.
    """
    turned = {path: frame for path, frame in frames.items() if frame.orientation != 1}
    reach = {path: annotations[path].reach for path in turned}
    stored = [p for p, f in turned.items() if _fits(reach[p], f.stored) and not _fits(reach[p], f.size)]
    upright = [p for p, f in turned.items() if _fits(reach[p], f.size) and not _fits(reach[p], f.stored)]
    if stored and upright:
        raise DataError(
            f"{labels.name} annotates some images as EXIF turns them, and some as they are stored",
            found=f"boxes that only fit {'{}x{}'.format(*turned[upright[0]].size)} in {upright[0].name} (upright), "
            f"and {'{}x{}'.format(*turned[stored[0]].stored)} in {stored[0].name} (stored)",
            wanted="boxes in the upright images",
            fix="annotate these images anew, or save them without an orientation",
        )
    sideways = {path for path, frame in turned.items() if frame.stored != frame.size}
    by_size = {path for path in sideways if recorded[path] == turned[path].stored}
    lying = set() if upright else set(turned) if stored or by_size == sideways != set() else by_size
    if not lying:
        return lying, upright_notes(turned.values())
    example = stored[0] if stored else min(by_size)
    told = f"the annotations of {len(lying)} images are of the pixels as stored, and are turned with them by EXIF"
    why = f"boxes of {example.name} fit" if stored else f"the size of {example.name} is recorded"
    return lying, (f"{told}: {why} so (if they are not: save the images without an orientation)",)


def _fits(reach: tuple[float, float], size: tuple[int, int]) -> bool:
    return all(furthest <= side + SLACK for furthest, side in zip(reach, size, strict=True))


def read_json(path: Path, keys: Mapping[str, tuple[str, ...]]) -> dict[str, list[dict[str, Any]]]:
    """The lists of objects in a COCO file. `keys`: the wanted lists, each with the keys of its entries (see `KEYS`).

    Raises:
        MissingFileError: no such file.
        DataError: not JSON; a list is not there; an entry lacks a key or holds a value of another type.
    """
    if not is_file(path):
        raise MissingFileError(f"no annotation file at {path}", fix="check the path")
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise DataError(f"{path} is not a JSON file", found=str(error)[:200]) from None
    for name, wanted in keys.items():
        entries = document.get(name) if isinstance(document, dict) else None
        if not isinstance(entries, list):
            raise DataError(
                f"{path} is not a COCO annotation file", found=f"no list {name!r}", wanted=f"lists {', '.join(keys)}"
            )
        for index, entry in enumerate(entries):
            check_keys(path, f"{name}[{index}]", entry, wanted)
    return {name: document[name] for name in keys}


def check_keys(path: Path, where: str, entry: object, wanted: tuple[str, ...]) -> None:
    """Raise DataError if an entry of a COCO file lacks a key, or its value has another type."""
    wrong = [key for key in wanted if not isinstance(entry, dict) or not _is_usable(entry.get(key), KEYS[key])]
    if wrong:
        raise DataError(
            f"{path}: {where} has no usable {', '.join(wrong)}",
            found=repr(entry)[:80],
            wanted=", ".join(f"{key} ({KEYS[key].__name__})" for key in wanted),
        )


def _is_usable(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not (isinstance(value, int) and abs(value) > MAX_NUMBER)


def nothing_annotated(folder: Path, source: Path, found: str) -> DataError:
    """The error that `source` annotates no image of `folder`."""
    return DataError(
        f"{source} annotates not one image of {folder}", found=found, fix="check that images and labels belong together"
    )
