"""The images of one verb: a folder, its labels where it has class folders, and a seeded choice of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from vitdeploy.data.folder import OWN_SPLIT, DataSplit, Labels, Sample, enough, scan
from vitdeploy.errors import MissingFileError
from vitdeploy.pipeline.job import check_images
from vitdeploy.pipeline.stages import Progress
from vitdeploy.spec import PreprocessSpec


@dataclass(frozen=True)
class Chosen:
    """Readable images, their class names (empty without labels), and the files that were skipped."""

    samples: tuple[Sample, ...]
    classes: tuple[str, ...]
    skipped: tuple[str, ...]


def sample_images(
    folder: Path,
    part: Literal["calibration", "evaluation"],
    count: int | None,
    seed: int,
    preprocess: PreprocessSpec,
    *,
    skip_bad: bool,
    progress: Progress,
) -> Chosen:
    """`count` images of `folder` (None: all) in seeded order; of its own `part` where the folder brings a split.

    Raises:
        MissingFileError, DataError, ImageError: no folder, too few images, an unreadable one.
    """
    if not folder.is_dir():
        raise MissingFileError(f"no image folder at {folder}", fix="check --data")
    root = folder / part if all((folder / name).is_dir() for name in OWN_SPLIT) else folder
    labels: Labels = "folders" if any(entry.is_dir() for entry in root.iterdir()) else "none"
    samples, classes = scan(root, labels)
    if count is not None:
        enough(root, len(samples), count, part)
    order = np.random.RandomState(seed).permutation(len(samples))
    chosen = tuple(samples[i] for i in order[:count])
    checked, skipped = check_images(DataSplit(chosen, (), classes), preprocess, skip_bad=skip_bad, progress=progress)
    return Chosen(checked.calibration, classes, skipped)
