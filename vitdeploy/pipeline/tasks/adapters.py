"""From a setting to the kit of its task."""

from __future__ import annotations

from vitdeploy.pipeline.tasks.adapter import Setting, TaskAdapter
from vitdeploy.pipeline.tasks.classification import ClassificationKit
from vitdeploy.pipeline.tasks.detection import DetectionKit
from vitdeploy.pipeline.tasks.features import FeaturesKit
from vitdeploy.pipeline.tasks.panoptic import PanopticKit
from vitdeploy.pipeline.tasks.sequence import SequenceKit
from vitdeploy.spec import Task

KITS: dict[Task, type[TaskAdapter]] = {
    "classification": ClassificationKit,
    "features": FeaturesKit,
    "detection": DetectionKit,
    "panoptic": PanopticKit,
    "sequence": SequenceKit,
}


def make_adapter(setting: Setting) -> TaskAdapter:
    return KITS[setting.task](setting)
