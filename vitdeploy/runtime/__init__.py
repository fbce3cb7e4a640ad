"""How an app calls a model: `load(path)` gives a Predictor. Needs numpy, Pillow and one runtime, never torch."""

from vitdeploy.runtime.predictor import Predictor, load
from vitdeploy.runtime.sequence_predictor import SequencePredictor, load_sequence

__all__ = ["Predictor", "SequencePredictor", "load", "load_sequence"]
