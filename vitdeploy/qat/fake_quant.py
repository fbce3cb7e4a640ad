"""Rounding to integers that gradients pass: the straight-through estimator, and the gradient of learned step sizes.

    q = clip(round(x / step) + zero, low, high)        x^ = step * (q - zero)
    dx^ / dx = 1 inside the range, 0 outside
    dx^ / dstep = round(x / step) - x / step inside, low - zero or high - zero outside

Source: LSQ, arXiv 1902.08153, section 2.1; rounding as ONNX's QuantizeLinear, half to even. A step is learned as its
calibrated value times exp(ratio), as TQT does (arXiv 1903.08066, section 3.3): it stays positive, one learning rate
fits steps of every size, and weight decay draws it to the calibrated value.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn


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
    """`x` rounded to step * (low - zero ... high - zero), with the gradients above.

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
        # In float32 whatever the module was cast to: a step that is rounded moves every integer.
        return self.calibrated.float() * self.log_ratio.float().exp()


def lsq_gain(numbers: int, high: int) -> float:
    """The factor on a step's gradient that keeps its updates in proportion to those of weights (LSQ, section 2.2)."""
    return 1 / math.sqrt(max(numbers, 1) * high)
