"""Put the quantizers of a placement into the layers of a user's module."""

import copy
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitdeploy.errors import GraphError, InputError
from vitdeploy.graph.analysis.rows import Linear, find_linears
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.models.external.module import copied, require_module
from vitdeploy.qat.float_graph import PlacedGraph, export_like, find_options, read_placement, whole
from vitdeploy.qat.folds import Folds, Known, constant, find_folds, spread
from vitdeploy.qat.layers import (
    LAYERS,
    Floats,
    InputQuantizer,
    LayerPart,
    LayerPiece,
    OutputQuantizer,
    PlacedInput,
    PlacedLayer,
    WeightQuantizer,
    attach,
    gathered,
    match,
    quantized_layers,
    randomise,
    ratio_of,
    read_norms,
    weighted,
    without_copies,
)
from vitdeploy.qat.plan import ATTRIBUTE, Plan, check_same, first_of, numbers_of, plan_of, refuse_types
from vitdeploy.qat.trained import Graphs, place_trained, placed_file
from vitdeploy.quantization.ranges import TINY, largest_weight


def prepare(module: nn.Module, graph: Graphs, *, target: str | None = None) -> nn.Module:
    """Return a copy of a module whose layers compute as those of a placed INT8 graph, with learnable steps.

    Layers that are in INT8 in the graph round their inputs and weights to the graph's integers; gradients pass through
    the straight-through estimator. Steps start at their calibrated values, and weights at the values that the graph's
    integers represent, so that before any training the module in evaluation mode gives the graph's answers. Everything
    else stays: arguments, losses, dropout, hooks, parameter names, device.

    Args:
        module: a float32 module with the weights that the graph was quantized from.
        graph: the result of `vitdeploy.quantize`, its folder or file; or a bundle or its folder.
        target: which of the bundle's engines to use; None: the first in INT8.

    Raises:
        GraphError: the graph is not in INT8, or belongs to another network or other weights.
        InputError: the module is already prepared, not in float32, or wrapped by DataParallel or torch.compile.
        CapabilityError: the graph's form does not support training. ExportError: the module cannot be exported, or it
            bypasses a layer. UserCodeError: `module` is not an nn.Module, or cannot be copied.
    """
    require_module(module, "the argument `module` is not an nn.Module")
    _refuse_wrapped(module)
    refuse_types(module)
    if quantized_layers(module):
        raise InputError(
            "the module is already prepared",
            found=", ".join(list(quantized_layers(module))[:3]),
            fix="prepare the float module, then restore the trained state with load_state_dict",
        )
    placement = read_placement(placed_file(graph, target))
    place = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    prepared = copied(module, type(module).__name__).to(place)
    known, linears, options = _known(prepared, placement)
    _refuse_unmatched(known, prepared)
    folds = find_folds(known, linears, read_norms(placement.model))
    _attach(prepared, known, linears, folds, placement)
    plan = Plan(placement, options, known.pieces, folds, known.placed)
    setattr(prepared, ATTRIBUTE, plan)
    place_trained(known.model, plan, whole(prepared, placement))  # fails now rather than in `export`
    check_same(prepared, module, placement.model, placement, "the prepared module")
    return prepared


def steps(prepared: nn.Module) -> dict[str, nn.Parameter]:
    """Return the learned steps of a prepared module by name, each as the logarithm of its ratio to the calibrated step.
    Use it to freeze them, or to give them their own learning rate. Raises InputError as `export`."""
    plan_of(prepared)
    return {name: each for name, each in prepared.named_parameters() if name.endswith(".log_ratio")}


def _refuse_wrapped(module: nn.Module) -> None:
    inner = next((name for name in ("_orig_mod", "module") if isinstance(getattr(module, name, None), nn.Module)), None)
    wrappers = ("OptimizedModule", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
    if inner is not None and type(module).__name__ in wrappers:
        raise InputError(
            f"the module is wrapped by {type(module).__name__}",
            expected="the module itself",
            fix=f"prepare(model.{inner}, ...), then wrap the result",
        )


def _known(prepared: nn.Module, placement: PlacedGraph) -> tuple[Known, dict[str, Linear], OptimizeOptions | None]:
    """Return the float graph of a probe (the module with random weights) together with the module's own numbers."""
    probe = copy.deepcopy(prepared).float().cpu()
    randomise(probe)
    with tempfile.TemporaryDirectory(prefix="vitdeploy-") as folder:
        file = Path(folder) / "model.onnx"
        export_like(whole(probe, placement), placement, file)
        options, model = find_options(file, placement)
    linears = {linear.name: linear for linear in find_linears(model)}
    tensors, biases = numbers_of(whole(probe, placement))
    pieces = match(linears.values(), tensors)
    found = {name: each for name, each in pieces.items() if each}
    spec = placement.metadata.preprocess
    ratios = {name: ratio_of(linears[name], each, tensors, biases, spec) for name, each in found.items()}
    tensors, biases = numbers_of(whole(prepared, placement))
    weights, own = dict[str, Floats](), dict[str, Floats]()
    layers = dict(placement.layers)
    for name, each in found.items():
        count = len(ratios[name].factor)
        weights[name], own[name] = gathered(each, tensors, count), gathered(each, biases, count)
    for second in linears:
        first = first_of(linears, second)
        if first is not None:
            layers = without_copies(layers, second, first)
    return Known(model, layers, pieces, ratios, weights, own), linears, options


def _refuse_unmatched(known: Known, module: nn.Module) -> None:
    """Raise GraphError for INT8 layers whose weights do not belong to an nn.Linear or nn.Conv2d."""
    lacking = [name for name, each in known.placed.items() if each.codes is not None and not known.pieces[name]]
    if lacking:
        raise GraphError(
            f"INT8 layers of the graph without an nn.Linear or nn.Conv2d in the module: {len(lacking)}",
            found=", ".join(lacking[:4]),
            expected="weights in nn.Linear or nn.Conv2d layers that the module calls (nn.MultiheadAttention does not)",
            fix="quantize with these layers ignored, or write the attention with nn.Linear",
        )


def _attach(
    prepared: nn.Module,
    known: Known,
    linears: Mapping[str, Linear],
    folds: Mapping[str, Folds],
    placement: PlacedGraph,
) -> None:
    top = whole(prepared, placement)
    by_path: dict[str, list[LayerPiece]] = {}
    for pieces in known.pieces.values():
        for piece in pieces:
            by_path.setdefault(piece.path, []).append(piece)
    layers, uses, inputs = weighted(top), _uses(top), dict[str, InputQuantizer]()
    largest = largest_weight(placement.metadata.weight_bits or 8)
    for path, pieces in by_path.items():
        rounded = any(known.placed[piece.layer].codes is not None for piece in pieces)
        if not rounded and not any(folds[piece.layer].absorbs for piece in pieces):
            continue
        layer = layers[path]
        _refuse_layer(path, layer, pieces)
        _start(layer, path, pieces, known, linears, folds, largest, alone=uses[layer.weight] == 1)
        if not rounded:
            continue
        parts = [
            _part(piece, layer, known, linears[piece.layer], folds[piece.layer], inputs, largest) for piece in pieces
        ]
        left = np.setdiff1d(np.arange(len(layer.weight)), np.concatenate([piece.rows for piece in pieces]))
        if len(left):
            parts.append(LayerPart("", torch.from_numpy(left)))
        attach(layer, parts)


def _uses(module: nn.Module) -> dict[Tensor, int]:
    """Return how many layers use each weight."""
    counts: dict[Tensor, int] = {}
    for layer in weighted(module).values():
        assert isinstance(layer.weight, Tensor)
        counts[layer.weight] = counts.get(layer.weight, 0) + 1
    return counts


def _refuse_layer(path: str, layer: nn.Module, pieces: Iterable[LayerPiece]) -> None:
    rows = np.concatenate([piece.rows for piece in pieces])
    if len(np.unique(rows)) < len(rows):
        raise GraphError(
            f"the module calls {path} more than once",
            found=", ".join(piece.layer for piece in pieces),
            expected="one call per layer: each call has its own ranges",
            fix="use a separate layer for each call, or quantize with these layers ignored",
        )
    if type(layer) not in LAYERS:
        raise GraphError(
            f"{path} is a subclass, which may compute something different",
            found=f"{type(layer).__module__}.{type(layer).__qualname__}",
            expected="exactly nn.Linear or nn.Conv2d",
            fix="replace it by one of these with the same weights, or quantize with this layer ignored",
        )


def _start(
    layer: Any,
    path: str,
    pieces: Sequence[LayerPiece],
    known: Known,
    linears: Mapping[str, Linear],
    folds: Mapping[str, Folds],
    largest: int,
    alone: bool,
) -> None:
    """Set weights and biases so that the layer computes as the placement does.

    A weight that would round to another integer is set to the value of the placement's integer. A weight that several
    layers share stays, because their integers differ. A layer gains a bias if the graph has one.
    """
    weight, bias = layer.weight.detach().cpu().double().numpy().copy(), np.zeros(len(layer.weight))
    if layer.bias is not None:
        bias = layer.bias.detach().cpu().double().numpy().copy()
    for piece in pieces:
        placed, own = known.placed[piece.layer], folds[piece.layer]
        columns = piece.columns
        if placed.codes is not None and alone:
            scale, wide = _scale(own, weight[piece.rows], linears[piece.layer]), (-1, *(1,) * (weight.ndim - 1))
            steps = _steps(placed, own, known.weights[piece.layer])[columns].reshape(wide)
            codes = placed.codes[columns].astype(np.float64) * np.sign(own.factor[columns]).reshape(wide)
            read = weight[piece.rows] * scale / steps
            near = np.clip(np.rint(read), -largest, largest) == codes
            weight[piece.rows] = np.where(near, weight[piece.rows], codes * steps / scale)
        factor = np.where(own.factor != 0, own.factor, 1)
        shown = (placed.bias - own.added) / factor - constant(known, linears[piece.layer], own)
        fixed = ~own.free & (own.factor != 0)
        bias[piece.rows] = np.where(fixed[columns], shown[columns], bias[piece.rows])
    with torch.no_grad():
        layer.weight.copy_(torch.from_numpy(weight))
        if layer.bias is None and bias.any():
            new = torch.zeros(len(bias), device=layer.weight.device, dtype=layer.weight.dtype)
            layer.bias = nn.Parameter(new, requires_grad=layer.weight.requires_grad)
        if layer.bias is not None:
            layer.bias.copy_(torch.from_numpy(bias))


def _scale(folds: Folds, weight: Floats, linear: Linear) -> Floats | float:
    return 1.0 if folds.scale is None else spread(folds.scale, weight, linear.groups)


def _steps(placed: PlacedLayer, folds: Folds, weight: Floats) -> Floats:
    """Return the step of each output channel on the module's side, [out]."""
    assert placed.steps is not None
    factor = np.abs(folds.factor)
    whole = np.abs(weight).reshape(len(weight), -1).max(axis=1) / 127
    found = np.where(factor > 0, placed.steps / np.where(factor > 0, factor, 1), whole)
    return np.maximum(found, TINY)


def _part(
    piece: LayerPiece,
    layer: Any,
    known: Known,
    linear: Linear,
    folds: Folds,
    inputs: dict[str, InputQuantizer],
    largest: int,
) -> LayerPart:
    placed = known.placed[piece.layer]
    count, learned = len(layer.weight), bool(layer.weight.requires_grad)
    whole = len(piece.rows) == count and (piece.rows == np.arange(count)).all()
    rows = None if whole else torch.from_numpy(piece.rows)
    if placed.codes is None:
        return LayerPart(piece.layer, rows)
    read = inputs.setdefault(placed.read.name, _quantizer(placed.read, placed, folds)) if placed.read else None
    if read is not None and learned and known.ratios[piece.layer].scale is None:  # pixels are integers already
        read.step.log_ratio.requires_grad_()
    weight = layer.weight.detach().cpu().double().numpy()[piece.rows]
    scale = None
    if folds.scale is not None:
        scale = _float(spread(folds.scale, weight, linear.groups))
    steps = _float(_steps(placed, folds, _all(weight, piece, placed))[piece.columns])
    output = None
    if placed.output is not None:
        factor, moved = (_float(each[piece.columns]) for each in (folds.factor, folds.moved))
        output = OutputQuantizer(torch.tensor([float(placed.output)]), factor, moved, learned)
    return LayerPart(piece.layer, rows, read, WeightQuantizer(steps, largest, scale, learned), output)


def _all(weight: Floats, piece: LayerPiece, placed: PlacedLayer) -> Floats:
    """Return the rows of a piece at their positions in the graph's layer."""
    found = np.zeros((len(placed.bias), *weight.shape[1:]))
    found[piece.columns] = weight
    return found


def _quantizer(read: PlacedInput, placed: PlacedLayer, folds: Folds) -> InputQuantizer:
    folded: dict[str, Tensor] = {}
    if folds.scale is not None and folds.shift is not None:
        folded = {"scale": _float(folds.scale), "shift": _float(folds.shift)}
        factor = 1 / folds.scale if read.factor is None else read.factor
        offset = -folds.shift / folds.scale if read.offset is None else read.offset
        folded |= {"factor": _float(factor), "offset": _float(offset)}
    if placed.source is not None:
        folded["source"] = torch.from_numpy(placed.source)
    return InputQuantizer(torch.tensor([float(read.step)]), read.zero, (0, 255), folded, learned=False)


def _float(array: Floats) -> Tensor:
    return torch.from_numpy(np.asarray(array, np.float32).copy())
