"""The tasks, and for each the class that says what its outputs mean."""

from __future__ import annotations

from typing import Literal, TypeAlias

from vitdeploy.spec.anomaly import AnomalySpec
from vitdeploy.spec.dense import DepthSpec, SegmentationSpec, TensorsSpec
from vitdeploy.spec.detection import PostprocessSpec
from vitdeploy.spec.images import ImageSpec
from vitdeploy.spec.instances import InstanceSpec
from vitdeploy.spec.keypoints import KeypointSpec
from vitdeploy.spec.prompts import PromptSpec
from vitdeploy.spec.texts import OpenVocabularySpec, TextSpec, ZeroShotSpec

Task = Literal[
    "classification",
    "features",
    "detection",
    "panoptic",
    "segmentation",
    "instance-segmentation",
    "depth",
    "anomaly",
    "keypoints",
    "image-to-image",
    "image-to-text",
    "sequence",
    "tensors",
    "zero-shot",
    "open-vocabulary-detection",
    "promptable-segmentation",
]
# Where the labels of images come from: `data/` says what each is.
LabelKind = Literal[
    "folders", "none", "yolo", "coco", "panoptic", "masks", "depth", "targets", "prompts", "texts", "mvtec"
]

# What the outputs of a task mean, for tasks that have something to say of that: one class of data a task, or several.
Postprocess: TypeAlias = (
    PostprocessSpec
    | KeypointSpec
    | SegmentationSpec
    | InstanceSpec
    | DepthSpec
    | AnomalySpec
    | ImageSpec
    | TensorsSpec
    | ZeroShotSpec
    | OpenVocabularySpec
    | PromptSpec
    | TextSpec
)
# The class of each task's; a task that is not here has none.
POSTPROCESS: dict[Task, type[Postprocess]] = {
    "detection": PostprocessSpec,
    "panoptic": PostprocessSpec,
    "segmentation": SegmentationSpec,
    "instance-segmentation": InstanceSpec,
    "depth": DepthSpec,
    "anomaly": AnomalySpec,
    "zero-shot": ZeroShotSpec,
    "open-vocabulary-detection": OpenVocabularySpec,
    "tensors": TensorsSpec,
    "keypoints": KeypointSpec,
    "image-to-image": ImageSpec,
    "promptable-segmentation": PromptSpec,
    "image-to-text": TextSpec,
}


def tokenizer_file(postprocess: Postprocess | None) -> str | None:
    """The file of a bundle that turns texts into tokens, or tokens into texts; None of a model without."""
    return getattr(postprocess, "tokenizer", None)
