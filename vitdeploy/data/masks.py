"""Semantic labels: for each image a PNG of class indices, of the same name below another folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.data.annotations import AnnotatedSet, frame_or_skip, nothing_annotated, turn_map, upright_notes
from vitdeploy.data.folder import Sample, scan
from vitdeploy.data.pixels import Skipped
from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.paths import is_dir
from vitdeploy.runtime.preprocess import Frame, decode

VOID = -1
# Pillow's modes of one number per pixel.
MODES = ("1", "L", "P", "I", "I;16", "I;16B")


@dataclass(frozen=True)
class MaskAnnotation:
    """The PNG of one image, which lies as `frame` says."""

    file: Path
    frame: Frame

    def content(self) -> bytes:
        """Bytes that differ where two annotations differ."""
        return self.file.read_bytes()

    def facts(self) -> bytes:
        return repr(self.frame).encode()

    def load(self, classes: int, ignore: int, reduce_labels: bool) -> npt.NDArray[np.int32]:
        """int32 [height, width] of classes, VOID where a pixel has the value `ignore`; with `reduce_labels` the value 0
        has no class either, and 1 is class 0.

        Raises:
            ImageError: the file cannot be read.
            DataError: it is no map of numbers, of another size than the image, or has numbers that are no class.
        """
        values = read_map(self.file, "a PNG of class indices", self.frame).astype(np.int32)
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
