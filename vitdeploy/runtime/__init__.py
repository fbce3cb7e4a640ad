"""How an app calls a model: `load(path)` gives a Predictor. Needs numpy, Pillow and one runtime, never torch."""

from __future__ import annotations

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
from vitdeploy.runtime.tensors import Tensors
from vitdeploy.runtime.text import Text
from vitdeploy.runtime.zero_shot import ZeroShot

if TYPE_CHECKING:
    from vitdeploy.bundle.unpack import unpack

__all__ = [
    "Anomaly",
    "Classification",
    "Depth",
    "Detections",
    "Features",
    "Instances",
    "Keypoints",
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


def __getattr__(name: str) -> Any:
    """`unpack` is imported when it is asked for: most apps load a folder."""
    if name == "unpack":
        from vitdeploy.bundle.unpack import unpack

        return unpack
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
