"""What the outputs of a model of anomalies mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vitdeploy.spec.tensors import TensorSpec

DISTANCES, NEIGHBOURS = "distances", "neighbours"
# The names that anomalib gives its outputs.
ANOMALY_MAP, PREDICTED_SCORE = "anomaly_map", "pred_score"


@dataclass(frozen=True)
class AnomalySpec:
    """From a model's outputs to the anomaly score of an image and of every pixel.

    Of a memory bank: "distances" [height, width] of the patches to normal ones, and "neighbours" [b], the distances of
    the patch with the largest one to the entry nearest to it (first) and to those around that entry (PatchCore, arXiv
    2106.08265, equation 7). Of other models: "anomaly_map" [1, height, width] and "pred_score" [], map and score.

    `threshold`: an image whose score is above it is anomalous; `pixel_threshold`: the same of a pixel. `sigma`: of the
    Gaussian that smooths the map, in pixels of the model's input (section 4.2 of the paper); 0 smooths nothing.
    """

    threshold: float
    pixel_threshold: float
    sigma: float = 4.0

    def __post_init__(self) -> None:
        if self.sigma < 0:
            raise ValueError(f"sigma {self.sigma:g}: wanted 0 or more pixels")

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Of these outputs those that can be compared number by number: all but the neighbours, which are those of one
        patch, and another patch's where two are about as far."""
        return [name for name in outputs if name != NEIGHBOURS]

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """None: there are no classes."""
        return None


# What anomalib's exported graphs mean: their scores are scaled so that its own threshold is at 0.5.
GIVEN = AnomalySpec(threshold=0.5, pixel_threshold=0.5, sigma=0.0)
