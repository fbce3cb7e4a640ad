"""Place Q/DQ nodes in a graph for a target, and record the placement."""

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

# --- The forms of quantized tensors and weights in all placements -----------------------------------------------------


def quantizer(names: Names, value: ir.Value, name: str, scale: npt.NDArray[Any], zero: npt.NDArray[Any]) -> ir.Node:
    """A QuantizeLinear of a tensor, not inserted yet; the names of its constants and outputs begin with `name`."""
    inputs = [value, names.constant(scale, f"{name}.scale"), names.constant(zero, f"{name}.zero_point")]
    return names.node("QuantizeLinear", inputs, f"{name}/QuantizeLinear", output=f"{name}/quantized")


def quantize_pair(
    model: ir.Model, value: ir.Value, name: str, scale: npt.NDArray[Any], zero: npt.NDArray[Any]
) -> list[ir.Node]:
    """A QuantizeLinear of a tensor and the DequantizeLinear after it, not inserted yet."""
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
        """[quantized uint8 tensor, scale, zero point]; inserted before the first reader."""
        name = str(tensor.name)
        if name not in self._made:
            scale, zero = activation_scale(self.ranges[name])
            self._made[name] = quantizer(Names(self.model), tensor, name, np.asarray(scale), np.asarray(zero))
            self.model.graph.insert_before(before, self._made[name])
        node = self._made[name]
        return [node.outputs[0], *node.inputs[1:]]

    def dequantized(self, tensor: ir.Value, before: ir.Node) -> ir.Value:
        """The tensor quantized and dequantized, inserted before the first reader."""
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
    """Insert the weight of a layer as dequantized constants: 8-bit codes in its shape, scales [output channels]; other
    layouts by `attributes` of DequantizeLinear."""
    stem, names = f"{linear.name}.weight", Names(model)
    constants = [names.constant(codes, f"{stem}.{codes.dtype.name}"), names.constant(scales, f"{stem}.scale")]
    node = dequantizer(names, [*constants], stem, attributes or {"axis": linear.out_axis})
    model.graph.insert_before(linear.node, node)
    return node.outputs[0]


# --- The precision of single layers ----------------------------------------------------------------------------------

HigherForm = Literal["dynamic", "float"]
DYNAMIC = "dynamic quantization is worth its extra time"
IN_FLOAT = "float is worth its extra time"
IGNORED = "ignored on request"


@dataclass(frozen=True)
class LayerPrecision:
    """The precision of a layer, and the reason.

    `precision`: "int8" includes FP8, if requested; "dynamic" is weights in INT8 with activations that the runtime
    quantizes at run time; "int4" is weights only. `evidence`: the measurement of a search. Changes of a search before
    an INT8 layer: `scaled`, hidden channels are scaled or copied for any gain; `clip`, the share of its input's range
    that is represented.
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
    """The precision of every layer of a graph placed for a target; layers that no target quantizes come first.

    `scores`: the products of queries and keys that are also in INT8. For INT4: `group`, the number of inputs that share
    a scale, by layer; `embeddings`, tables whose rows are in INT8.
    """

    target: str
    layers: tuple[LayerPrecision, ...]
    scores: tuple[str, ...] = ()
    group: dict[str, int] | None = None
    embeddings: tuple[str, ...] = ()

    def in_precision(self, precision: str) -> dict[str, str]:
        """The reasons of layers in this precision, by name."""
        return {layer.layer: layer.reason for layer in self.layers if layer.precision == precision}

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
        """The contents of placement.json, with the folds if they are given."""
        found: dict[str, Any] = {"target": self.target, "int8": self.int8, "float": self.float}
        if self.group is None:
            found |= {"scores": self.scores, "dynamic": self.dynamic}
        else:
            found |= {"int4": self.int4, "group": self.group, "embeddings": self.embeddings}
        if evidence := [layer.evidence for layer in self.layers if layer.evidence]:
            found["why"] = evidence[0]
        for name, records in (("folds", folds), ("hidden", hidden)):
            if records is not None:
                found[name] = [{**asdict(record), "what": record.what} for record in records]
        return found


# --- The interface of a back end for `quantize`: the form in which it is fast with 8 bits -----------------------------


def _as_it_is(model: ir.Model, ignored: Callable[[str], bool]) -> None:
    """Leave the float graph unchanged, for back ends without a form of their own."""


def _no_scores(model: ir.Model, layers: Collection[str], known: Container[str]) -> list[Scores]:
    return []


@dataclass(frozen=True)
class PlacementBackend:
    """The INT8 form of a back end.

    gain_threshold: the minimum gain that justifies another operator, since operators cost time.
    reasons_for_float: the layers to keep in float, by name, with the reason; all others are computed in INT8.
    write: quantizes layers in place, from their inputs' ranges by tensor name and their rounded weights by layer name;
        returns the products of queries and keys that are also in INT8.
    shape: rewrites the float graph into the form that is fast in INT8, in place; exact. Ignored layers stay unchanged.
    scores_in_int8: takes the layers in INT8 and the observed tensors; returns the attentions whose queries and keys
        leave their linears as int8.
    dynamic: whether a linear with weights in INT8 and a float input runs in INT8, because the runtime quantizes the
        input at run time (dynamic quantization); None if the runtime cannot.
    write_fp8: like `write`, in FP8, with its own rounding of weights; None if the back end has no FP8.
    write_int4: writes 4-bit weights of layers, by name, into a graph of `int4_opset` or later, in place; None if the
        back end has no INT4. Before it, `int4_shape` rewrites the float graph as `shape` does; `no_int4`: why a layer
        has no INT4 kernel, None if it has one.
    refuse: raises CapabilityError if a graph with this name cannot be built for these shapes.
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


# --- Placement of Q/DQ: one placement per target, all from the same calibration ---------------------------------------
# The part shared by all targets: the choice of layers, and its record. `place_<back end>.py` has the form for a target.


def shape(model: ir.Model, target: str, ignore: Sequence[str] = ()) -> None:
    """Rewrite the float graph into the form whose INT8 is fast on `target`, in place; exact. Call it first."""
    QUANTIZE[target].shape(model, matching(ignore))


def matching(patterns: Sequence[str]) -> Callable[[str], bool]:
    """A function that tells whether a name matches one of these shell patterns."""
    return lambda name: any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def choose(model: ir.Model, target: str, ignore: Sequence[str] = (), asked: Iterable[LayerPrecision] = ()) -> Placement:
    """Choose the precision of each layer of the float graph for `target`. The graph is not changed.

    Args:
        ignore: layer names, or shell patterns of them, to keep in float.
        asked: the precision of single layers from searches; only float applies to layers that the target keeps in
            float.

    Raises:
        TargetError: an unknown target.
        GraphError: a pattern of `ignore` matches no layer, or the graph has no layer to quantize.
    """
    linears = find_linears(model)
    others = unplaced_weights(model)
    if not linears:
        raise GraphError(
            "the graph has no linear or convolution with constant float32 weights, so there is nothing to quantize",
            found="; ".join(f"{name}: {reason}" for name, reason in list(others.items())[:3]),
            fix="choose the precision fp32",
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
    """Why a layer is in float on every target; None if it does not have to be."""
    if is_ranked(linear):
        return "its outputs are ranked"
    return "its outputs are sampling positions" if is_place(linear) else None


def ignored(names: Sequence[str], patterns: Sequence[str]) -> set[str]:
    """The layers whose names match `patterns`.

    Raises:
        GraphError: a pattern matches no layer.
    """
    unmatched = [pattern for pattern in patterns if not fnmatch.filter(names, pattern)]
    if unmatched:
        raise GraphError(
            f"no layer matches {', '.join(unmatched)}",
            found=f"{', '.join(names[:6])} ...",
            fix="use layer names as printed by `vitdeploy inspect`; * matches any text",
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
    """Quantize the float graph to INT8 for `target`, in place; or to FP8, if the target supports it.

    Args:
        ranges: the range of each layer's input, by tensor name.
        ignore, asked: as in `choose`.
        weights: INT8 weights by layer name; the others are rounded to the nearest.

    Raises:
        TargetError, GraphError: as `choose`; or a layer was not calibrated.
        CapabilityError: the target does not support FP8, or "dynamic" layers.
    """
    backend, placement, rounded = QUANTIZE[target], choose(model, target, ignore, asked), dict(weights or {})
    if placement.dynamic and backend.dynamic is None:
        raise CapabilityError(
            f"{target} does not support dynamic quantization", found=", ".join(list(placement.dynamic)[:3])
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
