"""What the heat maps of a model of key points mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vitdeploy.spec.tensors import TensorSpec

HEATMAPS = "heatmaps"
Decoding = Literal["dark", "argmax"]


@dataclass(frozen=True)
class KeypointSpec:
    """From "heatmaps" [points, height, width] to points.

    `decoding` "argmax": the largest value of a map; "dark": moved from there to the peak of the parabola through the
    logarithm of the map, which a Gaussian of `kernel` pixels smooths first (DARK, arXiv 1910.06278, equations 7 to 9).
    `threshold`: the score from which a point is shown. `skeleton`: the pairs of points that a line joins in drawings.
    """

    decoding: Decoding = "dark"
    kernel: int = 11
    threshold: float = 0.3
    skeleton: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        if self.kernel < 1 or self.kernel % 2 == 0:
            raise ValueError(f"kernel {self.kernel}: wanted an odd number of pixels")

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Of these outputs those that can be compared number by number: all."""
        return list(outputs)

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """How many points there are, which is what labels name; None if the outputs do not say."""
        size = next((tensor.shape[1] for tensor in outputs if tensor.name == HEATMAPS), None)
        return size if isinstance(size, int) else None
