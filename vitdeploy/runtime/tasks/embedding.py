"""From the output of an embedder, such as of faces or products, to a vector that says by its direction who or what it
is: the cosine of two vectors says how alike two images are."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from vitdeploy.errors import InputError
from vitdeploy.runtime.postprocess import cosine
from vitdeploy.runtime.tasks import forms
from vitdeploy.runtime.tasks.task import COSINE, DeviceTask, OutputReading, Outputs
from vitdeploy.spec import OutputSpec

Vector = npt.NDArray[np.float32]
# The output, which is called as that of a feature extractor.
VECTOR = "features"


@dataclass(frozen=True)
class EmbeddingSpec(OutputSpec):
    """What becomes of "features" [width] in an answer. `normalised`: it is divided by its length, so that the dot
    product of two answers is their cosine, as vector databases take it; otherwise it stays as the model gives it."""

    normalised: bool = True
    tensors: ClassVar[Mapping[str, int]] = {VECTOR: 2}
    about_images: ClassVar[bool] = True
    reads: ClassVar[str | None] = "features"
    in_recipes: ClassVar[tuple[str, ...] | None] = ("normalised",)


@dataclass(frozen=True, eq=False, repr=False)
class Embedding:
    """The answer for one image. vector: float32 [width]."""

    vector: Vector

    def similarity(self, other: "Embedding") -> float:
        """The cosine of the two vectors, -1..1; 1: of one direction.

        Raises:
            InputError: vectors of different widths, or one without a direction.
        """
        if self.vector.shape != other.vector.shape:
            raise InputError(
                "these two vectors are of different models",
                found=f"{len(self.vector)} and {len(other.vector)} numbers",
                expected="two answers of one model",
            )
        a, b = direction(self.vector), direction(other.vector)
        return float(np.clip(a @ b, -1, 1))

    def to_dict(self) -> dict[str, Any]:
        return {"vector": self.vector.tolist()}

    def __str__(self) -> str:
        return f"{len(self.vector)} numbers: {' '.join(f'{value:.4f}' for value in self.vector[:4])} ..."

    def __repr__(self) -> str:
        return f"<Embedding: {self}>"


def direction(vector: Vector) -> npt.NDArray[np.float64]:
    """The vector at length 1, in float64.

    Raises:
        InputError: its length is 0, or not a finite number.
    """
    wide = vector.astype(np.float64)
    length = float(np.linalg.norm(wide))
    if not 0 < length < np.inf:
        raise InputError(
            "an embedding has no direction, so it is like nothing",
            found=f"{len(vector)} numbers of length {length}",
            expected="numbers that are finite and not all 0",
            fix="look at the image: the model answers nothing to it",
        )
    return np.asarray(wide / length)


def _answer(outputs: Outputs, reading: OutputReading) -> Embedding:
    vector = outputs[VECTOR]
    if reading.head(EmbeddingSpec).normalised and np.linalg.norm(vector) > 0:
        vector = direction(vector).astype(np.float32)
    return Embedding(vector)


def _same(ours: Outputs, theirs: Outputs, reading: OutputReading) -> bool:
    return cosine(ours[VECTOR], theirs[VECTOR]) >= COSINE


def _form(outputs: Collection[str], spec: EmbeddingSpec) -> forms.VectorForm:
    return forms.VectorForm(VECTOR, spec.normalised)


EMBEDDING = DeviceTask(
    _answer, _same, predictor="vitdeploy.runtime.gallery:EmbeddingPredictor", postprocess=EmbeddingSpec, form=_form
)
