"""Masks as COCO run lengths, and pictures as PNG."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL import Image


# --- Masks as COCO run lengths: compact, and readable by every COCO tool ----------------------------------------------


@dataclass(frozen=True, eq=False, repr=False)
class RunLengths:
    """A mask of `size` (width, height). counts: int32, alternating lengths of runs of 0 and 1, starting with 0, column
    by column from the left."""

    size: tuple[int, int]
    counts: npt.NDArray[np.int32]

    @classmethod
    def of(cls, mask: npt.NDArray[np.bool_]) -> RunLengths:
        """Return the run lengths of a mask, bool [height, width]."""
        flat = mask.ravel(order="F")
        ends = np.flatnonzero(flat[1:] != flat[:-1]) + 1
        first = [0, 0] if flat.size and flat[0] else [0]
        counts = np.diff(np.concatenate([first, ends, [flat.size]])).astype(np.int32)
        return cls((mask.shape[1], mask.shape[0]), counts)

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """The mask, bool [height, width]."""
        values = np.arange(len(self.counts)) % 2 == 1
        return np.asarray(np.repeat(values, self.counts).reshape(self.size).T)

    def resized(self, size: tuple[int, int]) -> RunLengths:
        """Return the mask at another size, (width, height), by nearest-neighbour sampling."""
        if size == self.size:
            return self
        columns, rows = (np.arange(new) * old // new for new, old in zip(size, self.size, strict=True))
        return RunLengths.of(self.mask[rows][:, columns])

    @property
    def area(self) -> int:
        """The area in pixels."""
        return int(self.counts[1::2].sum())

    def to_dict(self) -> dict[str, Any]:
        """Return the mask as `segmentation` in COCO annotations: {"size": [height, width], "counts": [...]}."""
        width, height = self.size
        return {"size": [height, width], "counts": self.counts.tolist()}

    def __repr__(self) -> str:
        return f"<RunLengths: {self.area} pixels of {self.size[0]}x{self.size[1]}>"


# --- Pictures as PNG files --------------------------------------------------------------------------------------------


def png_bytes(image: Image.Image) -> bytes:
    """Return the image as the bytes of a PNG file; any mode that PNG supports."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
