"""How an app calls a model: `load(path)` gives a Predictor. Needs numpy, Pillow and one runtime, never torch."""

from vitdeploy.bundle.unpack import unpack
from vitdeploy.runtime.answers import Features, Result
from vitdeploy.runtime.detection import Detections
from vitdeploy.runtime.panoptic import Panoptic
from vitdeploy.runtime.postprocess import Classification
from vitdeploy.runtime.predictor import Predictor, load
from vitdeploy.runtime.sequence_predictor import SequencePredictor, load_sequence

__all__ = [
    "Classification",
    "Detections",
    "Features",
    "Panoptic",
    "Predictor",
    "Result",
    "SequencePredictor",
    "load",
    "load_sequence",
    "unpack",
]
