"""The row of each task: the class of its adapter, which says all that the workshop asks of a task."""

from __future__ import annotations

from collections.abc import Mapping

from vitdeploy.spec import Task
from vitdeploy.tasks.adapter import Setting, TaskAdapter
from vitdeploy.tasks.anomaly import AnomalyKit
from vitdeploy.tasks.classification import ClassificationKit
from vitdeploy.tasks.counted import CountedKit
from vitdeploy.tasks.depth import DepthKit
from vitdeploy.tasks.detection import DetectionKit
from vitdeploy.tasks.features import FeaturesKit
from vitdeploy.tasks.image_to_image import ImageToImageKit
from vitdeploy.tasks.image_to_text import ImageToTextKit
from vitdeploy.tasks.instance_segmentation import InstanceSegmentationKit
from vitdeploy.tasks.keypoints import KeypointsKit
from vitdeploy.tasks.open_vocabulary import OpenVocabularyKit
from vitdeploy.tasks.panoptic import PanopticKit
from vitdeploy.tasks.prompted import PromptedKit
from vitdeploy.tasks.segmentation import SegmentationKit
from vitdeploy.tasks.sequence import SequenceKit
from vitdeploy.tasks.tensors import TensorsKit
from vitdeploy.tasks.zero_shot import ZeroShotKit

TASKS: Mapping[Task, type[TaskAdapter]] = {
    "classification": ClassificationKit,
    "features": FeaturesKit,
    "detection": DetectionKit,
    "panoptic": PanopticKit,
    "sequence": SequenceKit,
    "segmentation": SegmentationKit,
    "instance-segmentation": InstanceSegmentationKit,
    "depth": DepthKit,
    "anomaly": AnomalyKit,
    "zero-shot": ZeroShotKit,
    "open-vocabulary-detection": OpenVocabularyKit,
    "tensors": TensorsKit,
    "keypoints": KeypointsKit,
    "image-to-image": ImageToImageKit,
    "promptable-segmentation": PromptedKit,
    "image-to-text": ImageToTextKit,
}


def make_adapter(setting: Setting) -> TaskAdapter:
    return TASKS[setting.task](setting)


def counted_adapter(setting: Setting) -> CountedKit | None:
    """The adapter of a task that is counted in shards; None of any other."""
    found = make_adapter(setting)
    return found if isinstance(found, CountedKit) and found.in_shards else None
