"""What a recipe may say of the outputs of models with an answer for every pixel."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from vitdeploy.recipe.section import Positive, Section
from vitdeploy.spec import (
    AnomalySpec,
    DepthResize,
    DepthSpec,
    DepthValues,
    SegmentationMaps,
    SegmentationSpec,
)


class SegmentationSection(Section):
    """See `spec.SegmentationSpec`; for semantic segmentation."""

    maps: SegmentationMaps = SegmentationSpec.maps
    mask_size: Annotated[tuple[Positive, Positive], Field(strict=False)] | None = None
    ignore: Annotated[int, Field(ge=0, le=65535)] = SegmentationSpec.ignore
    reduce_labels: bool = SegmentationSpec.reduce_labels

    def to_spec(self) -> SegmentationSpec:
        return SegmentationSpec(**self.model_dump())


class DepthSection(Section):
    """See `spec.DepthSpec`; for depth."""

    values: DepthValues = DepthSpec.values
    resize: DepthResize = DepthSpec.resize
    max_depth: Annotated[float, Field(gt=0)] | None = None

    def to_spec(self) -> DepthSpec:
        return DepthSpec(**self.model_dump())


class AnomalySection(Section):
    """See `spec.AnomalySpec`; for anomalies. `pixel_threshold` tells it from other sections."""

    threshold: float
    pixel_threshold: float
    sigma: Annotated[float, Field(ge=0)] = AnomalySpec.sigma

    def to_spec(self) -> AnomalySpec:
        return AnomalySpec(**self.model_dump())
