"""How an app calls a model: `load(path)` gives a Predictor. Needs numpy, Pillow and one runtime, never torch."""

from vitdeploy.runtime.predictor import Predictor, load

__all__ = ["Predictor", "load"]
