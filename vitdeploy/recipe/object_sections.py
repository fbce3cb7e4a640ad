"""What a recipe may say of the outputs of models of key points or instances, and of image-to-image models."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, field_validator, model_validator

from vitdeploy.recipe.section import Positive, Section
from vitdeploy.spec import Candidates, ClassScores, Decoding, Enlarging, ImageSpec, InstanceSpec, KeypointSpec

Index = Annotated[int, Field(ge=0)]
Line = Annotated[tuple[Index, Index], Field(strict=False)]


class KeypointSection(Section):
    """See `spec.KeypointSpec`; for models of key points. `decoding` tells it from other sections."""

    decoding: Decoding
    kernel: Annotated[int, Field(ge=1)] = KeypointSpec.kernel
    threshold: float = KeypointSpec.threshold
    skeleton: Annotated[tuple[Line, ...], Field(strict=False)] = KeypointSpec.skeleton

    @field_validator("kernel")
    @classmethod
    def _odd(cls, kernel: int) -> int:
        if kernel % 2 == 0:
            raise ValueError("wanted an odd number of pixels")
        return kernel

    def to_spec(self) -> KeypointSpec:
        return KeypointSpec(**self.model_dump())


class InstanceSection(Section):
    """See `spec.InstanceSpec`; for instance segmentation. `candidates` tells it from other sections."""

    candidates: Candidates
    class_scores: ClassScores = InstanceSpec.class_scores
    mask_size: Annotated[tuple[Positive, Positive], Field(strict=False)] | None = None
    enlarge: Enlarging = InstanceSpec.enlarge
    threshold: Annotated[float, Field(ge=0, le=1)] = InstanceSpec.threshold

    def to_spec(self) -> InstanceSpec:
        return InstanceSpec(**self.model_dump())


class ImageSection(Section):
    """See `spec.ImageSpec`; for image-to-image models."""

    black: float = ImageSpec.black
    white: float = ImageSpec.white

    @model_validator(mode="after")
    def _above(self) -> ImageSection:
        if self.white <= self.black:
            raise ValueError("wanted white above black")
        return self

    def to_spec(self) -> ImageSpec:
        return ImageSpec(**self.model_dump())
