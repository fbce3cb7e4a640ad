"""Annotated images and COCO files: the common part of detection, key point, panoptic and text data."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt

from vitdeploy.data.decoding import Skipped, skippable
from vitdeploy.data.folder import OWN_SPLIT, DataSplit, Sample, enough, has_own_split, scan, split_places
from vitdeploy.data.label_file import DECIMAL, Repairs
from vitdeploy.errors import DataError, ImageError, MissingFileError
from vitdeploy.paths import is_file, name_bytes
from vitdeploy.runtime.preprocess import Frame, image_frame

# The label that COCO models use for ids that the data set does not use.
UNUSED = "n/a"
MAX_NUMBER = 2**53  # types that every JSON reader accepts
# The types of the values in COCO files.
KEYS: dict[str, type] = {
    **dict.fromkeys(("id", "image_id", "category_id", "width", "height", "isthing"), int),
    **dict.fromkeys(("file_name", "name"), str),
    **dict.fromkeys(("bbox", "segments_info"), list),
}


@dataclass(frozen=True)
class Category:
    """A class of the data set, by its number. `name` is None if the files give numbers only.

    `thing`: has instances (person); otherwise stuff (sky), in the terms of arXiv 1801.00868.
    """

    id: int
    name: str | None
    thing: bool = True


class Annotation(Protocol):
    """The annotation of one image."""

    def content(self) -> bytes:
        """Bytes that differ where two annotations differ."""


class _PlacedAnnotation(Annotation, Protocol):
    """An annotation with pixel coordinates."""

    def turned(self: P, frame: Frame) -> P:
        """Return the annotation for the upright image; this one describes the pixels as stored."""
        ...


@runtime_checkable
class InFile(Protocol):
    """An annotation whose content is read on demand."""

    @property
    def file(self) -> Path:
        """The file to read it from."""
        ...

    def facts(self) -> bytes:
        """Return what is known without reading the file. Together with the file's bytes it identifies the
        annotation."""
        ...


A = TypeVar("A", bound=Annotation)
P = TypeVar("P", bound=_PlacedAnnotation)
Points = npt.NDArray[np.float64]
# COCO's annotations of an image, each with its place in the file.
Objects: TypeAlias = Sequence[tuple[int, Mapping[str, Any]]]
# For each EXIF orientation: whether x and y are swapped, then whether x and y are mirrored.
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
# Inexact boxes may exceed their image by this share of its side.
SLACK = 0.05


@dataclass(frozen=True)
class AnnotatedSet(Generic[A]):
    """The annotated images below `folder`, sorted by path, and the annotation of each, by `Sample.path`.

    Annotations hold category ids of the data set: see `data.classes`. `unannotated` counts the images below `folder`
    without an annotation; they are not in `samples`. `notes`: assumptions and repairs, for the user; `warnings`: what
    makes all numbers on them doubtful.
    """

    folder: Path
    samples: tuple[Sample, ...]
    annotations: Mapping[Path, A]
    categories: tuple[Category, ...]
    unannotated: int
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def split(self, *, calibration: int | None, evaluation: int | Literal["all"], seed: int) -> DataSplit:
        """Choose calibration and evaluation images as `folder.split` does, among the annotated ones.

        Raises:
            DataError: fewer images than requested.
        """
        first: Sequence[Sample] = self.samples
        second: Sequence[Sample] = self.samples
        counts: int | tuple[int, int] = len(first)
        if has_own_split(self.folder):
            first, second = (self._of_part(part) for part in OWN_SPLIT)
            counts = len(first), len(second)
        chosen, rest = split_places((self.folder, self.folder), counts, calibration, evaluation, seed)
        enough(self.folder, len(rest), 1, "evaluation")
        parts = tuple(first[i] for i in chosen), tuple(second[i] for i in rest)
        return DataSplit(*parts, tuple(c.name or str(c.id) for c in self.categories))

    def to_calibrate(self, count: int | None, seed: int) -> tuple[Sample, ...]:
        """`count` annotated images (None: all) in seeded order, from the data set's own calibration part if it has a
        split; the other part stays unseen.

        Raises:
            DataError: fewer images than requested.
        """
        samples = self._of_part(OWN_SPLIT[0]) if has_own_split(self.folder) else self.samples
        enough(self.folder, len(samples), count or 1, "calibration")
        return tuple(samples[i] for i in np.random.RandomState(seed).permutation(len(samples))[:count])

    def _of_part(self, name: str) -> Sequence[Sample]:
        return tuple(sample for sample in self.samples if self.folder / name in sample.path.parents)

    def digest(self, samples: Iterable[Sample]) -> str:
        """Return the SHA-256 over the categories, and over relative path and annotation of the images, in order."""
        total = hashlib.sha256(repr(self.categories).encode())
        for sample in samples:
            content = hashlib.sha256(self.annotations[sample.path].content()).hexdigest()
            total.update(name_bytes(f"{sample.path.relative_to(self.folder).as_posix()}\t{content}\n"))
        return total.hexdigest()


def folder_images(folder: Path) -> dict[str, Path]:
    """The images below `folder` by their path relative to it, and by file name if that is unique; errors as `scan`.

    COCO files name images by file name, regardless of folders.
    """
    paths = [sample.path for sample in scan(folder, "none")[0]]
    times = Counter(path.name for path in paths)
    alone = {path.name: path for path in paths if times[path.name] == 1}
    return {**alone, **{path.relative_to(folder).as_posix(): path for path in paths}}


def frame_or_skip(path: Path, skipped: Skipped | None) -> Frame | None:
    """Return `image_frame`, or None for an unreadable image, which is added to `skipped`."""
    try:
        return image_frame(path)
    except ImageError as error:
        if skipped is None:
            raise skippable(error) from None
        skipped.paths.append(str(path))
        return None


def turn_map(values: npt.NDArray[Any], orientation: int) -> npt.NDArray[Any]:
    """Return [height, width, ...] for the upright image, from values for the pixels as stored."""
    swapped, mirror_x, mirror_y = _TURNS[orientation]
    upright = values.swapaxes(0, 1) if swapped else values
    return np.ascontiguousarray(upright[:: -1 if mirror_y else 1, :: -1 if mirror_x else 1])


def turn_points(points: Points, frame: Frame, last: int = 0) -> Points:
    """Return [..., 2], x and y in the upright image, from points in the pixels as stored. `last`: 1 for pixel indices,
    which end at side - 1; 0 for continuous coordinates."""
    swapped, *mirrored = _TURNS[frame.orientation]
    moved = points[..., ::-1] if swapped else points
    return np.where(mirrored, np.array(frame.size) - last - moved, moved)


def turn_boxes(boxes: Points, frame: Frame) -> Points:
    """[n, 4] as `turn_points`, x0 y0 x1 y1."""
    corners = turn_points(boxes.reshape(-1, 2, 2), frame)
    return np.concatenate([corners.min(1), corners.max(1)], axis=1)


def upright_notes(frames: Iterable[Frame], of_maps: str = "") -> tuple[str, ...]:
    """Return notes on what is assumed for labels of images that EXIF rotates. `of_maps`: the kind of label if labels
    are pictures."""
    turned = sum(frame.orientation != 1 for frame in frames)
    if not turned:
        return ()
    note = f"{turned} images are rotated or mirrored by EXIF; labels are assumed to match the upright image"
    note += f"; a {of_maps} with the size of the stored pixels is rotated with them" if of_maps else ""
    return (f"{note} (if not, save the images without an EXIF orientation)",)


@dataclass(frozen=True)
class CocoFile:
    """COCO's JSON file `labels` for the `count` images below a folder: the entry of each image, and its annotations
    with their indices in the file. `listed`: the categories by id, as in the file."""

    labels: Path
    folder: Path
    count: int
    listed: Sequence[Mapping[str, Any]]
    entries: Mapping[Path, Mapping[str, Any]]
    annotations: Mapping[Path, Objects]
    repairs: Repairs

    @property
    def categories(self) -> tuple[Category, ...]:
        return tuple(Category(each["id"], each["name"], bool(each.get("isthing", True))) for each in self.listed)

    def annotated(self, annotate: Callable[[Path, Frame, Objects], P], skipped: Skipped | None) -> AnnotatedSet[P]:
        """The images as a set; `annotate` gets an image, its frame and its annotations.

        Raises:
            DataError: no image is left, or an image's size differs from the recorded one; and what `annotate` raises.
            ImageError: an unreadable image and `skipped` is None.
        """
        if not self.entries:
            raise nothing_annotated(self.folder, self.labels, f"{self.count} images, none of them annotated")
        read = {path: frame_or_skip(path, skipped) for path in sorted(self.entries)}
        frames = {path: frame for path, frame in read.items() if frame is not None}
        for path, frame in frames.items():
            _check_size(path, frame, self._recorded(path), self.labels)
        lying, notes = self._lying(frames)
        found = {}
        for path, frame in frames.items():
            objects = self.annotations.get(path, ())
            if path in lying:
                found[path] = annotate(path, Frame(frame.stored, 1), objects).turned(frame)
            else:
                found[path] = annotate(path, frame, objects)
        samples = tuple(Sample(path, None) for path in found)
        left = self.count - len(self.entries)
        return AnnotatedSet(self.folder, samples, found, self.categories, left, (*self.repairs.notes, *notes))

    def _recorded(self, path: Path) -> tuple[int, int]:
        return self.entries[path]["width"], self.entries[path]["height"]

    def _lying(self, frames: Mapping[Path, Frame]) -> tuple[set[Path], tuple[str, ...]]:
        """Return the images whose annotations describe the pixels as stored, before EXIF rotation, and notes on that.

        If boxes fit in one way only, that applies to the whole file. Otherwise the recorded sizes decide; if all of
        them that can differ are the stored sizes, that applies to the whole file. The default is upright.

        Raises:
            DataError: some boxes fit the upright image only, and some the stored pixels only.
        """
        turned = {path: frame for path, frame in frames.items() if frame.orientation != 1}
        reach = {path: _reach(self.annotations.get(path, ())) for path in turned}
        stored = [p for p, f in turned.items() if _fits(reach[p], f.stored) and not _fits(reach[p], f.size)]
        upright = [p for p, f in turned.items() if _fits(reach[p], f.size) and not _fits(reach[p], f.stored)]
        if stored and upright:
            raise DataError(
                f"{self.labels.name} annotates some images upright (after EXIF rotation) and some as stored",
                found=f"boxes that only fit {'{}x{}'.format(*turned[upright[0]].size)} in {upright[0].name} (upright), "
                f"and {'{}x{}'.format(*turned[stored[0]].stored)} in {stored[0].name} (stored)",
                expected="boxes in upright coordinates",
                fix="annotate these images again, or save them without an EXIF orientation",
            )
        sideways = {path for path, frame in turned.items() if frame.stored != frame.size}
        by_size = {path for path in sideways if self._recorded(path) == turned[path].stored}
        lying = set() if upright else set(turned) if stored or by_size == sideways != set() else by_size
        if not lying:
            return lying, upright_notes(turned.values())
        example = stored[0] if stored else min(by_size)
        note = f"the annotations of {len(lying)} images describe the stored pixels, and are rotated with them by EXIF"
        why = f"{'the boxes fit' if stored else 'the recorded size is'} the stored size of {example.name}"
        return lying, (f"{note}: {why} (if not, save the images without an EXIF orientation)",)


def _check_size(path: Path, frame: Frame, recorded: tuple[int, int], source: Path) -> None:
    """Raise DataError if the recorded size is neither the image's upright nor its stored size."""
    if recorded not in (frame.size, frame.stored):
        turned = f", {'{}x{}'.format(*frame.stored)} before EXIF's orientation {frame.orientation}"
        raise DataError(
            f"{path.name} does not have the size recorded in {source.name}",
            found="{}x{} pixels (upright".format(*frame.size) + (f"{turned})" if frame.orientation != 1 else ")"),
            expected="{}x{}".format(*recorded),
            fix="use the images that were annotated, not resized or rotated copies",
        )


def _fits(reach: tuple[float, float], size: tuple[int, int]) -> bool:
    return all(furthest <= side + SLACK * max(size) for furthest, side in zip(reach, size, strict=True))


def _reach(objects: Objects) -> tuple[float, float]:
    """The largest x and y of boxes and polygons."""
    most = np.zeros(2)
    for _, each in objects:
        polygons = each.get("segmentation")
        for points in polygons if isinstance(polygons, list) else ():
            with contextlib.suppress(TypeError, ValueError):  # the reader of polygons rejects anything else
                most = np.maximum(most, np.reshape(points, (-1, 2)).astype(np.float64).max(0))
        with contextlib.suppress(KeyError, TypeError, ValueError):
            x, y, width, height = map(float, each["bbox"])
            most = np.maximum(most, (x + width, y + height))
    return float(most[0]), float(most[1])


def read_coco(images: Path, labels: Path, keys: Mapping[str, tuple[str, ...]]) -> CocoFile:
    """Read COCO's JSON file. Identical repeated entries count once.

    Args:
        keys: the lists that the file must have, each with the keys of its entries (see `KEYS`).

    Raises:
        MissingFileError: `images` or `labels` is not there.
        DataError: as `read_json`; two images or categories share an id; an annotation of an image or a category that is
            not listed; the file names none of the images.
    """
    paths, repairs = folder_images(images), Repairs()
    document = read_json(labels, keys, repairs)
    listed = _once(labels, document["images"], "images", "file_name", repairs)
    named = _once(labels, document["categories"], "categories", "name", repairs)
    written = [entry["file_name"] for entry in listed.values()]
    names = located(images, paths, written, repairs)
    entries: dict[Path, Mapping[str, Any]] = {}
    for entry in listed.values():
        path = names.get(entry["file_name"])
        if path is None:
            continue
        first = entries.setdefault(path, entry)
        if first is not entry:
            sizes = [f"{image['width']}x{image['height']}" for image in (first, entry)]
            if sizes[0] != sizes[1]:
                raise DataError(
                    f"{labels} lists {path.name} with two different sizes", found=" and ".join(sizes), expected="one"
                )
            repairs.add("images listed under several ids, their annotations merged", entry["file_name"])
    if not entries:
        raise other_names(images, labels, paths, written)
    annotations: dict[Path, list[tuple[int, Mapping[str, Any]]]] = {}
    known: dict[tuple[object, ...], list[Mapping[str, Any]]] = {}
    for index, annotation in enumerate(document["annotations"]):
        for what, ids in (("an image", listed), ("a category", named)):
            key = f"{what.split()[1]}_id"
            if key in keys["annotations"] and annotation[key] not in ids:
                raise DataError(
                    f"{labels}: annotations[{index}] refers to {what} that is not listed",
                    found=f"{key} {annotation[key]}",
                )
        path = names.get(listed[annotation["image_id"]]["file_name"])
        if path is None:
            continue
        same = known.setdefault((path, annotation.get("category_id"), repr(annotation.get("bbox"))), [])
        if any(_content(other) == _content(annotation) for other in same):
            repairs.add("repeated annotations, counted once", f"annotations[{index}]")
            continue
        same.append(annotation)
        annotations.setdefault(path, []).append((index, annotation))
    categories = [named[id] for id in sorted(named)]
    return CocoFile(labels, images, len(set(paths.values())), categories, entries, annotations, repairs)


def _content(annotation: Mapping[str, Any]) -> tuple[object, ...]:
    """Return the content of an annotation."""
    return tuple(annotation.get(key) for key in ("segmentation", "keypoints", "segments_info", "iscrowd"))


def _once(
    labels: Path, entries: Sequence[dict[str, Any]], kind: str, name: str, repairs: Repairs
) -> dict[int, dict[str, Any]]:
    """Return entries by id. Raises DataError if two entries with different names share an id."""
    by_id: dict[int, dict[str, Any]] = {}
    for index, entry in enumerate(entries):
        first = by_id.setdefault(entry["id"], entry)
        if first is entry:
            continue
        if first[name] != entry[name]:
            raise DataError(
                f"{labels}: two {kind} have the id {entry['id']}",
                found=f"{first[name]!r} and {entry[name]!r}",
                expected="a unique id for each",
                fix="renumber them, in the lists and in the annotations",
            )
        repairs.add(f"repeated {kind}, counted once", f"{kind}[{index}]")
    return by_id


def located(images: Path, paths: Mapping[str, Path], names: Sequence[str], repairs: Repairs) -> dict[str, Path]:
    """Return the image for each name in a label file, without names of missing images.

    A name may contain ./, backslashes, or folders above the images (images/a.png). If several such names fit an image,
    the ones that share most folders with its path count: below val/ that is val/a.png, not train/a.png.

    Args:
        paths: as `folder_images` finds them below `images`.

    Raises:
        DataError: two such names match one image equally well.
    """
    above, located = images.absolute().parts, {name: paths[name] for name in names if name in paths}
    # By image: whether the whole name is the end of its path, the number of shared parts, and the name.
    others: dict[Path, list[tuple[bool, int, str]]] = {}
    for name in dict.fromkeys(names):
        parts = [part for part in name.replace("\\", "/").split("/") if part not in ("", ".")]
        for start in range(len(parts) if name not in located else 0):
            path = paths.get("/".join(parts[start:]))
            if path is None:
                continue
            below = path.relative_to(images).parts
            shared = _shared(parts, (*above, *below))
            if shared == len(parts) or shared >= len(below):
                others.setdefault(path, []).append((shared == len(parts), shared, name))
                break
    exact = set(located.values())
    for path, ranked in others.items():
        whole = [name for is_whole, _, name in ranked if is_whole]
        most = max(shared for _, shared, _ in ranked)
        chosen = whole or [name for _, shared, name in ranked if shared == most and path not in exact]
        if len(chosen) > max(1, len(whole)):
            raise DataError(
                f"two names match {path}",
                found=" and ".join(chosen[:2]),
                expected=f"one name for each image below {images}",
                fix="write the names relative to the image folder, or pass its parent folder",
            )
        for name in chosen:
            located[name] = path
            repairs.add("names with ./, backslashes or other folders, matched by the end", f"{name} is {path.name}")
    return located


def _shared(parts: Sequence[str], path: Sequence[str]) -> int:
    """Return the number of trailing parts that two paths share."""
    pairs = zip(reversed(parts), reversed(path), strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(parts), len(path)))


def other_names(images: Path, labels: Path, paths: Mapping[str, Path], names: Sequence[str]) -> DataError:
    """Return the error for labels that name none of the images."""
    there = next(iter(paths.values())).relative_to(images).as_posix()
    first = f", such as {names[0]!r} (the folder contains {there!r})" if names else ""
    return nothing_annotated(images, labels, f"{len(names)} images with other names{first}")


def read_json(path: Path, keys: Mapping[str, tuple[str, ...]], repairs: Repairs) -> dict[str, list[dict[str, Any]]]:
    """Return the lists of objects in a COCO file. `keys`: the expected lists, each with the keys of its entries (see
    `KEYS`). Integers written with a decimal point are accepted.

    Raises:
        MissingFileError: no such file.
        DataError: not JSON; a list is missing; an entry lacks a key or has a value of the wrong type.
    """
    if not is_file(path):
        raise MissingFileError(f"no annotation file at {path}", fix="check the path")
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise DataError(f"{path} is not a JSON file", found=str(error)[:200]) from None
    for name, expected in keys.items():
        entries = document.get(name) if isinstance(document, dict) else None
        if not isinstance(entries, list):
            raise DataError(
                f"{path} is not a COCO annotation file", found=f"no list {name!r}", expected=f"lists {', '.join(keys)}"
            )
        for index, entry in enumerate(entries):
            for key in expected if isinstance(entry, dict) else ():
                if KEYS[key] is int and isinstance(entry.get(key), float) and entry[key].is_integer():
                    repairs.add(DECIMAL, f"{name}[{index}].{key}: {entry[key]}")
                    entry[key] = int(entry[key])
            check_keys(path, f"{name}[{index}]", entry, expected)
    return {name: document[name] for name in keys}


def check_keys(path: Path, where: str, entry: object, expected: tuple[str, ...]) -> None:
    """Raise DataError if an entry of a COCO file lacks a key, or its value has the wrong type."""
    wrong = [key for key in expected if not isinstance(entry, dict) or not _is_usable(entry.get(key), KEYS[key])]
    if wrong:
        raise DataError(
            f"{path}: {where} has a missing or invalid {', '.join(wrong)}",
            found=repr(entry)[:80],
            expected=", ".join(f"{key} ({KEYS[key].__name__})" for key in expected),
        )


def _is_usable(value: object, kind: type) -> bool:
    return isinstance(value, kind) and not (isinstance(value, int) and abs(value) > MAX_NUMBER)


def nothing_annotated(folder: Path, source: Path, found: str) -> DataError:
    """Return the error for a `source` that annotates no image of `folder`."""
    return DataError(
        f"{source} annotates no image of {folder}", found=found, fix="check that the labels belong to these images"
    )


# --- Texts in images: a JSON file that lists, for each image, its `file_name` and the `text` in it --------------------


EXAMPLE = '[{"file_name": "line.png", "text": "the text in the image"}, ...]'


@dataclass(frozen=True)
class WrittenText:
    """The text in one image."""

    text: str

    def content(self) -> bytes:
        return name_bytes(self.text)


TextSet = AnnotatedSet[WrittenText]


def read_written(images: Path, file: Path) -> TextSet:
    """Return the images below `images` with a text in the file, by their path below that folder, or by file name if
    unique.

    Raises:
        MissingFileError: no such folder or file.
        DataError: not a list of file names and texts; an image with two texts; none of the folder's images.
    """
    paths, repairs = folder_images(images), Repairs()
    entries = _entries(file, repairs)
    named: dict[Path, str] = {}
    for name, path in located(images, paths, [*entries], repairs).items():
        if named.setdefault(path, entries[name]) != entries[name]:
            raise DataError(f"{file} has two texts for one image", found=str(path), expected="one row per image")
    if not named:
        raise other_names(images, file, paths, [*entries])
    found = {path: WrittenText(named[path]) for path in sorted(named)}
    samples = tuple(Sample(path, None) for path in found)
    return AnnotatedSet(images, samples, found, (), len(set(paths.values())) - len(found), repairs.notes)


def _entries(file: Path, repairs: Repairs) -> dict[str, str]:
    """Return the texts by file name."""
    if not is_file(file):
        raise MissingFileError(f"no text file at {file}", expected=EXAMPLE, fix="check the path of --annotations")
    try:
        document: Any = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:  # a UnicodeDecodeError is a ValueError
        raise DataError(f"{file} is not a JSON file", found=str(error)[:200], expected=EXAMPLE) from None
    rows = document if isinstance(document, list) else [document]
    keys = ("file_name", "text")
    usable = (isinstance(row, dict) and all(isinstance(row.get(key), str) for key in keys) for row in rows)
    wrong = next((row for row, is_usable in zip(rows, usable, strict=True) if not is_usable), None)
    if wrong is not None or not rows:
        found = "an empty list" if not rows else repr(wrong)[:80]
        raise DataError(f"{file} is not a list of images and their texts", found=found, expected=EXAMPLE)
    texts: dict[str, str] = {}
    for row in rows:
        name = row["file_name"]
        if texts.setdefault(name, row["text"]) != row["text"]:
            raise DataError(f"{file} has two texts for one image", found=name, expected="one row per image")
    if len(texts) < len(rows):
        repairs.add("repeated rows, counted once", rows[-1]["file_name"], len(rows) - len(texts))
    return texts
