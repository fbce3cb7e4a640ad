"""Images of a folder for one purpose, each read once before any work: a broken file is found now, not in an hour."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from vitdeploy.data.folder import OWN_SPLIT, DataSplit, Labels, Sample, enough, scan
from vitdeploy.data.pixels import Skipped, readable
from vitdeploy.errors import MissingFileError
from vitdeploy.pipeline.progress import Counter, Progress
from vitdeploy.spec import PreprocessSpec


def check_images(
    images: DataSplit, preprocess: PreprocessSpec, *, skip_bad: bool, progress: Progress
) -> tuple[DataSplit, tuple[str, ...]]:
    """The readable images of both parts, and the paths of the others.

    Raises:
        ImageError: a file cannot be read, and `skip_bad` is False.
        DataError: not one image of a part can be read.
    """
    skipped = Skipped([])
    count = Counter(progress, "check the images", len(images.calibration) + len(images.evaluation))
    calibration, evaluation = (
        _readable(part, preprocess, skipped if skip_bad else None, count) if part else ()
        for part in (images.calibration, images.evaluation)
    )
    return replace(images, calibration=calibration, evaluation=evaluation), tuple(skipped.paths)


def _readable(
    samples: Sequence[Sample], preprocess: PreprocessSpec, skipped: Skipped | None, count: Counter
) -> tuple[Sample, ...]:
    good = []
    for sample, _ in readable(samples, preprocess, skipped):
        good.append(sample)
        count(1)
    return tuple(good)


def labels_in(folder: Path) -> Labels:
    """ "folders" where the folder (or its own evaluation part) has class folders, else "none".

    Raises:
        MissingFileError: no such folder.
    """
    if not folder.is_dir():
        raise MissingFileError(f"no image folder at {folder}", fix="check the path of the images")
    root = folder / "evaluation" if _has_split(folder) else folder
    return "folders" if any(entry.is_dir() and not entry.name.startswith(".") for entry in root.iterdir()) else "none"


def calibration_images(
    folder: Path, count: int | None, seed: int, preprocess: PreprocessSpec, *, skip_bad: bool, progress: Progress
) -> tuple[tuple[Sample, ...], tuple[str, ...]]:
    """`count` images of `folder` (None: all) in seeded order, of its own calibration part where it brings a split; and
    the paths of those that cannot be read.

    Raises:
        MissingFileError, DataError, ImageError: no folder, too few images, an unreadable one.
    """
    labels = labels_in(folder)
    root = folder / "calibration" if _has_split(folder) else folder
    samples, classes = scan(root, labels)
    if count is not None:
        enough(root, len(samples), count, "calibration")
    order = np.random.RandomState(seed).permutation(len(samples))
    chosen = DataSplit(tuple(samples[i] for i in order[:count]), (), classes)
    checked, skipped = check_images(chosen, preprocess, skip_bad=skip_bad, progress=progress)
    return checked.calibration, skipped


def _has_split(folder: Path) -> bool:
    return all((folder / name).is_dir() for name in OWN_SPLIT)
