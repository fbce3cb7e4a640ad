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

from vitdeploy.data.folder import OWN_SPLIT, DataSplit, Sample, enough, has_own_split, scan, usual_calibration
from vitdeploy.data.pixels import Skipped
from vitdeploy.errors import DataError, ImageError, MissingFileError
from vitdeploy.paths import is_file
from vitdeploy.runtime.preprocess import FORMATS, READ, check_decodable

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


@dataclass(frozen=True)
class AnnotatedSet(Generic[A]):
    """The annotated images below `folder`, sorted by path, and the annotation of each, by `Sample.path`.

    Annotations hold category ids of the data set: see `data.classes`. `unannotated` counts the images below `folder`
    without an annotation; they are not in `samples`.
    """

    folder: Path
    samples: tuple[Sample, ...]
    annotations: Mapping[Path, A]
    categories: tuple[Category, ...]
    unannotated: int

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


def image_size(path: Path) -> tuple[int, int]:
    """(width, height) of the image as it is shown, upright by its EXIF orientation; reads the header only.

    Raises:
        ImageError: not an image.
    """
    from PIL import ExifTags, Image

    try:
        with Image.open(path, formats=FORMATS) as image:
            width, height = image.size
            check_decodable(width, height, str(path))
            turned = image.getexif().get(ExifTags.Base.Orientation, 1) >= 5
    except ImageError:
        raise
    except Exception as error:  # as in `runtime.preprocess`: decoders raise whatever they like
        raise ImageError(
            f"{path} cannot be read as an image",
            found=str(error)[:200] or type(error).__name__,
            wanted=f"a whole {READ} file",
            fix="replace the file or take it out (--skip-bad goes on without such files and counts them)",
        ) from None
    return (height, width) if turned else (width, height)


def size_or_skip(path: Path, skipped: Skipped | None) -> tuple[int, int] | None:
    """`image_size`, or None for an unreadable image that is noted in `skipped`."""
    try:
        return image_size(path)
    except ImageError:
        if skipped is None:
            raise
        skipped.paths.append(str(path))
        return None


def check_size(path: Path, size: tuple[int, int], told: tuple[int, int], source: Path) -> None:
    """Raise DataError if the annotations give another size for the image."""
    if size != told:
        raise DataError(
            f"{path.name} is not of the size that {source.name} says",
            found=f"{size[0]}x{size[1]} pixels (upright)",
            wanted=f"{told[0]}x{told[1]}",
            fix="take the images that were annotated, not resized or turned copies",
        )


def coco_set(
    images: Path,
    labels: Path,
    paths: Mapping[str, Path],
    entries: Sequence[Mapping[str, Any]],
    categories: tuple[Category, ...],
    annotate: Callable[[Mapping[str, Any], tuple[int, int]], A],
    skipped: Skipped | None,
) -> AnnotatedSet[A]:
    """The images below `images` that a COCO file's `entries` name. `annotate` gets an entry and the image's size.

    `paths` are the images as `folder_images` finds them.

    Raises:
        DataError: it names none of them, or an image has another size than recorded; and what `annotate` raises.
        ImageError: an unreadable image and `skipped` is None.
    """
    listed = {paths[entry["file_name"]]: entry for entry in entries if entry["file_name"] in paths}
    if not listed:
        raise nothing_annotated(images, labels, f"{len(entries)} images of other names")
    found = {}
    for path in sorted(listed):
        entry = listed[path]
        size = size_or_skip(path, skipped)
        if size is not None:
            check_size(path, size, (entry["width"], entry["height"]), labels)
            found[path] = annotate(entry, size)
    samples = tuple(Sample(path, None) for path in found)
    return AnnotatedSet(images, samples, found, categories, len(set(paths.values())) - len(listed))


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
