"""How an app calls a model: `load(path)` gives a Predictor. Needs numpy, Pillow and one runtime, never torch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vitdeploy.runtime.anomaly import Anomaly
from vitdeploy.runtime.depth import Depth
from vitdeploy.runtime.detection import Detections
from vitdeploy.runtime.features import Features
from vitdeploy.runtime.image_to_image import Picture
from vitdeploy.runtime.instances import Instances
from vitdeploy.runtime.keypoints import Keypoints
from vitdeploy.runtime.load import load
from vitdeploy.runtime.panoptic import Panoptic
from vitdeploy.runtime.postprocess import Classification
from vitdeploy.runtime.predictor import Predictor
from vitdeploy.runtime.prompted import PromptedMasks
from vitdeploy.runtime.segmentation import Segmentation
from vitdeploy.runtime.sequence_predictor import SequencePredictor, load_sequence
from vitdeploy.runtime.task import Result
from vitdeploy.runtime.text import Text
from vitdeploy.runtime.values import Tensors
from vitdeploy.runtime.zero_shot import ZeroShot

if TYPE_CHECKING:
    from vitdeploy.bundle.pack import unpack
    from vitdeploy.runtime.monitor import Monitor, MonitorEvent, MonitorWarning

__all__ = [
    "Anomaly",
    "Classification",
    "Depth",
    "Detections",
    "Features",
    "Instances",
    "Keypoints",
    "Monitor",
    "MonitorEvent",
    "MonitorWarning",
    "Panoptic",
    "Picture",
    "Predictor",
    "PromptedMasks",
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


# What most apps do not use is imported when it is asked for.
_LATER = {
    "unpack": "vitdeploy.bundle.pack",
    **dict.fromkeys(("Monitor", "MonitorEvent", "MonitorWarning"), "vitdeploy.runtime.monitor"),
}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
