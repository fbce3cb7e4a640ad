"""Linears and convolutions of a user's module with the quantizers of a placement inside.

A layer keeps its class as a base, its parameters under their names, its hooks and its device: only `forward` is another
one, and a submodule `quantization` holds what is new. Each layer consists of parts, the linears that the graph made of
it: query, key and value of one merged linear may read different tensors there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitdeploy.qat.fake_quant import LearnedStep, fake_quantize, lsq_gain

Apply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class InputQuantizer(nn.Module):
    """One quantized tensor of the graph, on the module's side of the folds: x^ = scale * sum of Q(x * factor + offset)
    + shift, where the sum is over the copies of a channel.

    `factor`, `offset` [channels of the graph], `scale`, `shift` [channels of the module]; `source` [channels of the
    graph]: the channel that each is a copy of, None without copies. All are None where the graph reads what the module
    reads.
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
    """Symmetric integers of the weight of some output channels, one step each; `spread` is the factor of each input
    channel in the graph, in a shape that broadcasts to the weight, None for 1."""

    spread: Tensor | None

    def __init__(self, steps: Tensor, largest: int, spread: Tensor | None, learned: bool) -> None:
        super().__init__()
        self.steps = LearnedStep(steps, learned)
        self.largest = largest
        self.register_buffer("spread", spread)

    def forward(self, weight: Tensor) -> Tensor:
        """A weight [out, in, ...] as its integers stand for it."""
        read, steps = self._read(weight)
        gain = lsq_gain(weight[0].numel(), self.largest)
        rounded = fake_quantize(read, steps, 0, -self.largest, self.largest, gain)
        return (rounded if self.spread is None else rounded / self.spread).to(weight.dtype)

    def codes(self, weight: Tensor) -> Tensor:
        """The integers themselves, int8 [out, in, ...]."""
        read, steps = self._read(weight.detach())
        return torch.clamp(torch.round(read / steps), -self.largest, self.largest).to(torch.int8)

    def _read(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        read = weight.float() if self.spread is None else weight.float() * self.spread
        return read, self.steps().view(-1, *(1,) * (weight.ndim - 1))


class OutputQuantizer(nn.Module):
    """Queries or keys that leave their linear as int8: Q((y - shift) * factor), and back; both [channels]."""

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


class Part(nn.Module):
    """One linear or convolution of the graph: the output channels `rows` of a layer of the module, None for all of
    them in their order. Without quantizers it stays float."""

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
        """The part's own of a weight or bias of all output channels."""
        return of_channels if self.rows is None else of_channels[self.rows]


class Quantization(nn.Module):
    """The parts of one layer, which together are all of its output channels; `order` puts these in their order."""

    order: Tensor | None

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        rows = [part.rows for part in parts if part.rows is not None]
        self.register_buffer("order", torch.argsort(torch.cat(rows)) if rows else None)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None, axis: int, apply: Apply) -> Tensor:
        """What `apply(input, weight, bias)` gives for each part; `axis` is that of channels."""
        outputs: list[Tensor] = []
        read: dict[int, Tensor] = {}  # parts that read one tensor share its quantizer
        for part in self.parts:
            assert isinstance(part, Part)
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

    quantization: Quantization

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self.quantization(input, self.weight, self.bias, -1, F.linear)
        return found


class QuantizedConv2d(nn.Conv2d):
    """A convolution with the quantizers of a placement."""

    quantization: Quantization

    def forward(self, input: Tensor) -> Tensor:
        found: Tensor = self.quantization(input, self.weight, self.bias, 1, self._conv_forward)
        return found


LAYERS: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: QuantizedLinear, nn.Conv2d: QuantizedConv2d}


def attach(layer: nn.Module, parts: Sequence[Part]) -> None:
    """Give a layer, a plain nn.Linear or nn.Conv2d, the forward of its quantized class, in place."""
    layer.quantization = Quantization(parts).to(next(layer.parameters()).device)
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
