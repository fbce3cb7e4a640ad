"""Run a bundle in an app: `load(path)` returns a Predictor. Needs numpy, Pillow and one runtime, never torch."""

import importlib
from typing import TYPE_CHECKING, Any

from vitdeploy.runtime.load import load
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.runtime.sequence_predictor import SequencePredictor, load_sequence
from vitdeploy.runtime.tasks.anomaly import Anomaly
from vitdeploy.runtime.tasks.binary import Decision
from vitdeploy.runtime.tasks.classification import Classification
from vitdeploy.runtime.tasks.depth import Depth
from vitdeploy.runtime.tasks.detection import Detections
from vitdeploy.runtime.tasks.embedding import Embedding
from vitdeploy.runtime.tasks.features import Features
from vitdeploy.runtime.tasks.foreground import Foreground
from vitdeploy.runtime.tasks.heads import Heads
from vitdeploy.runtime.tasks.image_to_image import Picture
from vitdeploy.runtime.tasks.image_to_text import Text
from vitdeploy.runtime.tasks.instance_segmentation import Instances
from vitdeploy.runtime.tasks.keypoints import Keypoints
from vitdeploy.runtime.tasks.multi_label import Labels
from vitdeploy.runtime.tasks.panoptic import Panoptic
from vitdeploy.runtime.tasks.prompted import PromptedMasks
from vitdeploy.runtime.tasks.regression import Regression
from vitdeploy.runtime.tasks.segmentation import Segmentation
from vitdeploy.runtime.tasks.task import Result
from vitdeploy.runtime.tasks.tensors import Tensors
from vitdeploy.runtime.tasks.zero_shot import ZeroShot

if TYPE_CHECKING:
    from vitdeploy.bundle.pack import unpack
    from vitdeploy.runtime.monitor import Monitor, MonitorEvent, MonitorWarning

__all__ = [
    "Anomaly",
    "Classification",
    "Decision",
    "Depth",
    "Detections",
    "Embedding",
    "Features",
    "Foreground",
    "Heads",
    "Instances",
    "Keypoints",
    "Labels",
    "Monitor",
    "MonitorEvent",
    "MonitorWarning",
    "Panoptic",
    "Picture",
    "Predictor",
    "PromptedMasks",
    "Regression",
    "Result",
    "Segmentation",
    "SequencePredictor",
    "Tensors",
    "Text",
    "ZeroShot",
    "load",
    "load_sequence",
    "unpack",
]


# Names that most apps do not use are imported on first access.
_LATER = {
    "unpack": "vitdeploy.bundle.pack",
    **dict.fromkeys(("Monitor", "MonitorEvent", "MonitorWarning"), "vitdeploy.runtime.monitor"),
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
