"""Placement of Q/DQ: one placement per target, each from the same calibration.

This module holds what all targets share: the choice of layers, and its record. The form that is fast on a target is in
`place_<back end>.py`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx_ir as ir

from vitdeploy.backends import TARGETS
from vitdeploy.errors import CapabilityError, GraphError
from vitdeploy.graph.analysis.linears import Linear, find_linears, unplaced_weights
from vitdeploy.quantization.backend import QUANTIZE
from vitdeploy.quantization.insert import dequantized_weight
from vitdeploy.quantization.ranges import QuantizedWeight, Range, quantize_weight

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
