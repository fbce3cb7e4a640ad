"""A folder of images as a list of samples, and its split into calibration and evaluation images.

images/<class>/x.jpg            labels: folders; the sorted folder names are the classes of the data
images/x.jpg                    labels: none
images/calibration/<class>/...  a folder that holds `calibration` and `evaluation` brings its own split
images/evaluation/<class>/...

`data.classes` maps them to a model's classes. Hidden files and folders (.ipynb_checkpoints, ._x.jpg) are ignored.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np

from vitdeploy.errors import DataError, MissingFileError
from vitdeploy.paths import is_dir
from vitdeploy.runtime.topdown import Box

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif"}
OWN_SPLIT = ("calibration", "evaluation")
# Usual names for the parts of a data set. As classes they would give meaningless numbers.
PARTS = {"train", "training", "val", "valid", "validation", "test", "testing", "eval", *OWN_SPLIT}

Labels = Literal["folders", "none"]


@dataclass(frozen=True)
class Sample:
    """One image file with the index of its class (None without labels). `box`: the part of it that is meant, (left,
    top, right, bottom) in pixels, for models that see one object; None for all of it."""

    path: Path
    label: int | None
    box: Box | None = None


@dataclass(frozen=True)
class DataSplit:
    """Images to make choices on, images to judge them on (none is both), and the class names.

    `empty` are the classes without an image in the folder.
    """

    calibration: tuple[Sample, ...]
    evaluation: tuple[Sample, ...]
    classes: tuple[str, ...] = field(default=())
    empty: frozenset[str] = field(default=frozenset())


def scan(folder: Path, labels: Labels) -> tuple[list[Sample], tuple[str, ...]]:
    """All images below `folder`, sorted by class and file name, with the class names.

    Raises:
        MissingFileError: no such folder.
        DataError: no image in it, or no class folders if labels come from them: none at all, or the parts of a data
            set.
    """
    if not is_dir(folder):
        raise MissingFileError(f"no image folder at {folder}", fix="check the path of the images")
    classes = _class_folders(folder) if labels == "folders" else ()
    if labels == "folders" and not classes:
        raise DataError(
            f"{folder} has no class folders",
            found=f"{len(_images(folder))} images directly in it",
            wanted="one sub-folder a class",
            fix="sort the images into class folders, or set data.labels to none",
        )
    if labels == "folders":
        _check_parts(folder, classes)
        samples = [Sample(path, i) for i, name in enumerate(classes) for path in _images(folder / name)]
    else:
        samples = [Sample(path, None) for path in _images(folder)]
    if not samples:
        raise DataError(
            f"{folder} holds no images",
            found=other_files(folder) or "no file",
            wanted=f"files ending in {', '.join(sorted(SUFFIXES))}",
            fix="check the folder, or convert its files",
        )
    return samples, classes


def other_files(folder: Path, known: Set[str] = frozenset()) -> str:
    """The files in a folder without a `known` suffix, counted by suffix: "12 .heic, 1 .txt"; "" for none."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.name.startswith("."))
    counts = Counter(path.suffix.lower() or path.name for path in files if path.suffix.lower() not in known)
    return ", ".join(f"{count} {suffix}" for suffix, count in counts.most_common(5))


def _class_folders(folder: Path) -> tuple[str, ...]:
    """Sorted names of the sub-folders, without hidden ones such as .ipynb_checkpoints."""
    return tuple(sorted(e.name for e in folder.iterdir() if e.is_dir() and not e.name.startswith(".")))


def _check_parts(folder: Path, classes: tuple[str, ...]) -> None:
    """Raise DataError if the folders are the parts of a data set, each with class folders inside."""
    if all(name.lower() in PARTS and _class_folders(folder / name) for name in classes):
        part = next((name for name in classes if name.lower().startswith(("val", "eval", "test"))), classes[0])
        raise DataError(
            f"the folders in {folder} are parts of a data set, not classes",
            found=", ".join(classes),
            wanted="one sub-folder a class, or `calibration` and `evaluation` with the class folders inside",
            fix=f"give one of them: {folder / part}",
        )


def _images(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.suffix.lower() in SUFFIXES
        and path.is_file()
        and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


def split(folder: Path, labels: Labels, *, calibration: int, evaluation: int | Literal["all"], seed: int) -> DataSplit:
    """Choose calibration and evaluation images.

    Files in sorted order are permuted by `numpy.random.RandomState(seed)`, whose stream is frozen for all versions of
    numpy (NEP 19; that of `default_rng` is not); the first `calibration` of them calibrate, the next `evaluation` (or
    all others) evaluate. A folder with its own split is sampled within each part, and has the classes of both.

    Raises:
        MissingFileError, DataError: as `scan`; fewer images than asked for.
    """
    generator = np.random.RandomState(seed)
    if all((folder / part).is_dir() for part in OWN_SPLIT):
        scanned = [scan(folder / part, labels) for part in OWN_SPLIT]
        classes = tuple(sorted({name for _, names in scanned for name in names}))
        first, second = (_renumbered(samples, names, classes) for samples, names in scanned)
        enough(folder, len(first), calibration, "calibration")
        chosen = [first[i] for i in generator.permutation(len(first))[:calibration]]
        rest = [second[i] for i in generator.permutation(len(second))]
    else:
        samples, classes = scan(folder, labels)
        first, second = samples, []
        enough(folder, len(samples) - 1, calibration, "calibration (and at least one more to evaluate)")
        shuffled = [samples[i] for i in generator.permutation(len(samples))]
        chosen, rest = shuffled[:calibration], shuffled[calibration:]
    if evaluation != "all":
        enough(folder, len(rest), evaluation, "evaluation")
        rest = rest[:evaluation]
    seen = {sample.label for sample in (*first, *second)}
    empty = frozenset(name for index, name in enumerate(classes) if index not in seen)
    return DataSplit(tuple(chosen), tuple(rest), classes, empty)


def _renumbered(samples: list[Sample], names: tuple[str, ...], classes: tuple[str, ...]) -> list[Sample]:
    """Samples whose labels index `names`, renumbered to index `classes`."""
    places = {name: index for index, name in enumerate(classes)}
    return [s if s.label is None else Sample(s.path, places[names[s.label]]) for s in samples]


def enough(folder: Path, found: int, wanted: int, what: str) -> None:
    """Raise DataError if `found` images are fewer than `wanted`."""
    if found < wanted:
        raise DataError(
            f"{folder} has too few images for {what}",
            found=f"{max(found, 0)} images",
            wanted=f"{wanted} images",
            fix="add images, or ask for fewer (--num-samples, data.calibration.images, data.evaluation.images)",
        )


def digest(samples: Sequence[Sample], root: Path) -> str:
    """SHA-256 over the relative paths, labels and bytes of the images, in order."""
    total = hashlib.sha256()
    for sample in samples:
        content = hashlib.sha256(sample.path.read_bytes()).hexdigest()
        part = "" if sample.box is None else f"\t{sample.box}"
        total.update(f"{sample.path.relative_to(root).as_posix()}\t{sample.label}\t{content}{part}\n".encode())
    return total.hexdigest()
