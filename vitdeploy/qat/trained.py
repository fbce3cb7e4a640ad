"""What was learned, written into the float graph of the trained module: folds, integers, steps and biases."""

from __future__ import annotations

import glob
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from torch import nn

from vitdeploy.errors import GraphError
from vitdeploy.graph.analysis.layout import origin
from vitdeploy.graph.analysis.linears import Linear, find_linears
from vitdeploy.graph.edit import Editor, drop_unused
from vitdeploy.graph.passes.image_norm import takes_pixels
from vitdeploy.qat.folds import Folds, spread
from vitdeploy.qat.layers import Part, Quantization
from vitdeploy.qat.match import Piece, gathered, ratio_of, weighted
from vitdeploy.qat.placed import Floats, read_norms
from vitdeploy.qat.plan import Plan, first_of, numbers_of
from vitdeploy.quantization.channel_split import copy_columns, insert_scale
from vitdeploy.quantization.channels import insert_channels
from vitdeploy.quantization.placement import place
from vitdeploy.quantization.ranges import TINY, QuantizedWeight, Range
from vitdeploy.quantization.scores import output_of


@dataclass
class _Layer:
    """One layer in the graph's order of channels, [out, in, ...] and [out]; `codes` and `steps` None in float."""

    weight: Floats
    bias: Floats
    codes: npt.NDArray[np.int8] | None = None
    steps: npt.NDArray[np.float32] | None = None


def place_trained(model: ir.Model, plan: Plan, trained: nn.Module) -> dict[str, Any]:
    """Write what was learned into the trained module's float graph, in place: it is the INT8 graph then. Returns what
    placement.json holds; arguments as `write_trained`.

    Raises:
        GraphError: the graph has other nodes than the placement.
    """
    placement = plan.placement
    ranges, weights = write_trained(model, plan, trained)
    left = [glob.escape(linear.name) for linear in find_linears(model) if plan.layers[linear.name].codes is None]
    dynamic = [name for name, each in plan.layers.items() if each.codes is not None and each.read is None]
    placed = place(model, ranges, placement.target, left, weights, dynamic=dynamic)
    drop_unused(model)
    found, wanted = (
        Counter((node.op_type, str(node.name)) for node in each.graph) for each in (model, placement.model)
    )
    if found != wanted:
        more, less = found - wanted, wanted - found
        raise GraphError(
            "the module's graph has other nodes than the placement",
            found=f"{', '.join(name for _, name in list(more)[:3]) or 'none'} more, "
            f"{', '.join(name for _, name in list(less)[:3]) or 'none'} less",
            wanted="the same nodes: a graph of this release of vitdeploy, without aligned rows or merged tokens",
            fix="export, optimize and quantize this module again",
        )
    return asdict(placed)


def write_trained(
    model: ir.Model, plan: Plan, trained: nn.Module
) -> tuple[dict[str, Range], dict[str, QuantizedWeight]]:
    """Fold the trained module's float graph as the placement was, in place, and give its layers their weights.

    Args:
        model: rewritten and shaped, without quantizers.
        trained: the module with its quantizers, whole.

    Returns: what `placement.place` takes, ranges by tensor and integers by layer.
    """
    editor = Editor(model)
    parts = _parts(trained, plan)
    layers = _layers(editor, plan, trained, parts)
    for name, (scale, shift) in _norms(editor, plan).items():
        node = next(node for node in model.graph if node.name == name)
        gamma, beta = read_norms(model)[name]
        editor.set_input(node, 1, (gamma / scale).astype(np.float32))
        editor.set_input(node, 2, ((beta - shift) / scale).astype(np.float32))
    _insert(editor, plan, layers)
    for linear in list(editor.linears):
        if linear.name in layers:
            layer = layers[linear.name]
            weight = layer.weight.T if linear.kind == "matmul" else layer.weight
            nameless = linear.bias is None and linear.kind == "matmul" and linear.output.is_graph_output()
            editor.set_linear(linear, weight, None if nameless else layer.bias)
    weights = {}
    for linear in editor.linears:
        made = layers.get(linear.name)
        if made is not None and made.codes is not None and made.steps is not None:
            codes = made.codes.T if linear.kind == "matmul" else made.codes
            weights[linear.name] = (np.ascontiguousarray(codes), made.steps)
    return _ranges(editor, plan, parts), weights


def _parts(trained: nn.Module, plan: Plan) -> dict[tuple[str, str], Part]:
    """The parts of all quantized layers by the path of the layer and the name of the graph's."""
    found = {}
    for path, layer in weighted(trained).items():
        quantization = getattr(layer, "quantization", None)
        if isinstance(quantization, Quantization):
            for part in quantization.parts:
                assert isinstance(part, Part)
                found[path, part.name] = part
    return found


def _layers(editor: Editor, plan: Plan, trained: nn.Module, parts: Mapping[tuple[str, str], Part]) -> dict[str, _Layer]:
    """The layers that the placement changes."""
    weights, biases = numbers_of(trained)
    tensors = {path: layer.weight for path, layer in weighted(trained).items()}
    found = {}
    for linear in editor.linears:
        pieces = plan.pieces.get(linear.name) or ()
        if not pieces:
            continue
        folds, count = plan.folds[linear.name], len(plan.folds[linear.name].factor)
        if plan.layers[linear.name].codes is None and not folds.changed:
            continue
        ratio = ratio_of(linear, pieces, weights, biases, plan.placement.metadata.preprocess)
        factor = ratio.factor * folds.own
        added = np.zeros(count) if folds.absorbs else np.where(folds.free, 0.0, ratio.shift)
        weight, own = gathered(pieces, weights, count), gathered(pieces, biases, count)
        layer = _Layer(weight, own)
        if plan.layers[linear.name].codes is not None:
            _round(layer, linear, folds, pieces, parts, tensors, factor)
        wide = (-1, *(1,) * (weight.ndim - 1))
        moved = 0.0
        if folds.scale is not None and folds.shift is not None:
            spreads = spread(folds.shift, weight, linear.groups)
            moved = (layer.weight * spreads).sum(axis=tuple(range(1, weight.ndim)))
            layer.weight = layer.weight * spread(folds.scale, weight, linear.groups)
        layer.weight = layer.weight * factor.reshape(wide)
        layer.bias = factor * (own + moved - folds.moved) + added
        if takes_pixels(linear) and layer.steps is not None:  # the writer takes them to the unit range itself
            layer.weight, layer.steps = layer.weight / 255, layer.steps / np.float32(255)
        found[linear.name] = layer
    return found


def _round(
    layer: _Layer,
    linear: Linear,
    folds: Folds,
    pieces: Sequence[Piece],
    parts: Mapping[tuple[str, str], Part],
    tensors: Mapping[str, torch.Tensor],
    factor: Floats,
) -> None:
    """Put the weights in their integers' place: `weight` as these stand for it in the module."""
    codes, steps = np.zeros(layer.weight.shape, np.int8), np.zeros(len(layer.weight))
    for piece in pieces:
        part = parts[piece.path, piece.layer]
        assert part.weight is not None
        with torch.no_grad():
            codes[piece.columns] = part.weight.codes(part.own(tensors[piece.path])).cpu().numpy()
            steps[piece.columns] = part.weight.steps().cpu().numpy()
    wide = (-1, *(1,) * (layer.weight.ndim - 1))
    layer.weight = codes * steps.reshape(wide)
    if folds.scale is not None:
        layer.weight = layer.weight / spread(folds.scale, layer.weight, linear.groups)
    layer.codes = (codes * np.sign(factor).reshape(wide)).astype(np.int8)
    layer.steps = np.maximum(steps * np.abs(factor), TINY).astype(np.float32)


def _norms(editor: Editor, plan: Plan) -> dict[str, tuple[Floats, Floats]]:
    """The scale and shift that each LayerNormalization takes, by the name of its node."""
    found = {}
    for linear in editor.linears:
        folds, read = plan.folds.get(linear.name), plan.layers[linear.name].read
        inserted = read is not None and read.factor is not None
        if folds is None or folds.absorbs or inserted or folds.scale is None or folds.shift is None:
            continue
        norm = origin(linear.input).producer()
        if norm is not None and norm.op_type == "LayerNormalization":
            found[str(norm.name)] = folds.scale, folds.shift
    return found


def _insert(editor: Editor, plan: Plan, layers: dict[str, _Layer]) -> None:
    """The operators in front of quantizers, and the copies of hidden channels."""
    done = set[str]()
    for linear in list(editor.linears):
        placed = plan.layers[linear.name]
        read = placed.read
        if read is None or read.factor is None or read.offset is None or read.name in done:
            continue
        done.add(read.name)
        if linear.kind == "conv":
            readers = [each for each in editor.linears if each.input is linear.input and each.name in layers]
            insert_channels(editor, readers, read.factor, read.offset)
            continue
        if placed.source is not None:
            own = {each.name: each for each in editor.linears}
            first = first_of(own, linear.name)
            assert first is not None
            copy_columns(editor, own[first], linear, placed.source)
            _copy(layers, first, linear.name, placed.source)
        insert_scale(editor, linear, read.factor, read.offset)


def _copy(layers: dict[str, _Layer], first: str, second: str, source: npt.NDArray[np.int64]) -> None:
    one, two = layers.get(first), layers[second]
    if one is not None:
        one.weight, one.bias = one.weight[source], one.bias[source]
        if one.codes is not None and one.steps is not None:
            one.codes, one.steps = one.codes[source], one.steps[source]
    two.weight = two.weight[:, source]
    assert two.codes is not None
    two.codes = two.codes[:, source]


def _ranges(editor: Editor, plan: Plan, parts: Mapping[tuple[str, str], Part]) -> dict[str, Range]:
    """The range of every tensor that is quantized, by the names that `place` knows it by."""
    ranges = {}
    for linear in editor.linears:
        for piece in plan.pieces.get(linear.name) or ():
            part = parts.get((piece.path, piece.layer))
            if part is None or part.read is None:
                continue
            with torch.no_grad():
                step, (low, high) = float(part.read.step()), part.read.limits
                input_range = Range((low - part.read.zero) * step, (high - part.read.zero) * step)
                ranges[_read(linear)] = input_range
                if part.output is not None:
                    of_output = float(part.output.step())
                    ranges[output_of(linear)] = Range(-127 * of_output, 127 * of_output)
    return ranges


def _read(linear: Linear) -> str:
    value = linear.node.inputs[0]
    assert value is not None
    return str(value.name)
