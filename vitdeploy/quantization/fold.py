"""The interface of a fold before INT8: a function that changes a float graph in place and keeps what it computes.

    fold(model, statistics, request) -> (the statistics of the model as it is now, what was done)

It is exact up to the rounding of new float32 weights, and folds only where that reduces the expected error. Each fold
has its own file, and a place in `prepare.FOLDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import onnx_ir as ir

from vitdeploy.quantization.statistics import Statistics
from vitdeploy.spec import WeightBits


@dataclass(frozen=True)
class GainThreshold:
    """The least factors of the expected error that justify a Mul behind the activation, and copies with an Add and some
    columns more. Operators cost time, so each target has its own."""

    scale: float
    copies: float


@dataclass(frozen=True)
class FoldRequest:
    """The request that folds serve.

    layers: names of the layers that will be quantized; tensors that none of these reads stay unchanged.
    threshold: the gain that justifies an operator on the target.
    any_gain: the layers in front of which any gain does.
    bits: bits of the weights.
    """

    layers: Collection[str]
    threshold: GainThreshold
    any_gain: Collection[str] = ()
    bits: WeightBits = 8


@dataclass(frozen=True)
class Fold:
    """The fold in front of `layers`: SmoothQuant's exponent (None: no scale), and whether channels were shifted to the
    middle of their ranges. `gain`: the expected squared error before, over that after."""

    layers: tuple[str, ...]
    alpha: float | None
    shifted: bool
    gain: float

    @property
    def what(self) -> str:
        words = ["channels shifted"] if self.shifted else []
        return ", ".join(words + ([f"channels scaled, exponent {self.alpha:g}"] if self.alpha is not None else []))


@dataclass(frozen=True)
class Hidden:
    """Changes of the input channels of `layer`: SmoothQuant's exponent (None: no scale), and the number of copies of
    each split channel. `gain`: the expected squared error before, over that after."""

    layer: str
    alpha: float | None
    copies: dict[int, int]
    gain: float

    @property
    def what(self) -> str:
        words = [f"hidden channels scaled, exponent {self.alpha:g}"] if self.alpha is not None else []
        splits = f"{len(self.copies)} hidden channels split into {sum(self.copies.values())} copies"
        return ", ".join(words + ([splits] if self.copies else []))


Folding: TypeAlias = Callable[
    [ir.Model, Mapping[str, Statistics], FoldRequest],
    tuple[dict[str, Statistics], Sequence[Fold | Hidden]],
]
