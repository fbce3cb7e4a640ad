"""Quantization-aware training in the user's own loop: a module that computes as its INT8 graph does, and back.

prepared = vitdeploy.qat.prepare(module, int8)      # int8: of vitdeploy.quantize, or a bundle
...                                                 # train `prepared` as any module
trained = vitdeploy.qat.export(prepared, "out/int8")
"""

from vitdeploy.qat.prepared import prepare, steps
from vitdeploy.qat.trained import export

__all__ = ["export", "prepare", "steps"]
