"""Which output channels of the module's layers each linear of the graph is made of.

Rewrites split, merge and reorder linears, and scale their output channels. So they are run on a copy of the module
whose weights are random numbers: a column of the graph is then a multiple of one row of one layer, and of no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from vitdeploy.graph.analysis.linears import Linear
from vitdeploy.graph.passes.image_norm import takes_pixels
from vitdeploy.qat.placed import Floats, Indices
from vitdeploy.spec import PreprocessSpec

SEED = 0
# The least cosine of a column and its row; float32 rounds at 1e-7.
ALIKE = 1 - 1e-5


@dataclass(frozen=True)
class Piece:
    """Output channels `columns` of a linear of the graph, in its own order, are `rows` of the layer at `path`."""

    layer: str
    path: str
    rows: Indices
    columns: Indices


@dataclass(frozen=True)
class Ratio:
    """What the rewrites multiply and add behind the output channels of a linear of the graph: y * factor + shift, both
    [out]. Of pixels, `scale` and `offset` [in] give what the module reads for them: x = scale * pixel + offset."""

    factor: Floats
    shift: Floats
    scale: Floats | None = None
    offset: Floats | None = None


def weighted(module: nn.Module) -> dict[str, nn.Linear | nn.Conv2d]:
    """The linears and convolutions of a module by path, of any subclass."""
    return {path: layer for path, layer in module.named_modules() if isinstance(layer, nn.Linear | nn.Conv2d)}


def randomise(module: nn.Module) -> None:
    """Give all linears and convolutions random weights and biases, in place; a tensor of several stays one."""
    generator, seen = torch.Generator().manual_seed(SEED), set[Tensor]()
    with torch.no_grad():
        for layer in weighted(module).values():
            for tensor in (layer.weight, layer.bias):
                if isinstance(tensor, Tensor) and tensor not in seen:
                    fan_in = max(tensor[0].numel(), 1)
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) / fan_in**0.5)
                    seen.add(tensor)


def match(linears: Iterable[Linear], weights: Mapping[str, Floats]) -> dict[str, list[Piece]]:
    """The pieces of each linear of a graph; [] for one that is made of none of `weights` [out, in, ...], by path."""
    return {linear.name: _pieces(linear, weights) for linear in linears}


def _pieces(linear: Linear, weights: Mapping[str, Floats]) -> list[Piece]:
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
    return [Piece(linear.name, fits[number], rows[columns[number]], columns[number]) for number in owners]


def _distance(name: str, path: str) -> tuple[bool, bool, int]:
    """The layer of that name first, then those that its name begins with, the longest first."""
    return name != path, not name.startswith(f"{path}."), -len(path)


def _cosines(columns: npt.NDArray[np.floating], rows: Floats) -> Floats:
    """|cos| between each column and each row, all but the first axis flat. Of a convolution the kernels of the first
    channel alone: those that read pixels have a factor a channel."""
    parts = []
    for array in (columns, rows):
        flat = (array[:, 0] if array.ndim > 2 and array[0, 0].size > 2 else array).reshape(len(array), -1)
        length = np.sqrt((flat.astype(np.float64) ** 2).sum(axis=1, keepdims=True))
        parts.append(flat / np.maximum(length, np.finfo(np.float64).tiny))
    return np.asarray(np.abs(parts[0] @ parts[1].T))


def ratio_of(
    linear: Linear,
    pieces: Sequence[Piece],
    weights: Mapping[str, Floats],
    biases: Mapping[str, Floats],
    preprocess: PreprocessSpec | None,
) -> Ratio:
    """Factor and shift of each output channel, from a graph and the module that it was exported from."""
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
    return Ratio(factor, shift if (np.abs(shift) > noise).any() else np.zeros(len(shift)), scale, offset)


def gathered(pieces: Sequence[Piece], arrays: Mapping[str, Floats], count: int) -> Floats:
    """Rows of the layers' arrays [out, ...] in the order of the graph's output channels."""
    first = arrays[pieces[0].path]
    result = np.zeros((count, *first.shape[1:]))
    for piece in pieces:
        result[piece.columns] = arrays[piece.path][piece.rows]
    return result
