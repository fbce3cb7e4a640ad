"""What a recipe may say of a model's outputs: a section for each class of `spec.Postprocess` that has a choice."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag, field_validator

from vitdeploy.dense_spec import DepthResize, DepthSpec, DepthValues, SegmentationMaps, SegmentationSpec
from vitdeploy.recipe.section import Positive, Section
from vitdeploy.recipe.sections import PostprocessSection
from vitdeploy.spec_points import Decoding, KeypointSpec

Index = Annotated[int, Field(ge=0)]
Line = Annotated[tuple[Index, Index], Field(strict=False)]


class SegmentationSection(Section):
    """See `dense_spec.SegmentationSpec`; for semantic segmentation."""

    maps: SegmentationMaps = SegmentationSpec.maps
    mask_size: Annotated[tuple[Positive, Positive], Field(strict=False)] | None = None
    ignore: Annotated[int, Field(ge=0, le=65535)] = SegmentationSpec.ignore
    reduce_labels: bool = SegmentationSpec.reduce_labels

    def to_spec(self) -> SegmentationSpec:
        return SegmentationSpec(**self.model_dump())


class DepthSection(Section):
    """See `dense_spec.DepthSpec`; for depth."""

    values: DepthValues = DepthSpec.values
    resize: DepthResize = DepthSpec.resize
    max_depth: Annotated[float, Field(gt=0)] | None = None

    def to_spec(self) -> DepthSpec:
        return DepthSpec(**self.model_dump())


class KeypointSection(Section):
    """See `spec_points.KeypointSpec`; for models of key points."""

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


# By tags that are no names of fields: an error's path leaves them out.
SECTIONS: dict[str, type[Section]] = {
    "of-objects": PostprocessSection,
    "of-classes": SegmentationSection,
    "of-depth": DepthSection,
    "of-points": KeypointSection,
}


def _tag(value: Any) -> str:
    """The section that has most of the given fields; the first of several."""
    fields = set(value) if isinstance(value, dict) else set(getattr(type(value), "model_fields", ()))
    return max(SECTIONS, key=lambda tag: len(fields & set(SECTIONS[tag].model_fields)))


AnyPostprocess = Annotated[
    Annotated[PostprocessSection, Tag("of-objects")]
    | Annotated[SegmentationSection, Tag("of-classes")]
    | Annotated[DepthSection, Tag("of-depth")]
    | Annotated[KeypointSection, Tag("of-points")],
    Discriminator(_tag),
]
