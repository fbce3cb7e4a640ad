"""What a recipe may say of a model's outputs: a section for each class of `spec.Postprocess` that has a choice."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Discriminator, Tag

from vitdeploy.recipe.dense_sections import AnomalySection, DepthSection, SegmentationSection
from vitdeploy.recipe.object_sections import ImageSection, InstanceSection, KeypointSection
from vitdeploy.recipe.section import Section
from vitdeploy.recipe.sections import PostprocessSection

# By tags that are no names of fields: an error's path leaves them out.
SECTIONS: dict[str, type[Section]] = {
    "of-objects": PostprocessSection,
    "of-classes": SegmentationSection,
    "of-instances": InstanceSection,
    "of-depth": DepthSection,
    "of-anomalies": AnomalySection,
    "of-points": KeypointSection,
    "of-images": ImageSection,
}


def _tag(value: Any) -> str:
    """The section that has most of the given fields; the first of several."""
    fields = set(value) if isinstance(value, dict) else set(getattr(type(value), "model_fields", ()))
    return max(SECTIONS, key=lambda tag: len(fields & set(SECTIONS[tag].model_fields)))


AnyPostprocess = Annotated[
    Annotated[PostprocessSection, Tag("of-objects")]
    | Annotated[SegmentationSection, Tag("of-classes")]
    | Annotated[InstanceSection, Tag("of-instances")]
    | Annotated[DepthSection, Tag("of-depth")]
    | Annotated[AnomalySection, Tag("of-anomalies")]
    | Annotated[KeypointSection, Tag("of-points")]
    | Annotated[ImageSection, Tag("of-images")],
    Discriminator(_tag),
]
