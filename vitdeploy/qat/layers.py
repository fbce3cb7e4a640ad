"""Layers that train with quantizers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdeploy.graph.analysis.rows import Linear, find_linears, is_dequantized, layer_name
from vitdeploy.graph.passes.folds import takes_pixels
from vitdeploy.graph.values import array_of, only_user, stem
from vitdeploy.spec import PreprocessSpec

# --- Rounding to integers with gradients ------------------------------------------------------------------------------
# The straight-through estimator, and the gradient of learned step sizes.
#
#     q = clip(round(x / step) + zero, low, high)        x^ = step * (q - zero)
#     dx^ / dx = 1 inside the range, 0 outside
#     dx^ / dstep = round(x / step) - x / step inside, low - zero or high - zero outside
#
# Source: LSQ, arXiv 1902.08153, section 2.1; rounding as ONNX's QuantizeLinear, half to even. A step is learned as its
# calibrated value times exp(ratio), as TQT does (arXiv 1903.08066, section 3.3): it stays positive, one learning rate
# fits steps of every size, and weight decay draws it to the calibrated value.


class _FakeQuantize(torch.autograd.Function):
    """`x` and `step` are float32; `step` broadcasts to `x`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, step: Tensor, zero: int, low: int, high: int, gain: float) -> Tensor:
        ctx.save_for_backward(x, step)
        ctx.limits = (zero, low, high, gain)
        return (torch.clamp(torch.round(x / step) + zero, low, high) - zero) * step

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        [gradient], (x, step), (zero, low, high, gain) = gradients, ctx.saved_tensors, ctx.limits
        scaled = x / step
        rounded = torch.round(scaled) + zero
        inside = (rounded >= low) & (rounded <= high)
        of_x = gradient * inside if ctx.needs_input_grad[0] else None
        of_step = None
        if ctx.needs_input_grad[1]:
            slope = torch.where(inside, rounded - zero - scaled, torch.clamp(rounded, low, high) - zero)
            of_step = (gradient * slope).sum_to_size(step.shape) * gain
        return of_x, of_step, None, None, None, None


def fake_quantize(x: Tensor, step: Tensor, zero: int, low: int, high: int, gain: float = 1.0) -> Tensor:
    """Round `x` to step * (low - zero ... high - zero), with the gradients above.

    Args:
        step: positive float32, broadcasts to `x`.
        gain: a factor on the gradient of `step`.
    """
    found: Tensor = _FakeQuantize.apply(x.float(), step, zero, low, high, gain)  # type: ignore[no-untyped-call]
    return found


class LearnedStep(nn.Module):
    """The step of a quantizer, float32 [1] or [channels]: the calibrated one times exp(`log_ratio`), a parameter."""

    calibrated: Tensor

    def __init__(self, calibrated: Tensor, learned: bool = True) -> None:
        super().__init__()
        self.register_buffer("calibrated", calibrated.detach().clone().float())
        self.log_ratio = nn.Parameter(torch.zeros_like(self.calibrated), requires_grad=learned)

    def forward(self) -> Tensor:
        # Always in float32, whatever the module was cast to: a rounded step changes every integer.
        return self.calibrated.float() * self.log_ratio.float().exp()


def lsq_gain(numbers: int, high: int) -> float:
    """The factor on a step's gradient that keeps its updates in proportion to those of weights (LSQ, section 2.2)."""
    return 1 / math.sqrt(max(numbers, 1) * high)


# --- Linears and convolutions of a user's module with the quantizers of a placement -----------------------------------
# A layer keeps its class as a base class, its parameter names, its hooks and its device. Only `forward` is replaced,
# and the submodule `quantization` is added. Each layer consists of parts, the linears that the graph splits it into:
# query, key and value of one merged linear may read different tensors there.


Apply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class InputQuantizer(nn.Module):
    """One quantized tensor of the graph, on the module's side of the folds: x^ = scale * sum of Q(x * factor + offset)
    + shift, where the sum is over the copies of a channel.

    `factor`, `offset`: [channels of the graph]. `scale`, `shift`: [channels of the module]. `source`: [channels of the
    graph], the channel that each one copies, None without copies. All are None if graph and module read the same
    values.
    """

    factor: Tensor | None
    offset: Tensor | None
    scale: Tensor | None
    shift: Tensor | None
    source: Tensor | None

    def __init__(
        self, step: Tensor, zero: int, limits: tuple[int, int], folded: dict[str, Tensor], learned: bool
    ) -> None:
        super().__init__()
        self.step = LearnedStep(step, learned)
        self.zero, self.limits = zero, limits
        for name in ("factor", "offset", "scale", "shift", "source"):
            self.register_buffer(name, folded.get(name))

    def forward(self, x: Tensor, axis: int) -> Tensor:
        """`x` with its channels on `axis`; the result has its shape and type."""
        wide = [-1 if index == axis % x.ndim else 1 for index in range(x.ndim)]
        read = x.float()
        if self.source is not None:
            read = read.index_select(axis, self.source)
        if self.factor is not None and self.offset is not None:
            read = read * self.factor.view(wide) + self.offset.view(wide)
        gain = lsq_gain(x[0].numel(), self.limits[1])
        rounded = fake_quantize(read, self.step(), self.zero, *self.limits, gain)
        if self.source is not None:
            rounded = torch.zeros_like(x, dtype=torch.float32).index_add(axis, self.source, rounded)
        if self.scale is not None and self.shift is not None:
            rounded = rounded * self.scale.view(wide) + self.shift.view(wide)
        return rounded.to(x.dtype)


class WeightQuantizer(nn.Module):
    """Symmetric quantizer for the weights of some output channels, one step per channel. `spread`: the graph's factor
    for each input channel, in a shape that broadcasts to the weight; None for 1."""

    spread: Tensor | None

    def __init__(self, steps: Tensor, largest: int, spread: Tensor | None, learned: bool) -> None:
        super().__init__()
        self.steps = LearnedStep(steps, learned)
        self.largest = largest
        self.register_buffer("spread", spread)

    def forward(self, weight: Tensor) -> Tensor:
        """Return the dequantized weight, [out, in, ...]."""
        read, steps = self._read(weight)
        gain = lsq_gain(weight[0].numel(), self.largest)
        rounded = fake_quantize(read, steps, 0, -self.largest, self.largest, gain)
        return (rounded if self.spread is None else rounded / self.spread).to(weight.dtype)

    def codes(self, weight: Tensor) -> Tensor:
        """Return the quantized weight, int8 [out, in, ...]."""
        read, steps = self._read(weight.detach())
        return torch.clamp(torch.round(read / steps), -self.largest, self.largest).to(torch.int8)

    def _read(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        read = weight.float() if self.spread is None else weight.float() * self.spread
        return read, self.steps().view(-1, *(1,) * (weight.ndim - 1))


class OutputQuantizer(nn.Module):
    """Quantizer for queries or keys that leave their linear as int8: Q((y - shift) * factor) and back, [channels]."""

    factor: Tensor
    shift: Tensor

    def __init__(self, step: Tensor, factor: Tensor, shift: Tensor, learned: bool) -> None:
        super().__init__()
        self.step = LearnedStep(step, learned)
        self.register_buffer("factor", factor)
        self.register_buffer("shift", shift)

    def forward(self, y: Tensor) -> Tensor:
        read = (y.float() - self.shift) * self.factor
        rounded = fake_quantize(read, self.step(), 0, -128, 127, lsq_gain(y[0].numel(), 127))
        return (rounded / self.factor + self.shift).to(y.dtype)


class LayerPart(nn.Module):
    """One linear or convolution of the graph: the output channels `rows` of a module layer, None for all in order.
    Without quantizers it stays float."""

    rows: Tensor | None

    def __init__(
        self,
        name: str,
        rows: Tensor | None,
        read: InputQuantizer | None = None,
        weight: WeightQuantizer | None = None,
        output: OutputQuantizer | None = None,
    ) -> None:
        super().__init__()
        self.name = name
        self.register_buffer("rows", rows)
        self.read, self.weight, self.output = read, weight, output

    def own(self, of_channels: Tensor) -> Tensor:
        """Return this part's rows of a weight or bias of all output channels."""
        return of_channels if self.rows is None else of_channels[self.rows]


class LayerQuantization(nn.Module):
    """The parts of one layer, which together cover its output channels; `order` restores the order of the channels."""

    order: Tensor | None

    def __init__(self, parts: Sequence[LayerPart]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        rows = [part.rows for part in parts if part.rows is not None]
        self.register_buffer("order", torch.argsort(torch.cat(rows)) if rows else None)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, axis: int, apply: Apply) -> Tensor:
        """Return the outputs of `apply(input, weight, bias)` for all parts, joined along the channel axis `axis`."""
        outputs: list[Tensor] = []
        read: dict[int, Tensor] = {}  # parts that read one tensor share its quantizer
        for part in self.parts:
            assert isinstance(part, LayerPart)
            key = id(part.read)
            if key not in read:
                read[key] = x if part.read is None else part.read(x, axis)
            own = part.own(weight)
            own = own if part.weight is None else part.weight(own)
            y = apply(read[key], own, None if bias is None else part.own(bias))
            outputs.append(y if part.output is None else part.output(y))
        if self.order is None:
            return outputs[0]
        return torch.cat(outputs, axis).index_select(axis, self.order)


class QuantizedLinear(nn.Linear):
    """A linear with the quantizers of a placement."""

    quantization: LayerQuantization

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self.quantization(input, self.weight, self.bias, -1, F.linear)
        return found


class QuantizedConv2d(nn.Conv2d):
    """A convolution with the quantizers of a placement."""

    quantization: LayerQuantization

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self.quantization(input, self.weight, self.bias, 1, self._conv_forward)
        return found


LAYERS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: QuantizedLinear, nn.Conv2d: QuantizedConv2d}


def attach(layer: nn.Module, parts: Sequence[LayerPart]) -> None:
    """Give a layer, a plain nn.Linear or nn.Conv2d, the forward of its quantized class, in place."""
    layer.quantization = LayerQuantization(parts).to(next(layer.parameters()).device)
    layer.__class__ = LAYERS[type(layer)]


def detach(module: nn.Module) -> None:
    """Make every quantized layer below a plain one again, in place."""
    plain = {quantized: original for original, quantized in LAYERS.items()}
    for layer in module.modules():
        if type(layer) in plain:
            layer.__class__ = plain[type(layer)]
            del layer.quantization


def quantized_layers(module: nn.Module) -> dict[str, nn.Module]:
    """The quantized layers below, by their paths."""
    kinds = QuantizedLinear | QuantizedConv2d
    return {path: layer for path, layer in module.named_modules() if isinstance(layer, kinds)}


# --- Read a placement: which layers are in INT8, with their integers, steps and biases --------------------------------


Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.int64]
# Suffixes of the names of operators that are inserted before a quantizer.
INSERTED = (".hidden", ".channels")


@dataclass(frozen=True)
class PlacedInput:
    """The uint8 tensor that layers read: x is quantized as round((x * factor + offset) / step) + zero.

    `name`: the tensor's name. `factor`, `offset`: [channels], of the operators before the quantizer; None without them.
    """

    name: str
    step: np.float32
    zero: int
    factor: Floats | None = None
    offset: Floats | None = None


@dataclass(frozen=True)
class PlacedLayer:
    """One linear or convolution; `weight` is dequantized, [out, in, ...] as in PyTorch.

    `codes`: the integers, in the same shape; `steps`: their steps, [out]; both None in float. `read`: None in float,
    and where the runtime quantizes the input. `output`: the step of the layer's output, for queries and keys in INT8.
    """

    name: str
    weight: Floats
    bias: Floats
    codes: npt.NDArray[np.int8] | None = None
    steps: npt.NDArray[np.float32] | None = None
    read: PlacedInput | None = None
    output: np.float32 | None = None
    source: Indices | None = None

    def taken(self, rows: Indices) -> PlacedLayer:
        """Return the layer with only these output channels."""
        codes = None if self.codes is None else self.codes[rows]
        steps = None if self.steps is None else self.steps[rows]
        return replace(self, weight=self.weight[rows], bias=self.bias[rows], codes=codes, steps=steps)

    def reading(self, source: Indices) -> PlacedLayer:
        """Return the layer with these input channels."""
        assert self.codes is not None
        return replace(self, weight=self.weight[:, source], codes=self.codes[:, source])


def read_placed(model: ir.Model) -> dict[str, PlacedLayer]:
    """Return all linears and convolutions of a placement in OpenVINO's or ONNX Runtime's form, by name."""
    layers: dict[str, PlacedLayer] = {}
    for node in model.graph:
        if node.op_type == "MatMulIntegerToFloat":
            layers[layer_name(node)] = _fused(node)
        elif node.op_type in ("MatMul", "Conv") and is_dequantized(node.inputs[1]):
            layers[layer_name(node)] = _explicit(node)
    for linear in find_linears(model):
        weight = linear.weight.T if linear.kind == "matmul" else linear.weight
        bias = np.zeros(len(weight)) if linear.bias is None else linear.bias
        layers[linear.name] = PlacedLayer(linear.name, weight.astype(np.float64), bias.astype(np.float64))
    return layers


def read_norms(model: ir.Model) -> dict[str, tuple[Floats, Floats]]:
    """Return scale and shift of every LayerNormalization that has both, by node name."""
    found = {}
    for node in model.graph:
        if node.op_type == "LayerNormalization" and len(node.inputs) > 2:
            gamma, beta = (array_of(value, overridable=True) for value in node.inputs[1:3])
            if gamma is not None and beta is not None and gamma.ndim == 1:
                found[str(node.name)] = (gamma.astype(np.float64), beta.astype(np.float64))
    return found


def without_copies(layers: Mapping[str, PlacedLayer], second: str, first: str) -> dict[str, PlacedLayer]:
    """Return the layers with the copied hidden channels between two of them merged, as in the float graph; the second
    layer's `source` maps copies to channels."""
    read = layers[second].read
    source = copies_of(read) if read is not None else None
    if source is None:
        return dict(layers)
    one, two = layers[first], layers[second]
    places = np.searchsorted(source, np.arange(source[-1] + 1))  # the first copy of each
    counts = np.bincount(source)
    merged = _merged(two.weight, source) / counts[:, None].T
    assert two.codes is not None
    codes = np.rint(_merged(two.codes.astype(np.float64), source) / counts).astype(np.int8)
    return {**layers, first: one.taken(places), second: replace(two, weight=merged, codes=codes, source=source)}


def copies_of(read: PlacedInput) -> Indices | None:
    """Return the channel that each input channel is a copy of; None without copies.

    The m copies of a channel are adjacent, with offsets from -h to h; a channel without copies has the offset 0.
    """
    if read.offset is None or not read.offset.any():
        return None
    offsets, source, channel, place = read.offset, [], 0, 0
    tiny = 1e-5 * float(np.abs(offsets).max())
    while place < len(offsets):
        end = place
        if abs(offsets[place]) > tiny:
            end = next((i for i in range(place, len(offsets)) if abs(offsets[i] + offsets[place]) <= tiny), place)
        source += [channel] * (end - place + 1)
        channel, place = channel + 1, end + 1
    return np.array(source, np.int64) if channel < len(offsets) else None


def _merged(weight: Floats, source: Indices) -> Floats:
    """The sum of the columns of each channel's copies."""
    merged = np.zeros((weight.shape[0], int(source[-1]) + 1))
    np.add.at(merged.T, source, weight.T)
    return merged


def _fused(node: ir.Node) -> PlacedLayer:
    quantized, codes, _, steps, _, _, *bias = node.inputs
    name, integers = layer_name(node), _array(codes)
    return _layer(name, integers.T, _array(steps), _array(bias[0]) if bias else None, _input(quantized))


def _explicit(node: ir.Node) -> PlacedLayer:
    name, weight = layer_name(node), _producer(node.inputs[1])
    integers, steps = _array(weight.inputs[0]), _array(weight.inputs[1])
    output, bias = node.outputs[0], None
    if node.op_type == "Conv":
        bias = _array(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[2] is not None else None
    else:
        integers = integers.T
        add = only_user(output)
        if add is not None and add.op_type == "Add":
            other = array_of(add.inputs[1] if add.inputs[0] is output else add.inputs[0], overridable=True)
            if other is not None and other.shape == steps.shape:
                bias, output = other, add.outputs[0]
    read = _input(_producer(node.inputs[0]).inputs[0]) if is_dequantized(node.inputs[0]) else None
    layer = _layer(name, integers, steps, bias, read)
    behind = [use.node for use in output.uses() if use.node.op_type == "QuantizeLinear"]
    zero = _array(behind[0].inputs[2]) if behind else None
    if zero is not None and zero.dtype == np.int8:
        return replace(layer, output=np.float32(_array(behind[0].inputs[1])))
    return layer


def _layer(
    name: str,
    codes: npt.NDArray[Any],
    steps: npt.NDArray[Any],
    bias: npt.NDArray[Any] | None,
    read: PlacedInput | None,
) -> PlacedLayer:
    wide = steps.astype(np.float64).reshape(-1, *(1,) * (codes.ndim - 1))
    vector = np.zeros(len(codes)) if bias is None else bias.astype(np.float64)
    return PlacedLayer(name, codes * wide, vector, np.ascontiguousarray(codes), steps, read)


def _input(quantized: ir.Value | None) -> PlacedInput:
    node = _producer(quantized)
    value, step, zero = node.inputs
    assert value is not None
    return PlacedInput(str(value.name), np.float32(_array(step)), int(_array(zero)), *_operators(value))


def _operators(value: ir.Value) -> tuple[Floats | None, Floats | None]:
    """Return factor and offset of the Mul and the Add that `quantization.folds` inserts before a quantizer."""
    found: dict[str, Floats] = {}
    above: ir.Value | None = value
    for operator in ("Add", "Mul"):
        node = above.producer() if above is not None else None
        if node is not None and node.op_type == operator and stem(node).endswith(INSERTED):
            found[operator] = _array(node.inputs[1]).astype(np.float64).ravel()
            above = node.inputs[0]
    if "Mul" not in found:
        return None, None
    return found["Mul"], found.get("Add", np.zeros(len(found["Mul"])))


def _array(value: ir.Value | None) -> npt.NDArray[Any]:
    array = array_of(value, overridable=True)
    assert array is not None
    return array


def _producer(value: ir.Value | None) -> ir.Node:
    node = value.producer() if value is not None else None
    assert node is not None
    return node


# --- Which output channels of the module's layers each linear of the graph consists of --------------------------------
# Rewrites split, merge and reorder linears, and scale their output channels. So they are run on a copy of the module
# with random weights: each column of the graph is then a multiple of exactly one row of one layer.


SEED = 0
# The smallest |cosine| between a column and its row; float32 rounds at 1e-7.
ALIKE = 1 - 1e-5


@dataclass(frozen=True)
class LayerPiece:
    """The output channels `columns` of a linear of the graph are the `rows` of the module's layer at `path`."""

    layer: str
    path: str
    rows: Indices
    columns: Indices


@dataclass(frozen=True)
class ChannelRatio:
    """The scale and shift that the rewrites apply to the output channels of a linear: y * factor + shift, both [out].
    For a layer that reads pixels, the module's input is x = scale * pixel + offset, both [in]."""

    factor: Floats
    shift: Floats
    scale: Floats | None = None
    offset: Floats | None = None


def weighted(module: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """Return the linears and convolutions of a module (subclasses too), by path."""
    return {path: layer for path, layer in module.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}


def randomise(module: nn.Module) -> None:
    """Give all linears and convolutions random weights and biases, in place; shared tensors stay shared."""
    generator, seen = torch.Generator().manual_seed(SEED), set[Tensor]()
    with torch.no_grad():
        for layer in weighted(module).values():
            for tensor in (layer.weight, layer.bias):
                if isinstance(tensor, Tensor) and tensor not in seen:
                    fan_in = max(tensor[0].numel(), 1)
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) / fan_in**0.5)
                    seen.add(tensor)


def match(linears: Iterable[Linear], weights: Mapping[str, Floats]) -> dict[str, list[LayerPiece]]:
    """Return the pieces of each linear of a graph; [] if it matches none of `weights` ([out, in, ...], by path)."""
    return {linear.name: _pieces(linear, weights) for linear in linears}


def _pieces(linear: Linear, weights: Mapping[str, Floats]) -> list[LayerPiece]:
    found = linear.weight.T if linear.kind == "matmul" else linear.weight
    near = sorted(weights, key=lambda path: _distance(linear.name, path))
    fits = [path for path in near if weights[path].shape[1:] == found.shape[1:]]
    rows, left = np.full(len(found), -1), np.ones(len(found), bool)
    owner = np.full(len(found), -1)
    for number, path in enumerate(fits):
        cosine = _cosines(found[left], weights[path])
        best = cosine.argmax(axis=1)
        sure = cosine[np.arange(len(best)), best] > ALIKE
        places = np.flatnonzero(left)[sure]
        rows[places], owner[places] = best[sure], number
        left[places] = False
        if not left.any():
            break
    if left.any():
        return []
    owners = [int(number) for number in dict.fromkeys(owner)]
    columns = {number: np.flatnonzero(owner == number) for number in owners}
    return [LayerPiece(linear.name, fits[number], rows[columns[number]], columns[number]) for number in owners]


def _distance(name: str, path: str) -> tuple[bool, bool, int]:
    """Sort key: the layer of that name first, then layers whose path is a prefix of the name, the longest first."""
    return name != path, not name.startswith(f"{path}."), -len(path)


def _cosines(columns: npt.NDArray[np.floating], rows: Floats) -> Floats:
    """Return |cos| between each column and each row, with all but the first axis flattened. For a convolution only the
    kernels of the first channel count: a layer that reads pixels has one factor per channel."""
    parts = []
    for array in (columns, rows):
        flat = (array[:, 0] if array.ndim > 2 and array[0, 0].size > 2 else array).reshape(len(array), -1)
        length = np.sqrt((flat.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
        parts.append(flat / np.maximum(length, np.finfo(np.float64).tiny))
    return np.asarray(np.abs(parts[0] @ parts[1].T))


def ratio_of(
    linear: Linear,
    pieces: Sequence[LayerPiece],
    weights: Mapping[str, Floats],
    biases: Mapping[str, Floats],
    preprocess: PreprocessSpec | None,
) -> ChannelRatio:
    """Return factor and shift of each output channel, from a graph and the module that it was exported from."""
    found = (linear.weight.T if linear.kind == "matmul" else linear.weight).astype(np.float64)
    bias = np.zeros(len(found)) if linear.bias is None else linear.bias.astype(np.float64)
    own, own_bias = gathered(pieces, weights, len(found)), gathered(pieces, biases, len(found))
    scale = offset = None
    if takes_pixels(linear) and preprocess is not None:
        mean, std = (np.asarray(each, np.float64) for each in (preprocess.mean, preprocess.std))
        scale, offset = 1 / (255 * std), -mean / std
        own_bias = own_bias + np.einsum("oihw,i->o", own, offset)
        own = own * scale.reshape(1, -1, *(1,) * (own.ndim - 2))
    axes = tuple(range(1, own.ndim))
    power = (own**2).sum(axis=axes)
    factor = np.where(power > 0, (found * own).sum(axis=axes) / np.maximum(power, np.finfo(np.float64).tiny), 1.0)
    shift = bias - factor * own_bias
    noise = 1e-4 * max(float(np.abs(bias).max()), float(np.abs(own_bias * factor).max()))
    return ChannelRatio(factor, shift if (np.abs(shift) > noise).any() else np.zeros(len(shift)), scale, offset)


def gathered(pieces: Sequence[LayerPiece], arrays: Mapping[str, Floats], count: int) -> Floats:
    """Return the rows of the layers' arrays [out, ...] in the order of the graph's output channels."""
    first = arrays[pieces[0].path]
    result = np.zeros((count, *first.shape[1:]))
    for piece in pieces:
        result[piece.columns] = arrays[piece.path][piece.rows]
    return result
