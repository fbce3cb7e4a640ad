"""Embeddings, such as of faces or products: the cosine of two vectors measures the similarity of two images."""

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
# The output's name, the same as for feature extraction.
VECTOR = "features"


@dataclass(frozen=True)
class EmbeddingSpec(OutputSpec):
    """How "features" [width] becomes an embedding. `normalised`: it is divided by its length, so that the dot product
    of two answers is their cosine, as vector databases expect; otherwise it is not changed."""

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
        """Return the cosine of the two vectors, -1..1; 1 for the same direction.

        Raises:
            InputError: vectors of different widths, or one whose length is 0 or not finite.
        """
        if self.vector.shape != other.vector.shape:
            raise InputError(
                "the two embeddings come from different models",
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
    """Return the vector scaled to length 1, in float64.

    Raises:
        InputError: its length is 0, or not a finite number.
    """
    wide = vector.astype(np.float64)
    length = float(np.linalg.norm(wide))
    if not 0 < length < np.inf:
        raise InputError(
            "the embedding has no direction (length 0 or not finite)",
            found=f"{len(vector)} numbers of length {length}",
            expected="finite numbers, not all 0",
            fix="check the image: the model gives no usable embedding for it",
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
