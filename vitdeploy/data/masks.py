"""Semantic labels: for each image a PNG of class indices, of the same name below another folder."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.data.annotations import AnnotatedSet, frame_or_skip, nothing_annotated, turn_map, upright_notes
from vitdeploy.data.decoding import Skipped
from vitdeploy.data.folder import Sample, scan
from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.paths import is_dir
from vitdeploy.runtime.preprocess import Frame, decode

VOID = -1
# Pillow's modes of one number per pixel.
MODES = ("1", "L", "P", "I", "I;16", "I;16B")
# White of 8 and of 16 bits: how programs write the one class of a mask beside its background.
WHITE = (255, 65535)
NAMED = 5


@dataclass(frozen=True)
class MaskAnnotation:
    """The PNG of one image, which lies as `frame` says. `white`: a value that stands for class 1; None: each is its
    own."""

    file: Path
    frame: Frame
    white: int | None = None

    def content(self) -> bytes:
        """Bytes that differ where two annotations differ."""
        return self.facts() + self.file.read_bytes()

    def facts(self) -> bytes:
        return repr(self.frame if self.white is None else (self.frame, self.white)).encode()

    def values(self) -> npt.NDArray[np.int32]:
        """int32 [height, width] of the upright image, as the file has them; errors as `load`."""
        return np.asarray(read_map(self.file, "a PNG of class indices", self.frame), np.int32)

    def load(self, classes: int, ignore: int, reduce_labels: bool) -> npt.NDArray[np.int32]:
        """int32 [height, width] of classes, VOID where a pixel has the value `ignore`; with `reduce_labels` the value 0
        has no class either, and 1 is class 0.

        Raises:
            ImageError: the file cannot be read.
            DataError: it is no map of numbers, of another size than the image, or has numbers that are no class.
        """
        values = self.values()
        if self.white is not None:
            return np.where(values == self.white, np.int32(1), values)
        found = np.where(values == ignore, VOID, values - 1 if reduce_labels else values)
        unknown = np.unique(found[found >= classes]) + int(reduce_labels)
        if len(unknown):
            raise DataError(
                f"{self.file} holds numbers that are no class of the model",
                found=", ".join(map(str, unknown[:5].tolist())),
                wanted=f"0 to {classes - 1 + int(reduce_labels)}, or {ignore} for no class",
                fix="set postprocess.ignore, or postprocess.reduce_labels (0 is no class, 1 the first)",
            )
        return np.asarray(found, np.int32)


MaskSet = AnnotatedSet[MaskAnnotation]


def read_masks(images: Path, labels: Path, skipped: Skipped | None = None) -> MaskSet:
    """The images below `images` with a PNG of the same relative name below `labels`. The PNGs are read by `load`.

    With `skipped` given, unreadable images are noted there and left out; without, they are an error.

    Raises:
        MissingFileError: no such folder. DataError: no image has a map. ImageError: as above.
    """
    samples, missing = with_maps(images, labels, (".png",), skipped)
    found = {path: MaskAnnotation(file, frame) for path, (file, frame) in samples.items()}
    notes = upright_notes((each.frame for each in found.values()), "map")
    return AnnotatedSet(images, tuple(Sample(path, None) for path in found), found, (), missing, notes)


def understood(maps: MaskSet, labels: Sequence[str], classes: int, ignore: int, reduce_labels: bool) -> MaskSet:
    """The maps as a model of so many classes takes them, with a note or a warning where their values may mean another
    thing. All maps are read once.

    With two classes, maps of 0 and white are maps of 0 and 1, unless a map has white beside 1. `labels`: the names of
    the classes, () without.

    Raises:
        ImageError, DataError: as `MaskAnnotation.load`.
    """
    pixels: Counter[int] = Counter()
    holding: dict[Path, set[int]] = {}
    for path, annotation in maps.annotations.items():
        counts = _counts(annotation.values())
        pixels.update(counts)
        holding[path] = set(counts)
    annotations, notes, warnings = dict(maps.annotations), list(maps.notes), list(maps.warnings)
    white = None if reduce_labels or classes != 2 or not ignore else _white(holding.values())
    if white is not None:
        whites = [path for path, values in holding.items() if white in values]
        text = (
            f"labels: maps of 0 and {white}, read as 0 and 1: {len(whites):,} of {len(holding):,} (first: "
            f"{annotations[whites[0]].file.name}); where {white} is no class, write 254 and set postprocess.ignore: 254"
        )
        (warnings if pixels[1] else notes).append(text)
        annotations |= {path: replace(annotations[path], white=white) for path in whites}
        pixels[1] += pixels.pop(white)
    for path, values in holding.items():
        if white is None and max(values - {ignore}, default=0) >= classes + reduce_labels:
            annotations[path].load(classes, ignore, reduce_labels)  # which names them
    void = 0 if white is not None else pixels.pop(ignore, 0)
    missing = [index for index in range(classes) if not pixels[index + reduce_labels]]
    if missing:
        names = [f"{index}" + (f" ({labels[index]})" if index < len(labels) else "") for index in missing[:NAMED]]
        more = f" and {len(missing) - NAMED} more" if len(missing) > NAMED else ""
        text = f"no pixel of the labels has class {', '.join(names)}{more} of {classes}: mIoU says nothing about it"
        if void:
            share = 100 * void / (void + pixels.total())
            text += f"; {ignore} is read as no class ({share:.2g} % of the pixels): where it is one, write its number"
            text += " instead, or set postprocess.ignore to another number" if ignore < classes + reduce_labels else ""
        warnings.append(text)
    return replace(maps, annotations=annotations, notes=tuple(notes), warnings=tuple(warnings))


def _counts(values: npt.NDArray[np.int32]) -> dict[int, int]:
    """How many pixels have each value."""
    if values.min() < 0 or values.max() >= 1 << 16:
        present, counts = np.unique(values, return_counts=True)
        return dict(zip(present.tolist(), counts.tolist(), strict=True))
    every = np.bincount(values.ravel())
    return {int(value): int(every[value]) for value in np.flatnonzero(every)}


def _white(maps: Collection[set[int]]) -> int | None:
    """The value that stands for class 1 in maps of two classes: white, where no map has it beside 1."""
    for white in WHITE:
        several = any({1, white} <= values for values in maps)
        if set().union(*maps) in ({0, white}, {0, 1, white}) and not several:
            return white
    return None


def with_maps(
    images: Path, labels: Path, suffixes: tuple[str, ...], skipped: Skipped | None
) -> tuple[dict[Path, tuple[Path, Frame]], int]:
    """The images below `images` that have a file of the same relative name, with one of the suffixes, below `labels`:
    the file and how the image lies; and how many have none. Errors as `read_masks`."""
    if not is_dir(labels):
        raise MissingFileError(f"no folder of labels at {labels}", fix="check the path of --annotations")
    found: dict[Path, tuple[Path, Frame]] = {}
    missing = 0
    every = [sample.path for sample in scan(images, "none")[0] if labels not in sample.path.parents]
    for path in every:
        names = [labels / path.relative_to(images).with_suffix(suffix) for suffix in suffixes]
        file = next((name for name in names if name.is_file()), None)
        if file is None:
            missing += 1
        elif (frame := frame_or_skip(path, skipped)) is not None:
            found[path] = file, frame
    if not found:
        names_of = " or ".join(suffixes)
        raise nothing_annotated(images, labels, f"{len(every)} images, and no {names_of} of the same name for any")
    return found, missing


def read_map(path: Path, wanted: str, frame: Frame) -> npt.NDArray[Any]:
    """The numbers of a picture of one channel, a palette's indices, for an image that lies as `frame` says.

    Raises:
        MissingFileError, ImageError: unreadable. DataError: a picture of several channels, or of another size.
    """
    image = decode(path, None)
    if image.mode not in MODES:
        raise DataError(f"{path} is no map of numbers", found=f"a picture of mode {image.mode}", wanted=wanted)
    return fit_map(path, np.asarray(image), frame)


def fit_map(path: Path, values: npt.NDArray[Any], frame: Frame) -> npt.NDArray[Any]:
    """[height, width, ...] of the upright image, of a map of its size, or of that of its pixels as they are stored.

    Raises:
        DataError: it is of another size.
    """
    size = values.shape[1::-1]
    if size == frame.size:
        return values
    if size != frame.stored:
        stored = f", or {'{}x{}'.format(*frame.stored)} as it is stored before EXIF's orientation {frame.orientation}"
        raise DataError(
            f"{path} is not of the size of its image",
            found="x".join(map(str, size)),
            wanted="{}x{} pixels (upright)".format(*frame.size) + (stored if frame.stored != frame.size else ""),
        )
    return turn_map(values, frame.orientation)
