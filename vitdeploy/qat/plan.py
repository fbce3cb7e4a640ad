"""What a prepared module carries with it: the placement, and how it came from the module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vitdeploy.errors import InputError
from vitdeploy.graph.analysis.rows import Linear
from vitdeploy.graph.passes.optimize import OptimizeOptions
from vitdeploy.qat.float_graph import Placement
from vitdeploy.qat.folds import Folds
from vitdeploy.qat.layers import Floats, Piece, PlacedLayer, weighted

ATTRIBUTE = "_vitdeploy_qat"


class Plan:
    """What `export` needs of a prepared module. Copies of a module share it."""

    def __init__(
        self,
        placement: Placement,
        options: OptimizeOptions | None,
        pieces: Mapping[str, Sequence[Piece]],
        folds: Mapping[str, Folds],
        layers: Mapping[str, PlacedLayer],
    ) -> None:
        self.placement = placement
        self.options = options
        self.pieces = pieces
        self.folds = folds
        self.layers = layers

    def __deepcopy__(self, memo: dict[int, Any]) -> Plan:
        return self


def plan_of(module: nn.Module) -> Plan:
    """Raises InputError if a module is not a prepared one."""
    plan = getattr(module, ATTRIBUTE, None)
    if not isinstance(plan, Plan):
        raise InputError(
            "the module is not prepared",
            found=type(module).__name__,
            wanted="what vitdeploy.qat.prepare gave, or a copy of it",
        )
    return plan


def refuse_types(module: nn.Module) -> None:
    """Raise InputError if the parameters of a module are not all in float32."""
    other = {name: each.dtype for name, each in module.named_parameters() if each.dtype != torch.float32}
    if other:
        name, kind = next(iter(other.items()))
        raise InputError(
            "the module is not in float32",
            found=f"{name} in {str(kind).removeprefix('torch.')}",
            wanted="float32: a rounded weight or step is another integer",
            fix="module.float(); torch.autocast trains such a module in mixed precision",
        )


def first_of(linears: Mapping[str, Linear], second: str) -> str | None:
    """The layer in front of the activation that `second` reads."""
    node = linears[second].input.producer()
    source = node.inputs[0] if node is not None and node.inputs else None
    return next((name for name, each in linears.items() if each.output is source), None)


def numbers_of(module: nn.Module) -> tuple[dict[str, Floats], dict[str, Floats]]:
    """Weights and biases of all layers by path; zeros where there is no bias."""
    weights, biases = {}, {}
    for path, layer in weighted(module).items():
        weight, bias = layer.weight, layer.bias
        assert isinstance(weight, Tensor)
        weights[path] = weight.detach().cpu().numpy().astype(np.float64)
        own = bias.detach().cpu().numpy() if isinstance(bias, Tensor) else np.zeros(len(weight))
        biases[path] = own.astype(np.float64)
    return weights, biases
