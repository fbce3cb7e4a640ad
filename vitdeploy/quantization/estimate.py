"""Estimate how much memory a calibration will take, before it starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from vitdeploy.graph.values import weight_bytes
from vitdeploy.quantization.observer import covariance_pays
from vitdeploy.quantization.probe import observed_tensors

FLOAT = 4
# Copies of the weights while ONNX Runtime loads them: as read, serialized, in the session, packed for matrix products.
COPIES = 4


@dataclass(frozen=True)
class Memory:
    """Bytes that a calibration takes on top of the process itself, by purpose."""

    graph: int
    activations: int
    covariances: int

    @property
    def total(self) -> int:
        return self.graph + self.activations + self.covariances


def estimate(model: ir.Model, batch: int, images: int) -> Memory:
    """The memory for observing the images in batches of `batch`. Tensors of unknown shape are not counted."""
    shapes = {str(value.name): _shape(value, batch) for value in model.graph.inputs}
    shapes |= {str(value.name): _shape(value, batch) for node in model.graph for value in node.outputs}
    covariances, observed = 0, 0
    for name, role in observed_tensors(model).items():
        shape = shapes[name]
        observed += math.prod(shape)
        channels = shape[role.axis] if len(shape) > 1 else 0
        rows = math.prod(shape) // max(channels * batch, 1)
        if role.rounds and channels and covariance_pays(max(rows, 1), channels, images):
            covariances += channels**2
    held = {name: math.prod(shape) for name, shape in shapes.items()}
    widest = max(sum(held.get(str(v.name), 0) for v in (*node.inputs, *node.outputs) if v) for node in model.graph)
    # All observed tensors are held at once, and the widest node; every covariance twice at the end, as sum and result.
    return Memory(COPIES * weight_bytes(model), FLOAT * (observed + widest), 2 * FLOAT * covariances)


def _shape(value: ir.Value, batch: int) -> tuple[int, ...]:
    """The shape, with open sizes taken as the batch; (0,) if unknown."""
    if value.shape is None:
        return (0,)
    return tuple(size if isinstance(size, int) else batch for size in value.shape)
