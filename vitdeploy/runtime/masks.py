"""Masks as run lengths and as PNG."""

from __future__ import annotations

import io
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from PIL import Image


# --- Masks as COCO's run lengths: small where they are kept, and what every tool of COCO reads ------------------------


@dataclass(frozen=True, eq=False, repr=False)
class RunLengths:
    """A mask of `size` (width, height). counts: int32, the lengths of runs of 0 and of 1 in turn, the first of 0,
    through the columns from left to right."""

    size: tuple[int, int]
    counts: npt.NDArray[np.int32]

    @classmethod
    def of(cls, mask: npt.NDArray[np.bool_]) -> RunLengths:
        """Of a mask, bool [height, width]."""
        flat = mask.ravel(order="F")
        ends = np.flatnonzero(flat[1:] != flat[:-1]) + 1
        first = [0, 0] if flat.size and flat[0] else [0]
        counts = np.diff(np.concatenate([first, ends, [flat.size]])).astype(np.int32)
        return cls((mask.shape[1], mask.shape[0]), counts)

    @property
    def mask(self) -> npt.NDArray[np.bool_]:
        """bool [height, width]."""
        values = np.arange(len(self.counts)) % 2 == 1
        return np.asarray(np.repeat(values, self.counts).reshape(self.size).T)

    def resized(self, size: tuple[int, int]) -> RunLengths:
        """At another size, (width, height), by its nearest pixels."""
        if size == self.size:
            return self
        columns, rows = (np.arange(new) * old // new for new, old in zip(size, self.size, strict=True))
        return RunLengths.of(self.mask[rows][:, columns])

    @property
    def area(self) -> int:
        """In pixels."""
        return int(self.counts[1::2].sum())

    def to_dict(self) -> dict[str, Any]:
        """As `segmentation` of COCO's annotations: {"size": [height, width], "counts": [...]}."""
        width, height = self.size
        return {"size": [height, width], "counts": self.counts.tolist()}

    def __repr__(self) -> str:
        return f"<RunLengths: {self.area} pixels of {self.size[0]}x{self.size[1]}>"


# --- A picture as the bytes of a PNG file -----------------------------------------------------------------------------


def png_bytes(image: Image.Image) -> bytes:
    """The file, without loss; of any mode that PNG has."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()
