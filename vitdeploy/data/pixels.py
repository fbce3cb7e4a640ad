"""Preprocessed images in batches, one batch at a time in memory; unreadable ones are refused or counted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vitdeploy.data.containers.reading import load_held
from vitdeploy.data.folder import Sample
from vitdeploy.errors import DataError, ImageError
from vitdeploy.runtime.preprocess import Pixels
from vitdeploy.spec import PreprocessSpec


@dataclass
class Skipped:
    """The unreadable files that a run skips."""

    paths: list[str]


def skippable(error: ImageError) -> ImageError:
    """The error of an unreadable image of a data folder, which all commands that read one can skip."""
    error.fix = "; ".join(filter(None, (error.fix, "--skip-bad goes on without such files and counts them")))
    return error


def readable(
    samples: Sequence[Sample], spec: PreprocessSpec, skipped: Skipped | None
) -> Iterator[tuple[Sample, Pixels]]:
    """Each sample with its pixels, uint8 [height, width, channels].

    With `skipped` given, unreadable images are noted there and left out; without, they are an error.

    Raises:
        ImageError: an unreadable image and `skipped` is None.
        DataError: not one image could be read.
    """
    count = 0
    for sample in samples:
        try:
            pixels, _ = load_held(sample.path, sample.held, spec, sample.box, sample.shown)
        except ImageError as error:
            if skipped is None:
                raise skippable(error) from None
            skipped.paths.append(sample.shown)
            continue
        count += 1
        yield sample, pixels
    if not count:
        raise DataError("not one image could be read", found=f"{len(samples)} unreadable files")


def batches(
    samples: Sequence[Sample], spec: PreprocessSpec, size: int, skipped: Skipped | None = None
) -> Iterator[npt.NDArray[np.uint8]]:
    """uint8 [n, height, width, channels] with n = `size`, fewer in the last; errors as `readable`."""
    held: list[Pixels] = []
    for _, pixels in readable(samples, spec, skipped):
        held.append(pixels)
        if len(held) == size:
            yield np.stack(held)
            held = []
    if held:
        yield np.stack(held)
