"""What the outputs of an instance segmentation model mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vitdeploy.spec.tensors import TensorSpec, last_axis

ClassScores = Literal["softmax", "sigmoid"]
Candidates = Literal["pairs", "queries"]
Enlarging = Literal["nearest", "bilinear"]

# What is said where a graph or a module does not say it.
PAIRS_ASSUMED = (
    "instances are read as Mask2Former's are (postprocess: {candidates: queries, enlarge: bilinear} are EoMT's), and "
    "masks are not enlarged before they are cut at 0, as Mask2Former's are to 384x384 (postprocess: {mask_size: ...})"
)
# And where the same queries may be read in two ways.
QUERIES_ASSUMED = (
    "queries with masks are read as semantic segmentation; of a model that was trained for instances "
    "--task instance-segmentation (source.task in a recipe) reads objects"
)


@dataclass(frozen=True)
class InstanceSpec:
    """From "class_logits" [queries, classes] and "masks" [queries, height, width], logits, to instances.

    `class_scores` "softmax": "class_logits" have one more column, the last, for "no object", and the score of an
    instance is that of its class times the mean of the sigmoids inside its mask, as in the code of Mask2Former (arXiv
    2112.01527). "sigmoid": classes are independent, and the score is that of the class alone (RF-DETR).
    `candidates` "pairs": of all pairs of query and class the best, as many as there are queries; "queries": each query
    with its best class (EoMT).
    `mask_size`: (height, width) to which the masks are enlarged, bilinear, before they are cut at 0; None leaves them
    as they are. `enlarge`: how a mask then gets the size of the image: "nearest" after it was cut, "bilinear" before.
    `threshold`: the score from which an instance is shown.
    """

    class_scores: ClassScores = "softmax"
    candidates: Candidates = "pairs"
    mask_size: tuple[int, int] | None = None
    enlarge: Enlarging = "nearest"
    threshold: float = 0.5

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """All of these outputs: they can be compared number by number."""
        return list(outputs)

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """How many classes there are, without "no object"; None if the outputs do not say."""
        count = last_axis(outputs, "class_logits")
        return count - 1 if count is not None and self.class_scores == "softmax" else count
