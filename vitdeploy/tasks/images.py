"""Images of a folder for one purpose, each read once before any work: a broken file is found now, not in an hour.

What was read to evaluate on is kept: the original and every engine see these pixels, and no file is decoded again.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitdeploy.data.containers.find import WANTED, find_containers
from vitdeploy.data.decoding import DecodedSet, Skipped, decode_images
from vitdeploy.data.folder import (
    DataSplit,
    Labels,
    Sample,
    enough,
    has_container_labels,
    has_own_split,
    list_images,
)
from vitdeploy.errors import MissingFileError
from vitdeploy.progress import Counter, Progress
from vitdeploy.runtime.preprocess import SUFFIXES
from vitdeploy.spec import PreprocessSpec
from vitdeploy.store.places import store_folder


def check_images(
    images: DataSplit, preprocess: PreprocessSpec, *, skip_bad: bool, progress: Progress
) -> tuple[DataSplit, DecodedSet, tuple[str, ...]]:
    """The readable images of both parts, the pixels of those to evaluate on, and the paths of the others.

    Raises:
        ImageError: a file cannot be read, and `skip_bad` is False.
        DataError: not one image of a part can be read.
        StorageError: no room for the pixels.
    """
    skipped = Skipped([])
    bad = skipped if skip_bad else None
    count = Counter(progress, "check the images", len(images.calibration) + len(images.evaluation))
    calibration: list[Sample] = []
    if images.calibration:
        for sample, _, _ in decode_images(images.calibration, preprocess, bad):
            calibration.append(sample)
            count(1)
    decoded = DecodedSet(images.evaluation, scratch_folder())
    evaluation = decoded.check(preprocess, bad, count) if images.evaluation else ()
    return replace(images, calibration=tuple(calibration), evaluation=evaluation), decoded, tuple(skipped.paths)


def scratch_folder() -> Path:
    """The folder for large temporary files: next to the store's artifacts, or the system's own."""
    folder = store_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.gettempdir())


def labels_in(folder: Path) -> Labels:
    """ "folders" where the folder (or its own evaluation part) has class folders, or its images labels that they
    brought along (`containers`), else "none".

    Raises:
        MissingFileError: no such folder. DataError, MissingPackageError: as `list_images`.
    """
    root = folder / "evaluation" if has_own_split(folder) else folder
    brought = has_container_labels(root)
    if brought is not None:
        return "folders" if brought else "none"
    if not folder.is_dir():
        raise MissingFileError(f"no image folder at {folder}", wanted=WANTED, fix="check the path of the images")
    return "folders" if any(entry.is_dir() and not entry.name.startswith(".") for entry in root.iterdir()) else "none"


def calibration_images(
    folder: Path, count: int | None, seed: int, preprocess: PreprocessSpec, *, skip_bad: bool, progress: Progress
) -> tuple[tuple[Sample, ...], tuple[str, ...]]:
    """`count` images of `folder` (None: all) in seeded order, of its own calibration part where it brings a split; and
    the paths of those that cannot be read.

    Raises:
        MissingFileError, DataError, ImageError: no folder, too few images, an unreadable one.
    """
    root = folder / "calibration" if has_own_split(folder) else folder
    # Ranges know no classes, and the labels of a container may be unknown.
    labels: Labels = labels_in(folder) if find_containers(root, SUFFIXES) is None else "none"
    samples, classes = list_images(root, labels)
    if count is not None:
        enough(root, len(samples), count, "calibration")
    order = np.random.RandomState(seed).permutation(len(samples))
    chosen = DataSplit(tuple(samples[i] for i in order[:count]), (), classes.names)
    checked, _, skipped = check_images(chosen, preprocess, skip_bad=skip_bad, progress=progress)
    return checked.calibration, skipped
