"""Depth labels: for each image a .npy of floats or a PNG of 16 bits, of the same name below another folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vitdeploy.data.annotations import AnnotatedSet, upright_notes
from vitdeploy.data.folder import Sample
from vitdeploy.data.masks import fit_map, read_map, with_maps
from vitdeploy.data.pixels import Skipped
from vitdeploy.errors import DataError, ImageError
from vitdeploy.runtime.preprocess import Frame
from vitdeploy.zip_members import DAMAGED

# In the labels' folder: {"scale": metres a unit of the PNGs}, such as 0.001, or 1 / 256 of KITTI's.
UNITS_FILE = "depth.json"
SUFFIXES = (".npy", ".png")


@dataclass(frozen=True)
class DepthAnnotation:
    """The depth of one image, which lies as `frame` says. `scale`: metres a unit of a PNG, None if nobody says it."""

    file: Path
    frame: Frame
    scale: float | None

    def content(self) -> bytes:
        """Bytes that differ where two annotations differ."""
        return repr(self.scale).encode() + self.file.read_bytes()

    def facts(self) -> bytes:
        return repr((self.frame, self.scale)).encode()

    def load(self, metres: bool) -> npt.NDArray[np.float32]:
        """float32 [height, width] of depth, not a number where it is unknown: 0, less, or not finite. In metres, or,
        where `metres` is not asked for, in any unit.

        Raises:
            ImageError: the file cannot be read.
            DataError: it is no map of numbers, of another size than the image; or a PNG of unknown unit.
        """
        if self.file.suffix == ".npy":
            values = fit_map(self.file, _numbers(self.file), self.frame)
        else:
            values = read_map(self.file, "a PNG of 16 bits", self.frame).astype(np.float32)
            if metres and self.scale is None:
                raise DataError(
                    f"{self.file} does not say its unit",
                    found=f"a PNG without {UNITS_FILE} in {self.file.parent}",
                    wanted="metres, for a model of metric depth",
                    fix=f'write {{"scale": METRES A UNIT}} into {UNITS_FILE} in the folder of labels, such as 0.001',
                )
            values = values * np.float32(self.scale or 1.0)
        return np.where(np.isfinite(values) & (values > 0), values, np.float32(np.nan)).astype(np.float32)


DepthSet = AnnotatedSet[DepthAnnotation]


def read_depth(images: Path, labels: Path, skipped: Skipped | None = None) -> DepthSet:
    """The images below `images` with a file of the same relative name below `labels`; files are read by `load`.

    Errors as `masks.read_masks`; DataError: UNITS_FILE has no scale above 0.
    """
    samples, missing = with_maps(images, labels, SUFFIXES, skipped)
    scale = _scale(labels / UNITS_FILE)
    found = {path: DepthAnnotation(file, frame, scale) for path, (file, frame) in samples.items()}
    notes = upright_notes((each.frame for each in found.values()), "map")
    return AnnotatedSet(images, tuple(Sample(path, None) for path in found), found, (), missing, notes)


def _scale(path: Path) -> float | None:
    if not path.is_file():
        return None
    try:
        scale = json.loads(path.read_bytes())["scale"]
    except (ValueError, KeyError, TypeError, RecursionError):
        scale = None
    if isinstance(scale, bool) or not isinstance(scale, int | float) or not 0 < scale < 1e9:
        raise DataError(
            f"{path} says no scale", found=path.read_text("utf-8", "replace")[:80], wanted='{"scale": metres a unit}'
        )
    return float(scale)


def _numbers(path: Path) -> npt.NDArray[np.float32]:
    try:
        # Mapped: a header that promises more than the file has is found before memory is taken for it.
        values = np.load(path, mmap_mode="r", allow_pickle=False)
    except DAMAGED as error:
        raise ImageError(f"{path} cannot be read", found=str(error)[:200], wanted="a .npy of floats") from None
    if not isinstance(values, np.ndarray):
        raise ImageError(f"{path} cannot be read", found="an .npz archive", wanted="a .npy of floats")
    if values.dtype.kind not in "fiu":
        raise DataError(f"{path} is no map of numbers", found=str(values.dtype), wanted="a .npy of floats")
    return np.array(
        values.reshape(values.shape[:2]) if values.ndim == 3 and values.shape[2] == 1 else values, np.float32
    )
