"""What `quantize` asks of a back end: in which form it is fast with 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from vitdeploy.backends import BackendTable
from vitdeploy.graph.analysis.linears import Linear
from vitdeploy.quantization.fold import GainThreshold
from vitdeploy.quantization.ranges import QuantizedWeight, Range
from vitdeploy.quantization.scores import Scores
from vitdeploy.runtime.profiles import Profile


def _as_it_is(model: ir.Model, ignored: Callable[[str], bool]) -> None:
    """The float graph has the form already."""


def _no_scores(model: ir.Model, layers: Collection[str], known: Container[str]) -> list[Scores]:
    return []


@dataclass(frozen=True)
class PlacementBackend:
    """How a back end wants its INT8.

    gain_threshold: what an operator more must at least gain, as it costs time.
    reasons_for_float: why layers are better left in float, by their names; all others are computed in INT8.
    write: quantizes layers in place, of their inputs' ranges by tensor name and their rounded weights by layer
        name; returns the products of queries and keys that are in INT8 too.
    shape: brings the float graph into the form that is fast in INT8, in place; exact. Layers that are ignored stay.
    scores_in_int8: the attentions whose queries and keys leave their linears as int8, of the layers in INT8 and the
        tensors that were observed.
    write_fp8: as `write`, in FP8, with weights that it rounds itself; None where the back end has no FP8.
    refuse: raises CapabilityError where a graph, of that name, cannot be built for these shapes.
    """

    gain_threshold: GainThreshold
    reasons_for_float: Callable[[ir.Model, Sequence[Linear]], dict[str, str]]
    write: Callable[
        [ir.Model, Sequence[Linear], Mapping[str, Range], Mapping[str, QuantizedWeight]],
        tuple[str, ...],
    ]
    shape: Callable[[ir.Model, Callable[[str], bool]], None] = _as_it_is
    scores_in_int8: Callable[[ir.Model, Collection[str], Container[str]], list[Scores]] = _no_scores
    write_fp8: Callable[[ir.Model, Sequence[Linear], Mapping[str, Range]], None] | None = None
    refuse: Callable[[ir.Model, Sequence[Profile], str], None] | None = None


QUANTIZE = BackendTable(
    "quantization",
    PlacementBackend,
    {
        "onnxruntime": "vitdeploy.quantization.place_onnxruntime:BACKEND",
        "onnxruntime-gpu": "vitdeploy.quantization.place_tensorrt:BACKEND",
        "openvino": "vitdeploy.quantization.place_openvino:BACKEND",
        "tensorrt": "vitdeploy.quantization.place_tensorrt:BACKEND",
    },
)
