"""From the outputs of one image to the answer of its task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.detection import Detections, detect
from vitdeploy.runtime.panoptic import Panoptic, segment
from vitdeploy.runtime.postprocess import Classification, classify
from vitdeploy.runtime.runner import Array
from vitdeploy.spec import PostprocessSpec, PreprocessSpec, Task


@dataclass(frozen=True, eq=False, repr=False)
class Features:
    """float32 [width] of the whole image, and [n, width] of its patches where the model gives them."""

    vector: npt.NDArray[np.float32]
    patches: npt.NDArray[np.float32] | None = None

    def to_dict(self) -> dict[str, Any]:
        patches = None if self.patches is None else self.patches.tolist()
        return {"vector": self.vector.tolist(), "patches": patches}

    def __str__(self) -> str:
        patches = "" if self.patches is None else f", {len(self.patches)} patch vectors"
        return f"{len(self.vector)} features: {' '.join(f'{value:.4f}' for value in self.vector[:4])} ...{patches}"

    def __repr__(self) -> str:
        return f"<Features: {self}>"


Result = Classification | Features | Detections | Panoptic


def to_result(
    task: Task,
    outputs: Mapping[str, Array],
    size: tuple[int, int],
    preprocess: PreprocessSpec,
    postprocess: PostprocessSpec | None,
    labels: Sequence[str] | None,
    top: int,
) -> Result:
    """The answer for one image. outputs: by name, without the batch axis; size: (width, height) of the original."""
    if task == "features":
        return Features(outputs["features"], outputs.get("patch_features"))
    if task == "detection" and postprocess is not None:
        return detect(outputs, size, preprocess, postprocess, labels)
    if task == "panoptic" and postprocess is not None:
        return segment(outputs, size, preprocess, postprocess, labels)
    return classify(outputs["logits"], labels, top)
