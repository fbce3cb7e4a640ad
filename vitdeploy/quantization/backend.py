"""The interface that `quantize` needs from a back end: the form in which it is fast with 8 bits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from vitdeploy.backends import BackendTable
from vitdeploy.graph.analysis.linears import Linear
from vitdeploy.quantization.fold import GainThreshold
from vitdeploy.quantization.groups import GroupedWeight
from vitdeploy.quantization.ranges import QuantizedWeight, Range
from vitdeploy.quantization.scores import Scores
from vitdeploy.runtime.profiles import Profile


def _as_it_is(model: ir.Model, ignored: Callable[[str], bool]) -> None:
    """The float graph has the form already."""


def _no_scores(model: ir.Model, layers: Collection[str], known: Container[str]) -> list[Scores]:
    return []


@dataclass(frozen=True)
class FourBitForm:
    """How a back end wants weights of 4 bits: `write` puts those of layers, by name, into a graph of this opset or a
    later one, in place; `shape` brings the float graph into the form that is fast with them, as that of
    `PlacementBackend`; `reason_for_float` says why a layer has no such kernel, None where it has."""

    write: Callable[[ir.Model, Sequence[Linear], Mapping[str, GroupedWeight]], None]
    opset: int = 0
    shape: Callable[[ir.Model, Callable[[str], bool]], None] = _as_it_is
    reason_for_float: Callable[[Linear], str | None] = lambda linear: None


@dataclass(frozen=True)
class PlacementBackend:
    """How a back end wants its INT8.

    gain_threshold: the least gain that justifies another operator, because it costs time.
    reasons_for_float: why layers are better left in float, by layer name; all others are computed in INT8.
    write: quantizes layers in place, from their inputs' ranges by tensor name and their rounded weights by layer name;
        returns the products of queries and keys that are also in INT8.
    shape: brings the float graph into the form that is fast in INT8, in place; exact. Ignored layers are unchanged.
    scores_in_int8: takes the layers in INT8 and the observed tensors; returns the attentions whose queries and keys
        leave their linears as int8.
    dynamic: whether a linear with weights in INT8 and a float input is one in INT8 too, as the runtime quantizes the
        input when it has it (dynamic quantization); None if the runtime does not.
    write_fp8: like `write`, in FP8, with weights that it rounds itself; None if the back end has no FP8.
    int4: the form of INT4 weights; None if the back end has no INT4.
    refuse: raises CapabilityError if a graph, of that name, cannot be built for these shapes.
    """

    gain_threshold: GainThreshold
    reasons_for_float: Callable[[ir.Model, Sequence[Linear]], dict[str, str]]
    write: Callable[
        [ir.Model, Sequence[Linear], Mapping[str, Range], Mapping[str, QuantizedWeight]],
        tuple[str, ...],
    ]
    shape: Callable[[ir.Model, Callable[[str], bool]], None] = _as_it_is
    scores_in_int8: Callable[[ir.Model, Collection[str], Container[str]], list[Scores]] = _no_scores
    dynamic: Callable[[Linear], bool] | None = None
    write_fp8: Callable[[ir.Model, Sequence[Linear], Mapping[str, Range]], None] | None = None
    int4: FourBitForm | None = None
    refuse: Callable[[ir.Model, Sequence[Profile], str], None] | None = None


QUANTIZE = BackendTable(
    "quantization",
    PlacementBackend,
    {
        "onnxruntime": "vitdeploy.quantization.place_onnxruntime:BACKEND",
        "onnxruntime-gpu": "vitdeploy.quantization.place_tensorrt:BACKEND",
        "openvino": "vitdeploy.quantization.place_openvino:BACKEND",
        "openvino-device": "vitdeploy.quantization.place_tensorrt:BACKEND",
        "tensorrt": "vitdeploy.quantization.place_tensorrt:BACKEND",
    },
)
