"""Feature extraction: vectors of an image and of its patches."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vitdeploy.runtime.postprocess import cosine
from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.task import COSINE, DeviceTask, OutputReading, Outputs


@dataclass(frozen=True, eq=False, repr=False)
class Features:
    """The answer for one image: `vector`, float32 [width], of the whole image, and [n, width] of its `patches` if the
    model has them."""

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


def _answer(outputs: Outputs, reading: OutputReading) -> Features:
    return Features(outputs["features"], outputs.get("patch_features"))


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    return cosine(ours["features"], theirs["features"]) >= COSINE


def _form(outputs: Collection[str], spec: None) -> forms.VectorForm:
    return forms.VectorForm("features")


FEATURES = DeviceTask(_answer, _same, form=_form)
