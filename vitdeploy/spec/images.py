"""What the picture that a model gives means."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

RECONSTRUCTION = "reconstruction"


@dataclass(frozen=True)
class ImageSpec:
    """From "reconstruction" [channels, height, width] to a picture of 8 bits: the value that is black, and the one that
    is white; what is beyond them is clipped."""

    black: float = 0.0
    white: float = 1.0

    def __post_init__(self) -> None:
        if not self.black < self.white:
            raise ValueError(f"black {self.black} and white {self.white}: wanted white above black")

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Of these outputs those that can be compared number by number: all."""
        return list(outputs)

    def number_of_classes(self, outputs: object) -> None:
        """There are no classes."""
