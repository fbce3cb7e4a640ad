"""Placements: where Q and DQ stand, inserted and read back."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.backends import TARGETS, BackendTable
from vitdeploy.errors import CapabilityError, GraphError
from vitdeploy.graph.analysis.rows import Linear, find_linears, unplaced_weights
from vitdeploy.graph.edit import Names
from vitdeploy.quantization.fold import GainThreshold
from vitdeploy.quantization.groups import GroupedWeight
from vitdeploy.quantization.ranges import (
    ActivationScale,
    QuantizedWeight,
    Range,
    Scores,
    activation_scale,
    quantize_weight,
)
from vitdeploy.runtime.profiles import Profile

# --- Write Q/DQ for placements ----------------------------------------------------------------------------------------
# one QuantizeLinear per tensor, and weights of 8 or 4 bits behind a DequantizeLinear.


class Quantizers:
    """QuantizeLinear nodes, one for each quantized tensor, shared by all its readers."""

    def __init__(self, model: ir.Model, ranges: Mapping[str, Range]) -> None:
        self.model = model
        self.ranges = ranges
        self._made: dict[str, tuple[ir.Value, ir.Value, ir.Value]] = {}

    def quantize(self, tensor: ir.Value, before: ir.Node) -> tuple[ir.Value, ir.Value, ir.Value]:
        """(quantized uint8 tensor, scale, zero point); inserted before the first reader that asks."""
        name = str(tensor.name)
        if name not in self._made:
            parameters: ActivationScale = activation_scale(self.ranges[name])
            names = Names(self.model)
            scale = names.constant(np.asarray(parameters.scale), f"{name}.scale")
            zero_point = names.constant(np.asarray(parameters.zero_point), f"{name}.zero_point")
            inputs = [tensor, scale, zero_point]
            node = names.node("QuantizeLinear", inputs, f"{name}/QuantizeLinear", output=f"{name}/quantized")
            self.model.graph.insert_before(before, node)
            self._made[name] = (node.outputs[0], scale, zero_point)
        return self._made[name]


def dequantized_weight(
    model: ir.Model, linear: Linear, codes: npt.NDArray[Any], scales: npt.NDArray[np.float32]
) -> ir.Value:
    """The weight of a layer as constants in front of it: codes of 8 bits in its shape, scales [output channels]."""
    stem, names = f"{linear.name}.weight", Names(model)
    node = names.node(
        "DequantizeLinear",
        [names.constant(codes, f"{stem}.{codes.dtype.name}"), names.constant(scales, f"{stem}.scale")],
        f"{stem}/DequantizeLinear",
        {"axis": linear.out_axis},
        output=f"{stem}/dequantized",
    )
    model.graph.insert_before(linear.node, node)
    return node.outputs[0]


def dequantized_groups(model: ir.Model, linear: Linear, weight: GroupedWeight) -> ir.Value:
    """The weight of a linear as constants of int4 in front of it, with a scale for each group of inputs (opset 21)."""
    stem, names = f"{linear.name}.weight", Names(model)
    codes = names.constant(weight.codes.astype(ml_dtypes.int4), f"{stem}.int4")
    node = names.node(
        "DequantizeLinear",
        [codes, names.constant(weight.scales, f"{stem}.scale")],
        f"{stem}/DequantizeLinear",
        {"axis": 0, "block_size": weight.group},
        output=f"{stem}/dequantized",
    )
    model.graph.insert_before(linear.node, node)
    return node.outputs[0]


# --- The interface that `quantize` needs from a back end: the form in which it is fast with 8 bits --------------------


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


# --- Placement of Q/DQ: one placement per target, each from the same calibration --------------------------------------
# This module holds what all targets share: the choice of layers, and its record. The form that is fast on a target is
# in `place_<back end>.py`.


DYNAMIC = "worth the time in which the runtime quantizes its input"


@dataclass(frozen=True)
class Placement:
    """Names of the layers that are computed in INT8, and of those left in float with the reason.

    `scores`: the products of queries and keys that are also in INT8. `dynamic`: layers whose weights are in INT8, and
    whose activations the runtime quantizes when it has them; with the reason.
    """

    target: str
    int8: tuple[str, ...]
    float: dict[str, str]
    scores: tuple[str, ...] = ()
    dynamic: dict[str, str] = field(default_factory=dict)


def shape(model: ir.Model, target: str, ignore: Sequence[str] = ()) -> None:
    """Bring the float graph into the form whose INT8 `target` is fast with, in place; exact. To be called first."""
    QUANTIZE[target].shape(model, matching(ignore))


def matching(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name matches one of these."""
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def choose(model: ir.Model, target: str, ignore: Sequence[str] = (), dynamic: Collection[str] = ()) -> Placement:
    """Choose the layers of the float graph that `target` computes in INT8. Nothing is changed.

    Args:
        ignore: layer names, or shell patterns of them, to leave in float.
        dynamic: names of linears whose activations are to be quantized by the runtime.

    Raises:
        TargetError: an unknown target.
        GraphError: a pattern of `ignore` matches no layer, or the graph has none.
    """
    backend = QUANTIZE[target]
    linears = find_linears(model)
    others = unplaced_weights(model)
    if not linears:
        raise GraphError(
            "the graph has no linear or convolution with constant float32 weights, so nothing to quantize",
            found="; ".join(f"{name}: {reason}" for name, reason in list(others.items())[:3]),
            fix="choose the precision fp32, which needs no images",
        )
    names = [linear.name for linear in linears]
    chosen = ignored(names, ignore)
    left = dict(others)
    reasons = backend.reasons_for_float(model, linears)
    for linear in linears:
        if linear.name in chosen:
            left[linear.name] = "ignored on request"
        elif linear.name in reasons:
            left[linear.name] = reasons[linear.name]
    placed = [name for name in names if name not in left]
    return Placement(
        target,
        tuple(name for name in placed if name not in dynamic),
        left,
        dynamic={name: DYNAMIC for name in placed if name in dynamic},
    )


def ignored(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """The layers that are to be left as they are.

    Raises:
        GraphError: a pattern matches no layer.
    """
    unmatched = [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]
    if unmatched:
        raise GraphError(
            f"no layer matches {', '.join(unmatched)}",
            found=f"{', '.join(names[:6])} ...",
            fix="give layer names as printed by `vitdeploy inspect`, with * for any",
        )
    return {name for name in names for pattern in patterns if fnmatch.fnmatchcase(name, pattern)}


def place(
    model: ir.Model,
    ranges: Mapping[str, Range],
    target: str,
    ignore: Sequence[str] = (),
    weights: Mapping[str, QuantizedWeight] | None = None,
    *,
    fp8: bool = False,
    dynamic: Collection[str] = (),
) -> Placement:
    """Write INT8 into the float graph for `target`, in place; or FP8, where the target has that.

    Args:
        ranges: what is to be represented of each layer's input, by tensor name.
        ignore, dynamic: as in `choose`.
        weights: in INT8, by layer name; any other is rounded to the nearest.

    Raises:
        TargetError, GraphError: as `choose`; or a layer was not calibrated.
        CapabilityError: FP8, or layers that are `dynamic`, for a target that has none.
    """
    backend, placement, rounded = QUANTIZE[target], choose(model, target, ignore, dynamic), dict(weights or {})
    if placement.dynamic and backend.dynamic is None:
        raise CapabilityError(
            f"{target} quantizes no activations by itself", found=", ".join(list(placement.dynamic)[:3])
        )
    linears = find_linears(model)
    chosen = [linear for linear in linears if linear.name in placement.int8]
    check_calibrated(chosen, ranges)
    if fp8:
        if backend.write_fp8 is None:
            raise CapabilityError(f"{target} has no FP8", wanted=", ".join(TARGETS[target].precisions))
        backend.write_fp8(model, chosen, ranges)
        return placement
    of_weights = [linear for linear in linears if linear.name in placement.dynamic]
    for linear in (*chosen, *of_weights):
        if linear.name not in rounded:
            rounded[linear.name] = quantize_weight(linear.weight, linear.out_axis)
    for linear in of_weights:
        linear.node.replace_input_with(1, dequantized_weight(model, linear, *rounded[linear.name]))
    scores = backend.write(model, chosen, ranges, rounded)
    return replace(placement, scores=scores)


def check_calibrated(linears: Iterable[Linear], known: Container[str]) -> None:
    """Raise GraphError if a layer reads a tensor without statistics."""
    for linear in linears:
        if str(linear.input.name) not in known:
            raise GraphError(f"the input of {linear.name} was not calibrated", fix="calibrate this graph again")
