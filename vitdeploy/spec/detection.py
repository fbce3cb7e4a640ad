"""What the outputs of a detector mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from vitdeploy.spec.coding import SPARSE
from vitdeploy.spec.tensors import TensorSpec, last_axis

Scores = Literal["softmax", "sigmoid", "given"]
Boxes = Literal["cxcywh", "xyxy"]


@dataclass(frozen=True)
class PostprocessSpec:
    """From the outputs of a detector to objects: what its tensors mean.

    `scores` "softmax": "logits" [queries, classes + 1], whose last column is "no object"; "sigmoid": "logits"
    [queries, classes], independent; "given": the graph itself gives "scores" and "labels" [queries].
    `boxes`: how "boxes" [queries, 4] is written, relative to the model's input: 0..1 in x and in y.
    `threshold`: the score from which an object is shown. `top_k`, of "sigmoid": how many pairs of query and class are
    candidates, the best ones; None for as many as there are queries. Panoptic: `things` are the classes with instances
    (all others are stuff), `mask_threshold` and `overlap` as in DETR's panoptic post-processing (arXiv 2005.12872,
    section 4.4).
    """

    scores: Scores = "softmax"
    boxes: Boxes = "cxcywh"
    threshold: float = 0.5
    things: tuple[int, ...] = ()
    mask_threshold: float = 0.5
    overlap: float = 0.8
    top_k: int | None = field(default=None, metadata=SPARSE)

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """Of these outputs those that can be compared number by number. Where the graph itself ranks what it finds, two
        objects of nearly equal scores may change places, with their labels and boxes: only the scores are."""
        return [name for name in outputs if self.scores != "given" or name == "scores"]

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """How many classes "logits" are of, without "no object"; None if the outputs do not say."""
        count = last_axis(outputs, "logits")
        return count - 1 if count is not None and self.scores == "softmax" else count
