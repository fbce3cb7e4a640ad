"""The result of `verify` for one engine. Imports only comparisons: it is in the key of the stage that writes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from vitdeploy.spec import decode
from vitdeploy.tasks.anomaly import AnomalyComparison
from vitdeploy.tasks.depth import DepthComparison
from vitdeploy.tasks.features import FeatureComparison
from vitdeploy.tasks.image_to_image import ImageComparison
from vitdeploy.tasks.image_to_text import TextComparison
from vitdeploy.tasks.instance_segmentation import InstanceComparison
from vitdeploy.tasks.keypoints import KeypointComparison
from vitdeploy.tasks.panoptic import PanopticComparison
from vitdeploy.tasks.prompted import PromptComparison
from vitdeploy.tasks.segmentation import SegmentationComparison
from vitdeploy.tasks.sequence import SequenceComparison
from vitdeploy.tasks.tensors import TensorComparison
from vitdeploy.verification.agreement import Agreement
from vitdeploy.verification.comparison import Comparison
from vitdeploy.verification.detection import DetectionComparison


@dataclass(frozen=True)
class SameTensor:
    """The comparison where both sides were given one tensor, whatever their own preprocessing is."""

    agreement: float
    max_difference: float


@dataclass(frozen=True, kw_only=True)
class Diagnosed:
    """Why an engine and the original differ, in a sentence. `same_tensor`: None if the original cannot be fed the
    engine's tensors."""

    same_tensor: SameTensor | None
    diagnosis: str


@dataclass(frozen=True, kw_only=True)
class VerifiedClassification(Diagnosed, Agreement):
    """A classifier against the original."""


@dataclass(frozen=True, kw_only=True)
class VerifiedFeatures(Diagnosed, FeatureComparison):
    """Features against the original's."""


@dataclass(frozen=True, kw_only=True)
class VerifiedDetection(Diagnosed, DetectionComparison):
    """A detector against the original."""


@dataclass(frozen=True, kw_only=True)
class VerifiedPanoptic(Diagnosed, PanopticComparison):
    """A panoptic model against the original."""


@dataclass(frozen=True, kw_only=True)
class VerifiedSequence(Diagnosed, SequenceComparison):
    """Sequences against the original's."""


@dataclass(frozen=True, kw_only=True)
class VerifiedSegmentation(Diagnosed, SegmentationComparison):
    """A semantic segmentation model against the original."""


@dataclass(frozen=True, kw_only=True)
class VerifiedInstances(Diagnosed, InstanceComparison):
    """An instance segmentation model against the original."""


@dataclass(frozen=True, kw_only=True)
class VerifiedDepth(Diagnosed, DepthComparison):
    """A depth model against the original."""


@dataclass(frozen=True, kw_only=True)
class VerifiedAnomalies(Diagnosed, AnomalyComparison):
    """An anomaly model against the original."""


@dataclass(frozen=True, kw_only=True)
class VerifiedTensors(Diagnosed, TensorComparison):
    """Outputs of no known task against the original's."""


@dataclass(frozen=True, kw_only=True)
class VerifiedKeypoints(Diagnosed, KeypointComparison):
    """Key points against the original's."""


@dataclass(frozen=True, kw_only=True)
class VerifiedImages(Diagnosed, ImageComparison):
    """Pictures against the original's."""


@dataclass(frozen=True, kw_only=True)
class VerifiedPrompts(Diagnosed, PromptComparison):
    """Masks of prompted objects against the original's."""


@dataclass(frozen=True, kw_only=True)
class VerifiedTexts(Diagnosed, TextComparison):
    """Texts of images against the original's."""


Verified: TypeAlias = (
    VerifiedClassification
    | VerifiedFeatures
    | VerifiedDetection
    | VerifiedPanoptic
    | VerifiedSequence
    | VerifiedSegmentation
    | VerifiedDepth
    | VerifiedAnomalies
    | VerifiedTensors
    | VerifiedKeypoints
    | VerifiedImages
    | VerifiedPrompts
    | VerifiedTexts
    | VerifiedInstances
)
_VERIFIED: dict[type[Comparison], type[Verified]] = {
    Agreement: VerifiedClassification,
    FeatureComparison: VerifiedFeatures,
    DetectionComparison: VerifiedDetection,
    PanopticComparison: VerifiedPanoptic,
    SequenceComparison: VerifiedSequence,
    SegmentationComparison: VerifiedSegmentation,
    DepthComparison: VerifiedDepth,
    AnomalyComparison: VerifiedAnomalies,
    TensorComparison: VerifiedTensors,
    KeypointComparison: VerifiedKeypoints,
    ImageComparison: VerifiedImages,
    PromptComparison: VerifiedPrompts,
    TextComparison: VerifiedTexts,
    InstanceComparison: VerifiedInstances,
}


def diagnosed(found: Comparison, same_tensor: SameTensor | None, diagnosis: str) -> Verified:
    """A task's comparison with why the two differ."""
    return _VERIFIED[type(found)](**vars(found), same_tensor=same_tensor, diagnosis=diagnosis)


@dataclass(frozen=True)
class _File:
    verify: Verified


def decode_verified(data: object) -> Verified:
    """Decode the result of `verify` from JSON values.

    Raises:
        DecodeError: the values belong to no task.
    """
    return decode(_File, {"verify": data}).verify
