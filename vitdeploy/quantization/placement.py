"""Placements: where Q and DQ stand, inserted and read back."""

import fnmatch
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from vitdeploy.backends import TARGETS, BackendTable
from vitdeploy.errors import CapabilityError, GraphError
from vitdeploy.graph.analysis.rows import Linear, find_linears, is_place, is_ranked, unplaced_weights
from vitdeploy.graph.edit import Names
from vitdeploy.quantization.folds import Fold, GainThreshold, Hidden
from vitdeploy.quantization.ranges import (
    QuantizedWeight,
    Range,
    Scores,
    activation_scale,
    quantize_weight,
)
from vitdeploy.quantization.rounding import GroupedWeight
from vitdeploy.runtime.profiles import Profile

# --- The forms of quantized tensors and weights, as all placements write them -----------------------------------------


def quantizer(names: Names, value: ir.Value, name: str, scale: npt.NDArray[Any], zero: npt.NDArray[Any]) -> ir.Node:
    """QuantizeLinear of a tensor, which is called `name` in what is made for it; not inserted yet."""
    inputs = [value, names.constant(scale, f"{name}.scale"), names.constant(zero, f"{name}.zero_point")]
    return names.node("QuantizeLinear", inputs, f"{name}/QuantizeLinear", output=f"{name}/quantized")


def quantize_pair(
    model: ir.Model, value: ir.Value, name: str, scale: npt.NDArray[Any], zero: npt.NDArray[Any]
) -> list[ir.Node]:
    """The same with the DequantizeLinear behind it."""
    names = Names(model)
    node = quantizer(names, value, name, scale, zero)
    return [node, dequantizer(names, [node.outputs[0], *node.inputs[1:]], name)]


def dequantizer(names: Names, inputs: list[ir.Value | None], name: str, attributes: Any = None) -> ir.Node:
    return names.node(
        "DequantizeLinear", inputs, f"{name}/DequantizeLinear", attributes or {}, output=f"{name}/dequantized"
    )


class Quantizers:
    """QuantizeLinear nodes, one for each quantized tensor, shared by all its readers."""

    def __init__(self, model: ir.Model, ranges: Mapping[str, Range]) -> None:
        self.model = model
        self.ranges = ranges
        self._made: dict[str, ir.Node] = {}
        self._back: dict[str, ir.Value] = {}

    def quantize(self, tensor: ir.Value, before: ir.Node) -> list[ir.Value | None]:
        """[quantized uint8 tensor, scale, zero point]; inserted before the first reader that asks."""
        name = str(tensor.name)
        if name not in self._made:
            scale, zero = activation_scale(self.ranges[name])
            self._made[name] = quantizer(Names(self.model), tensor, name, np.asarray(scale), np.asarray(zero))
            self.model.graph.insert_before(before, self._made[name])
        node = self._made[name]
        return [node.outputs[0], *node.inputs[1:]]

    def dequantized(self, tensor: ir.Value, before: ir.Node) -> ir.Value:
        """The tensor quantized and back, inserted likewise."""
        name, inputs = str(tensor.name), self.quantize(tensor, before)
        if name not in self._back:
            node = dequantizer(Names(self.model), inputs, name)
            self.model.graph.insert_before(before, node)
            self._back[name] = node.outputs[0]
        return self._back[name]


def dequantized_weight(
    model: ir.Model,
    linear: Linear,
    codes: npt.NDArray[Any],
    scales: npt.NDArray[np.float32],
    attributes: Mapping[str, int] | None = None,
) -> ir.Value:
    """The weight of a layer as constants in front of it: codes of 8 bits in its shape, scales [output channels]; or as
    other `attributes` of DequantizeLinear say."""
    stem, names = f"{linear.name}.weight", Names(model)
    constants = [names.constant(codes, f"{stem}.{codes.dtype.name}"), names.constant(scales, f"{stem}.scale")]
    node = dequantizer(names, [*constants], stem, attributes or {"axis": linear.out_axis})
    model.graph.insert_before(linear.node, node)
    return node.outputs[0]


# --- The precision of single layers ----------------------------------------------------------------------------------

HigherForm = Literal["dynamic", "float"]
DYNAMIC = "worth the time in which the runtime quantizes its input"
IN_FLOAT = "worth its time in float"
IGNORED = "ignored on request"


@dataclass(frozen=True)
class LayerPrecision:
    """The precision that a layer is computed in, and why.

    `precision`: "int8" stands for FP8 too, where that was asked for; "dynamic" is weights in INT8, and activations that
    the runtime quantizes when it has them; "int4" is weights alone. `evidence`: what a search measured for it. Of
    a layer in INT8, what a search changes in front of it: `scaled`, hidden channels are scaled or copied for any
    gain; `clip`: the share of its input's range that is represented.
    """

    layer: str
    precision: Literal["int8", "dynamic", "int4", "float"]
    reason: str = ""
    evidence: str = ""
    scaled: bool = False
    clip: float | None = None

    def __str__(self) -> str:
        return f"{self.layer} ({self.reason})"


@dataclass(frozen=True)
class Placement:
    """The precision of every layer of a graph, as it is placed for a target; those that no target quantizes first.

    `scores`: the products of queries and keys that are also in INT8. Of INT4: `group`, the number of inputs that share
    a scale, by layer; `embeddings`, tables whose rows are in INT8.
    """

    target: str
    layers: tuple[LayerPrecision, ...]
    scores: tuple[str, ...] = ()
    group: dict[str, int] | None = None
    embeddings: tuple[str, ...] = ()

    def in_precision(self, precision: str) -> dict[str, str]:
        """The reasons of layers in this precision, by name."""
        return {each.layer: each.reason for each in self.layers if each.precision == precision}

    @property
    def int8(self) -> tuple[str, ...]:
        return tuple(self.in_precision("int8"))

    @property
    def int4(self) -> tuple[str, ...]:
        return tuple(self.in_precision("int4"))

    @property
    def dynamic(self) -> dict[str, str]:
        return self.in_precision("dynamic")

    @property
    def float(self) -> dict[str, str]:
        return self.in_precision("float")

    def facts(self, folds: Sequence[Fold] | None = None, hidden: Sequence[Hidden] | None = None) -> dict[str, Any]:
        """What placement.json says of it, and of the folds in front of it where these are known."""
        found: dict[str, Any] = {"target": self.target, "int8": self.int8, "float": self.float}
        if self.group is None:
            found |= {"scores": self.scores, "dynamic": self.dynamic}
        else:
            found |= {"int4": self.int4, "group": self.group, "embeddings": self.embeddings}
        if evidence := [each.evidence for each in self.layers if each.evidence]:
            found["why"] = evidence[0]
        for name, records in (("folds", folds), ("hidden", hidden)):
            if records is not None:
                found[name] = [{**asdict(each), "what": each.what} for each in records]
        return found


# --- The interface that `quantize` needs from a back end: the form in which it is fast with 8 bits --------------------


def _as_it_is(model: ir.Model, ignored: Callable[[str], bool]) -> None:
    """The float graph has the form already."""


def _no_scores(model: ir.Model, layers: Collection[str], known: Container[str]) -> list[Scores]:
    return []


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
    write_int4: puts weights of 4 bits of layers, by name, into a graph of `int4_opset` or a later one, in place; None
        if the back end has no INT4. Before, `int4_shape` brings the float graph into the form that is fast with them,
        as `shape` does; `no_int4`: why a layer has no such kernel, None where it has.
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
    write_int4: Callable[[ir.Model, Sequence[Linear], Mapping[str, GroupedWeight]], None] | None = None
    int4_opset: int = 0
    int4_shape: Callable[[ir.Model, Callable[[str], bool]], None] = _as_it_is
    no_int4: Callable[[Linear], str | None] = lambda linear: None
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


def shape(model: ir.Model, target: str, ignore: Sequence[str] = ()) -> None:
    """Bring the float graph into the form whose INT8 `target` is fast with, in place; exact. To be called first."""
    QUANTIZE[target].shape(model, matching(ignore))


def matching(patterns: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name matches one of these."""
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def choose(model: ir.Model, target: str, ignore: Sequence[str] = (), asked: Iterable[LayerPrecision] = ()) -> Placement:
    """Choose the precision of each layer of the float graph for `target`. Nothing is changed.

    Args:
        ignore: layer names, or shell patterns of them, to leave in float.
        asked: the precision of single layers, as searches found it; of what the target has in INT8, or float.

    Raises:
        TargetError: an unknown target.
        GraphError: a pattern of `ignore` matches no layer, or the graph has none.
    """
    linears = find_linears(model)
    others = unplaced_weights(model)
    if not linears:
        raise GraphError(
            "the graph has no linear or convolution with constant float32 weights, so nothing to quantize",
            found="; ".join(f"{name}: {reason}" for name, reason in list(others.items())[:3]),
            fix="choose the precision fp32, which needs no images",
        )
    left = {**QUANTIZE[target].reasons_for_float(model, linears)}
    left |= dict.fromkeys(ignored([linear.name for linear in linears], ignore), IGNORED)
    found = {each.layer: each for each in asked if each.precision == "float" or each.layer not in left}
    chosen = {name: LayerPrecision(name, "float", reason) for name, reason in others.items()}
    for name in (linear.name for linear in linears):
        plain = LayerPrecision(name, "float", left[name]) if name in left else LayerPrecision(name, "int8")
        chosen[name] = found.get(name, plain)
    return Placement(target, tuple(chosen.values()))


def needs_float(linear: Linear) -> str | None:
    """Why a layer is in float on every target; None if it need not be."""
    if is_ranked(linear):
        return "its outputs are ranked"
    return "its outputs say where features are sampled" if is_place(linear) else None


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
    asked: Iterable[LayerPrecision] = (),
) -> Placement:
    """Write INT8 into the float graph for `target`, in place; or FP8, where the target has that.

    Args:
        ranges: what is to be represented of each layer's input, by tensor name.
        ignore, asked: as in `choose`.
        weights: in INT8, by layer name; any other is rounded to the nearest.

    Raises:
        TargetError, GraphError: as `choose`; or a layer was not calibrated.
        CapabilityError: FP8, or layers that are "dynamic", for a target that has none.
    """
    backend, placement, rounded = QUANTIZE[target], choose(model, target, ignore, asked), dict(weights or {})
    if placement.dynamic and backend.dynamic is None:
        raise CapabilityError(
            f"{target} quantizes no activations by itself", found=", ".join(list(placement.dynamic)[:3])
        )
    linears = find_linears(model)
    chosen = [linear for linear in linears if linear.name in placement.int8]
    check_calibrated(chosen, ranges)
    if fp8:
        if backend.write_fp8 is None:
            raise CapabilityError(f"{target} has no FP8", expected=", ".join(TARGETS[target].precisions))
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
