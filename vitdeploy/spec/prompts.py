"""What the inputs and outputs of a model of promptable segmentation mean."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from vitdeploy.spec.tensors import TensorSpec

# Kinds of a prompt's slots, as the prompt encoder numbers them: a point outside of the object or inside, the corners of
# a box, and no point at all, for which the model has an embedding of its own.
OUTSIDE, INSIDE, TOP_LEFT, BOTTOM_RIGHT, NO_POINT = 0, 1, 2, 3, -1
# A slot that is not used: it is masked in every attention.
EMPTY = -10
MASKS, IOU_SCORES = "masks", "iou_scores"


@dataclass(frozen=True)
class PromptSpec:
    """From a prompt to tensors, and from the outputs to masks (SAM, arXiv 2304.02643).

    A prompt is `slots` points in pixels of the model's input, "points" [slots, 2], each of a kind, "labels" [slots].
    `closed_box`: after the corners of a box stands a slot that is no point (SAM 2); without a box there always is one.

    "masks" [4, height, width], logits, and the IoU that the model promises of each, "iou_scores" [4]. The first is for
    prompts that mean one thing, the others for those that may mean several, such as one point. A pixel is in a mask
    above `mask_threshold`. `stability`: (delta, least): where the first mask at +delta covers less than this share of
    what it covers at -delta, the best of the others takes its place (SAM 2); None of a model without this rule.
    """

    slots: int
    closed_box: bool = False
    mask_threshold: float = 0.0
    stability: tuple[float, float] | None = None

    def comparable(self, outputs: Iterable[str]) -> list[str]:
        """All outputs can be compared number by number."""
        return list(outputs)

    def number_of_classes(self, outputs: Iterable[TensorSpec]) -> int | None:
        """A mask is of whatever the prompt means: there are no classes."""
        return None
