"""Finds a fix for an error that bisection located, tested on the same images before it is proposed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from vitdeploy.errors import HostError
from vitdeploy.graph.analysis.linears import count_int8
from vitdeploy.graph.edit import drop_unused
from vitdeploy.quantization.observers import observe
from vitdeploy.quantization.placement import choose, place, shape
from vitdeploy.quantization.prepare import prepare
from vitdeploy.quantization.scores import separate_scores
from vitdeploy.quantization.statistics import Statistics
from vitdeploy.runtime.host import describe_host
from vitdeploy.runtime.weight_bits import bits_for, bits_of
from vitdeploy.search.bisect import Bisection
from vitdeploy.search.interval_search import gain
from vitdeploy.search.splice import Splice
from vitdeploy.search.trial import answers_of
from vitdeploy.spec import EngineSpec, Precision, WeightBits

# A fix removes at least this share of the error.
REQUIRED_GAIN = 0.5


@dataclass(frozen=True)
class Fix:
    """`kind`: "quantize" the float graph again as this version does, with `ignore` left in float; or "compile" it in
    FP32. `after`: the distance with the fix; `enough`: whether it fixes the located part."""

    kind: Literal["quantize", "compile"]
    ignore: tuple[str, ...]
    before: float
    after: float
    enough: bool


def find_fix(found: Bisection, splice: Splice) -> Fix | None:
    """The sufficient fix that costs least speed, or else the one that helps most; None if nothing stands out. Each try
    is one more run.

    For an INT8 engine, the float graph is first quantized again, on the images of the reference outputs; then the
    culprit's layers, which read it as they do in this engine, are left in float. Any other engine is compiled in FP32.
    """
    culprit = found.located
    if culprit is None:
        return None
    if culprit.kind == "node":
        return _judged("compile", (), _asked(splice, splice.graph), found)
    statistics = _observed(splice)
    again = _judged("quantize", (), _asked(splice, _quantized(splice, statistics, ())), found)
    if again.enough:
        return again
    if culprit.tensors:
        after = splice.distance(floats=culprit.tensors)
    else:
        after = _asked(splice, _quantized(splice, statistics, culprit.layers))
    return min(again, _judged("quantize", culprit.layers, after, found), key=lambda fix: fix.after)


def fixed_bits(engine: EngineSpec) -> WeightBits:
    """The bits of the weights that a fix makes: those of the engine, or fewer if these saturate here."""
    return min(bits_of(engine) or 8, bits_for(describe_host()["isa"]))


def _judged(kind: Literal["quantize", "compile"], ignore: Sequence[str], after: float, found: Bisection) -> Fix:
    enough = gain(after, found.distance) >= REQUIRED_GAIN * found.parts[0].share * found.distance
    return Fix(kind, tuple(ignore), found.distance, after, enough)


def _asked(splice: Splice, model: ir.Model) -> float:
    """The distance of a whole graph on the target; infinite if the target does not run it."""
    precision: Precision = "int8" if count_int8(model) else "fp32"
    splice.count()
    try:
        answers = answers_of(model, splice.engine.target, precision, splice.reference_outputs)
    except HostError:  # what was found stays true
        return math.inf
    return splice.mean_distance(answers)


def _observed(splice: Splice) -> dict[str, Statistics]:
    pixels, batch = splice.reference_outputs.pixels, splice.reference_outputs.batch
    batches = (pixels[np.arange(i, i + batch) % len(pixels)] for i in range(0, len(pixels), batch))
    model = splice.graph.clone()
    separate_scores(model)  # as calibration does
    return observe(model, batches, splice.reference_outputs.preprocess)


def _quantized(splice: Splice, statistics: dict[str, Statistics], ignore: Sequence[str]) -> ir.Model:
    """The result of `vitdeploy quantize` for the float graph."""
    model, target = splice.graph.clone(), splice.engine.target
    shape(model, target, ignore)
    layers = choose(model, target, ignore).int8
    prepared = prepare(model, statistics, layers, target, bits=fixed_bits(splice.engine))
    place(model, prepared.ranges, target, ignore, prepared.weights)
    drop_unused(model)
    return model
