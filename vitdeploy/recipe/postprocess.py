"""What a recipe may say of the outputs of tasks that have a class of data of their own: see these classes."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, field_validator

from vitdeploy.recipe.section import Section
from vitdeploy.recipe.sections import PostprocessSection
from vitdeploy.spec_points import Decoding, KeypointSpec

Index = Annotated[int, Field(ge=0)]
Line = Annotated[tuple[Index, Index], Field(strict=False)]


class KeypointSection(Section):
    """See `spec_points.KeypointSpec`; for models of key points. `decoding` tells it from a detector's section."""

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


# No identifiers: a tag is no part of a path in the recipe.
OBJECTS, POINTS = "of objects", "of key points"


def _kind(value: Any) -> str:
    """Which section a value is, by what only one of them has."""
    names = value if isinstance(value, dict) else getattr(type(value), "model_fields", ())
    return POINTS if "decoding" in names else OBJECTS


AnyPostprocess = Annotated[
    Annotated[PostprocessSection, Tag(OBJECTS)] | Annotated[KeypointSection, Tag(POINTS)], Discriminator(_kind)
]
