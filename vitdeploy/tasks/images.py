"""Calibration and evaluation images, each read once before any work, so that broken files are found early.

Evaluation pixels are kept: the original and all engines see the same pixels, and no file is decoded again.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from vitdeploy.data.annotations import AnnotatedSet
from vitdeploy.data.classes import ClassMap
from vitdeploy.data.containers.find import EXPECTED, find_containers
from vitdeploy.data.decoding import DecodedSet, Skipped, decode_images
from vitdeploy.data.folder import (
    DataSplit,
    Ints,
    Labels,
    Sample,
    contents,
    enough,
    first_of_copies,
    has_container_labels,
    has_own_split,
    list_images,
)
from vitdeploy.errors import MissingFileError
from vitdeploy.paths import shown_name
from vitdeploy.progress import Counter, Progress
from vitdeploy.runtime.preprocess import SUFFIXES
from vitdeploy.spec import PreprocessSpec
from vitdeploy.store.store import store_folder
from vitdeploy.tasks.answers import Copies


def check_images(
    images: DataSplit, preprocess: PreprocessSpec, *, skip_bad: bool, progress: Progress
) -> tuple[DataSplit, DecodedSet, tuple[str, ...]]:
    """Return the readable images of both parts, the pixels of the evaluation images, and the paths of unreadable
    images.

    Raises:
        ImageError: a file cannot be read, and `skip_bad` is False.
        DataError: no image of a part can be read. StorageError: no space for the pixels.
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
    """Return the folder for large temporary files: next to the store's artifacts, or the system's."""
    folder = store_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.gettempdir())


def labels_in(folder: Path) -> Labels:
    """Return "folders" if the folder (or its own evaluation part) has class folders, or if its images have labels of
    their own (`containers`), else "none".

    Raises:
        MissingFileError: no such folder. DataError, MissingPackageError: as `list_images`.
    """
    root = folder / "evaluation" if has_own_split(folder) else folder
    brought = has_container_labels(root)
    if brought is not None:
        return "folders" if brought else "none"
    if not folder.is_dir():
        raise MissingFileError(f"no image folder at {folder}", expected=EXPECTED, fix="check the path of the images")
    return "folders" if any(entry.is_dir() and not entry.name.startswith(".") for entry in root.iterdir()) else "none"


def calibration_images(
    folder: Path, count: int | None, seed: int, preprocess: PreprocessSpec, *, skip_bad: bool, progress: Progress
) -> tuple[tuple[Sample, ...], tuple[str, ...]]:
    """Return `count` images of `folder` (None: all) in seeded order, from its own calibration part if it has one; and
    the paths of unreadable images.

    Raises:
        MissingFileError, DataError, ImageError: no folder, too few images, an unreadable one.
    """
    root = folder / "calibration" if has_own_split(folder) else folder
    # Calibration needs no classes, and the labels of a container may be unknown.
    labels: Labels = labels_in(folder) if find_containers(root, SUFFIXES) is None else "none"
    samples, classes = list_images(root, labels)
    if count is not None:
        enough(root, len(samples), count, "calibration")
    order = np.random.RandomState(seed).permutation(len(samples))
    chosen = DataSplit(tuple(samples[i] for i in order[:count]), (), classes.names)
    checked, _, skipped = check_images(chosen, preprocess, skip_bad=skip_bad, progress=progress)
    return tuple(checked.calibration), skipped


# --- What a task finds for a choice of data, with each content once ---------------------------------------------------


@dataclass(frozen=True)
class FoundData:
    """The data of a choice: the split, the annotated set if any, `Data.truth` and `Data.mapping`."""

    parts: DataSplit
    annotated: AnnotatedSet[OfTask] | None = None
    truth: Mapping[Path, OfTask] | None = None
    mapping: ClassMap | None = None


# An object of a class of the task, such as the label of a sample.
OfTask: TypeAlias = Any
# Notes and warnings.
Told: TypeAlias = tuple[tuple[str, ...], tuple[str, ...]]


def without_copies(
    data: FoundData, more: Callable[[Sample], str] | None = None
) -> tuple[DataSplit, dict[int, str], Copies | None, Told]:
    """Return the split with one evaluation image per content, the first by path; the `contents` of all its samples, by
    their ids; and the results of `copies_among`. `more`: returns what a sample has besides its image."""
    parts, known = data.parts, None if data.annotated is None else data.annotated.annotations
    calibration, evaluation = contents(parts.calibration), contents(parts.evaluation)
    if more is not None:
        calibration, evaluation = (
            [f"{content}\t{more(sample)}" for content, sample in zip(notes, part, strict=True)]
            for notes, part in ((calibration, parts.calibration), (evaluation, parts.evaluation))
        )
    order = np.array(sorted(range(len(evaluation)), key=lambda i: parts.evaluation[i].path.parts), np.int64)
    first = first_of_copies(parts.evaluation, order, (evaluation[i] for i in order))
    kept, copies, notes = copies_among(parts.evaluation, first, known, calibration, evaluation)
    of_samples = zip(map(id, (*parts.calibration, *parts.evaluation)), (*calibration, *evaluation), strict=True)
    chosen = replace(parts, evaluation=tuple(parts.evaluation[i] for i in kept))
    return chosen, dict(of_samples), copies, notes


def copies_among(
    samples: Sequence[Sample],
    first: Ints,
    known: Mapping[Path, OfTask] | None,
    calibration: Sequence[str] = (),
    evaluation: Sequence[str] = (),
) -> tuple[Ints, Copies | None, Told]:
    """Return the evaluation images that count, int64; the copies, or None; notes on them, and warnings.

    Args:
        first: from `first_of_copies`. known: annotations of the images by path, if not class labels.
        calibration, evaluation: the contents of both parts; () without calibration images.
    """
    same = first == np.arange(len(first))
    kept = np.flatnonzero(same)

    def label(index: int) -> object:
        return samples[index].label if known is None else known[samples[index].path].content()

    pairs = [(i, int(first[i])) for i in np.flatnonzero(~same).tolist()]
    relabelled = [(i, j) for i, j in pairs if label(i) != label(j)]
    seen = set(calibration)
    copies = Copies(
        evaluation=len(pairs),
        calibration=len(calibration) - len(seen),
        shared=sum(evaluation[i] in seen for i in kept.tolist()) if seen else 0,
        relabelled=len(relabelled),
    )
    notes, doubts, different = list[str](), list[str](), len(kept)
    if pairs:
        copy, original = (shown_name(samples[i].shown) for i in pairs[0])
        notes.append(
            f"{len(pairs)} of {len(samples)} evaluation images are copies; each image counts once: {different} are "
            f"distinct ({copy} equals {original})"
        )
    if relabelled:
        copy, original = (shown_name(samples[i].shown) for i in relabelled[0])
        doubts.append(
            f"{len(relabelled)} copies among the evaluation images have a different label than the image that counts "
            f"({copy}, {original}): one of the labels is wrong"
        )
    if copies.calibration:
        notes.append(f"{copies.calibration} of {len(calibration)} calibration images are copies")
    if copies.shared:
        doubts.append(
            f"{copies.shared} of {different} evaluation images are also calibration images, which influence the "
            "engines: agreement and accuracy may be overestimated"
        )
    return kept, copies if copies != Copies() else None, (tuple(notes), tuple(doubts))


# --- A few pixels or numbers of large outputs: of a thousand images all of them would not fit into memory -------------


def nearest_pixels(array: np.ndarray, shape: Sequence[int]) -> np.ndarray:
    """Return a map [height, width] at another size, by nearest pixels."""
    rows, columns = (np.arange(size) * old // size for size, old in zip(shape, array.shape, strict=True))
    return array if array.shape == tuple(shape) else array[rows][:, columns]


# Seed for the choice of numbers kept from large outputs.
SEED = 0


def drawn(output: np.ndarray, count: int) -> np.ndarray:
    """Return `count` elements in a seeded choice that depends only on the size, so that it is the same for every image
    and artifact; a smaller output unchanged."""
    if output.size <= count:
        return output
    chosen = np.random.RandomState(SEED).choice(output.size, count, replace=False)
    return np.asarray(output.reshape(-1)[np.sort(chosen)])
